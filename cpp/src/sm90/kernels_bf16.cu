// The SM90 kernels with bf16 output.
#include "sm90/kernels.cuh"

namespace fp4gemm {
extern KernelList const kSm90DenseBf16, kSm90GroupedBf16;
KernelList const kSm90DenseBf16 = make_list(kSm90DenseKernels<cutlass::bfloat16_t>);
KernelList const kSm90GroupedBf16 = make_list(kSm90GroupedKernels<cutlass::bfloat16_t>);
}  // namespace fp4gemm
