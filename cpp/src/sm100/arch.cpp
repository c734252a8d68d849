// SM100 (Blackwell, compute capability 10.0 and 10.3): its kernel lists.
#include "architecture.hpp"

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

}  // namespace

extern Architecture const architecture;
Architecture const architecture{FP4GEMM_ARCH, FP4GEMM_ARCH_DEVICES, /*is_executed=*/false, kLists};

}  // namespace sm100
}  // namespace fp4gemm
