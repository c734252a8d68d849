// The dense SM100 kernels with fp32 output.
#include "sm100/dense.cuh"

namespace fp4gemm {
extern KernelList const kSm100DenseFp32;
KernelList const kSm100DenseFp32 = make_list(kSm100DenseKernels<float>);
}  // namespace fp4gemm
