// The dense SM90 kernels with fp16 output.
#include "sm90/dense.cuh"

namespace fp4gemm {
extern KernelList const kSm90DenseFp16;
KernelList const kSm90DenseFp16 = make_list(kSm90DenseKernels<cutlass::half_t>);
}  // namespace fp4gemm
