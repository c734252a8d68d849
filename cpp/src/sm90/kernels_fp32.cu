// The SM90 kernels with fp32 output.
#include "sm90/kernels.cuh"

namespace fp4gemm {
KernelList const sm90::lists::kernels_fp32 = make_list(kSm90Kernels<float>);
}
