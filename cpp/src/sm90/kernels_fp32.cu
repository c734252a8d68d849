// The SM90 kernels with fp32 output.
#include "sm90/kernels.cuh"

namespace fp4gemm {
extern KernelList const kSm90DenseFp32, kSm90GroupedFp32;
KernelList const kSm90DenseFp32 = make_list(kSm90DenseKernels<float>);
KernelList const kSm90GroupedFp32 = make_list(kSm90GroupedKernels<float>);
}  // namespace fp4gemm
