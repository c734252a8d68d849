// The SM120 kernels that multiply MXFP4 operands.
#include "mx_kernels.cuh"
#include "sm120/kernels.cuh"

namespace fp4gemm {

KernelList const sm120::lists::mxfp4 =
    make_list(MxKernels<cutlass_evt::Sm120With<cutlass_evt::Mxfp4>, Tile<128, 128, 128>>::kRows);

}  // namespace fp4gemm
