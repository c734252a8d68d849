// The dense SM100 kernels with bf16 output.
#include "sm100/dense.cuh"

namespace fp4gemm {
extern KernelList const kSm100DenseBf16;
KernelList const kSm100DenseBf16 = make_list(kSm100DenseKernels<cutlass::bfloat16_t>);
}  // namespace fp4gemm
