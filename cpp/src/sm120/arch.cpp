// SM120 (Blackwell, compute capability 12.0 and 12.1) as data.
#include "sm120/arch.hpp"

#include <algorithm>

#include "architecture.hpp"
#include "block_scale_limits.hpp"
#include "cost.hpp"
#include "sm120/prepacked_cost.hpp"

namespace fp4gemm {

extern KernelList const kSm120DenseLargeBf16, kSm120DenseBf16, kSm120DenseFp16, kSm120DenseFp32;
extern KernelList const kSm120GroupedBf16, kSm120GroupedFp16, kSm120GroupedFp32;
extern KernelList const kSm120DenseGatedBf16, kSm120DenseGatedFp16;
extern KernelList const kSm120GroupedGatedBf16, kSm120GroupedGatedFp16;
extern KernelList const kSm120SwappedBf16;
extern KernelList const kSm120PrepackedFp16, kSm120PrepackedBf16;

namespace sm120 {
namespace {

KernelList const* const kLists[] = {
    &kSm120DenseLargeBf16,   &kSm120DenseBf16,        &kSm120DenseFp16,
    &kSm120DenseFp32,        &kSm120GroupedBf16,      &kSm120GroupedFp16,
    &kSm120GroupedFp32,      &kSm120DenseGatedBf16,   &kSm120DenseGatedFp16,
    &kSm120GroupedGatedBf16, &kSm120GroupedGatedFp16, &kSm120SwappedBf16,
    &kSm120PrepackedFp16,    &kSm120PrepackedBf16,    nullptr,
};

// The tensor-core rate follows from the published peak of an RTX 5090 (170 SMs), and the traffic from L2 is a
// guess; this project has measured neither.
constexpr Machine kMachine{2048, 0.5625, 20, 1200, 0};

double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted) {
  if (is_prepacked(kernel.operands)) {
    return prepacked_clocks(kernel, num_sms, wanted);
  }
  // Both kinds of kernels have the same bound of device memory. Among tiles that all reach it, the one with
  // the least other work is the choice.
  double const clocks = tile_clocks(kMachine, kernel.info, num_sms, wanted);
  return std::max(clocks, weight_clocks(num_sms, wanted)) + 1e-3 * clocks;
}

}  // namespace

extern Architecture const architecture;
Architecture const architecture{kArch,   FP4GEMM_ARCH_DEVICES, /*is_executed=*/false,
                                kLists,  &estimate_clocks,     &block_scale_limits::check_problem,
                                nullptr, /*has_fp4=*/true};

}  // namespace sm120
}  // namespace fp4gemm
