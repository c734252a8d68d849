// The SM90 kernels with bf16 output.
#include "sm90/kernels.cuh"

namespace fp4gemm {
KernelList const sm90::lists::kernels_bf16 = make_list(kSm90Kernels<cutlass::bfloat16_t>);
}
