// The dense SM120 kernels with the tile that serves all shapes, of either epilogue. They share one mainloop,
// which takes longer to compile than an epilogue, so that one unit is faster than several.
#include "sm120/kernels.cuh"

namespace fp4gemm {

using DenseTile = Tile<128, 128, 128>;

constexpr Kernel kKernels[] = {
    make_kernel<Sm120Dense<DenseTile, SixteenBits>, cutlass::bfloat16_t>(),
    make_kernel<Sm120Dense<DenseTile, SixteenBits>, cutlass::half_t>(),
    make_kernel<Sm120Dense<DenseTile, float>>(),
    make_kernel<Sm120DenseGated<DenseTile, SixteenBits>, cutlass::bfloat16_t>(),
    make_kernel<Sm120DenseGated<DenseTile, SixteenBits>, cutlass::half_t>(),
};
KernelList const sm120::lists::dense = make_list(kKernels);

}  // namespace fp4gemm
