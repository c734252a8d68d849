// The SM120 kernels that multiply MXFP8 tokens by MXFP4 weights.
#include "mx_kernels.cuh"
#include "sm120/kernels.cuh"

namespace fp4gemm {

KernelList const sm120::lists::mxfp8_mxfp4 =
    make_list(MxKernels<cutlass_evt::Sm120With<cutlass_evt::Mxfp8Mxfp4>, Tile<128, 128, 128>>::kRows);

}  // namespace fp4gemm
