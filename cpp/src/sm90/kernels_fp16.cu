// The SM90 kernels with fp16 output.
#include "sm90/kernels.cuh"

namespace fp4gemm {
extern KernelList const kSm90DenseFp16, kSm90GroupedFp16;
KernelList const kSm90DenseFp16 = make_list(kSm90DenseKernels<cutlass::half_t>);
KernelList const kSm90GroupedFp16 = make_list(kSm90GroupedKernels<cutlass::half_t>);
}  // namespace fp4gemm
