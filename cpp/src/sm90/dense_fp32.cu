// The dense SM90 kernels with fp32 output.
#include "sm90/dense.cuh"

namespace fp4gemm {
extern KernelList const kSm90DenseFp32;
KernelList const kSm90DenseFp32 = make_list(kSm90DenseKernels<float>);
}  // namespace fp4gemm
