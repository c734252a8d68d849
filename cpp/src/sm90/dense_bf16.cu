// The dense SM90 kernels with bf16 output.
#include "sm90/dense.cuh"

namespace fp4gemm {
extern KernelList const kSm90DenseBf16;
KernelList const kSm90DenseBf16 = make_list(kSm90DenseKernels<cutlass::bfloat16_t>);
}  // namespace fp4gemm
