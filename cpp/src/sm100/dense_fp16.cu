// The dense SM100 kernels with fp16 output.
#include "sm100/dense.cuh"

namespace fp4gemm {
extern KernelList const kSm100DenseFp16;
KernelList const kSm100DenseFp16 = make_list(kSm100DenseKernels<cutlass::half_t>);
}  // namespace fp4gemm
