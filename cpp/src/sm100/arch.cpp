// SM100 (Blackwell, compute capability 10.0 and 10.3) as data.
#include "sm100/arch.hpp"

#include "architecture.hpp"
#include "block_scale_limits.hpp"
#include "cost.hpp"

namespace fp4gemm {

extern KernelList const kSm100DenseBf16, kSm100DenseFp16, kSm100DenseFp32;
extern KernelList const kSm100GroupedBf16, kSm100GroupedFp16, kSm100GroupedFp32;
extern KernelList const kSm100DenseGatedBf16, kSm100DenseGatedFp16;
extern KernelList const kSm100GroupedGatedBf16, kSm100GroupedGatedFp16;

namespace sm100 {
namespace {

KernelList const* const kLists[] = {
    &kSm100DenseBf16,
    &kSm100DenseFp16,
    &kSm100DenseFp32,
    &kSm100GroupedBf16,
    &kSm100GroupedFp16,
    &kSm100GroupedFp32,
    &kSm100DenseGatedBf16,
    &kSm100DenseGatedFp16,
    &kSm100GroupedGatedBf16,
    &kSm100GroupedGatedFp16,
    nullptr,
};

// These figures follow from published peaks; this project has not measured them.
constexpr Machine kMachine{16384, 0.5625, 80, 1500, 256};

double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted) {
  return tile_clocks(kMachine, kernel.info, num_sms, wanted);
}

}  // namespace

extern Architecture const architecture;
Architecture const architecture{kArch,   FP4GEMM_ARCH_DEVICES, /*is_executed=*/false,
                                kLists,  &estimate_clocks,     &block_scale_limits::check_problem,
                                nullptr, /*has_fp4=*/true};

}  // namespace sm100
}  // namespace fp4gemm
