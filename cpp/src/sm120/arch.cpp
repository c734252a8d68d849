// SM120 (Blackwell, compute capability 12.0 and 12.1) as data.
#include "sm120/arch.hpp"

#include "architecture.hpp"
#include "block_scale_limits.hpp"
#include "cost.hpp"

namespace fp4gemm {

extern KernelList const kSm120DenseBf16, kSm120DenseFp16, kSm120DenseFp32;
extern KernelList const kSm120GroupedBf16, kSm120GroupedFp16, kSm120GroupedFp32;
extern KernelList const kSm120DenseGatedBf16, kSm120DenseGatedFp16;
extern KernelList const kSm120GroupedGatedBf16, kSm120GroupedGatedFp16;

namespace sm120 {
namespace {

KernelList const* const kLists[] = {
    &kSm120DenseBf16,
    &kSm120DenseFp16,
    &kSm120DenseFp32,
    &kSm120GroupedBf16,
    &kSm120GroupedFp16,
    &kSm120GroupedFp32,
    &kSm120DenseGatedBf16,
    &kSm120DenseGatedFp16,
    &kSm120GroupedGatedBf16,
    &kSm120GroupedGatedFp16,
    nullptr,
};

// The tensor-core rate follows from the published peak of an RTX 5090 (170 SMs), and the traffic from L2 is a
// guess; this project has measured neither. The members of the family differ in the number of SMs, which the
// device tells, and in the bandwidth of their memory, from 0.27 TB/s (GB10) to 1.8 TB/s (RTX 5090): all tiles
// read the same operands from it, so that it does not matter for the choice between them.
constexpr Machine kMachine{2048, 0.5625, 20, 1200, 0};

double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted) {
  return tile_clocks(kMachine, kernel.info, num_sms, wanted);
}

}  // namespace

extern Architecture const architecture;
Architecture const architecture{kArch,  FP4GEMM_ARCH_DEVICES, /*is_executed=*/false,
                                kLists, &estimate_clocks,     &block_scale_limits::check_problem};

}  // namespace sm120
}  // namespace fp4gemm
