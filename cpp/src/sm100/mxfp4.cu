// The SM100 kernels that multiply MXFP4 operands.
#include "mx_kernels.cuh"
#include "sm100/kernels.cuh"

namespace fp4gemm {

KernelList const sm100::lists::mxfp4 =
    make_list(MxKernels<cutlass_evt::Sm100With<cutlass_evt::Mxfp4>, Tile<128, 128, 256>>::kRows);

}  // namespace fp4gemm
