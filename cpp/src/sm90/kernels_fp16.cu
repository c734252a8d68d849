// The SM90 kernels with fp16 output.
#include "sm90/kernels.cuh"

namespace fp4gemm {
KernelList const sm90::lists::kernels_fp16 = make_list(kSm90Kernels<cutlass::half_t>);
}
