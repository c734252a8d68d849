// The grouped SM120 kernels, of either epilogue. They share one mainloop, which takes longer to compile than
// an epilogue, so that one unit is faster than several.
#include "sm120/kernels.cuh"

namespace fp4gemm {

using GroupedTile = Tile<128, 128, 128>;

constexpr Kernel kKernels[] = {
    make_kernel<Sm120Grouped<GroupedTile, SixteenBits>, cutlass::bfloat16_t>(),
    make_kernel<Sm120Grouped<GroupedTile, SixteenBits>, cutlass::half_t>(),
    make_kernel<Sm120Grouped<GroupedTile, float>>(),
    make_kernel<Sm120GroupedGated<GroupedTile, SixteenBits>, cutlass::bfloat16_t>(),
    make_kernel<Sm120GroupedGated<GroupedTile, SixteenBits>, cutlass::half_t>(),
};
KernelList const sm120::lists::grouped = make_list(kKernels);

}  // namespace fp4gemm
