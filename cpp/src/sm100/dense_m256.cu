// The dense SM100 kernels with tiles of 256 rows, which two SMs share. bf16 output, which nearly every layer
// uses, has all tiles that the cost model selects for some size; fp16 and fp32 output have a few that serve
// all shapes.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Dense<Tile<256, 256, 256>, Cluster<2, 1>, bf16>>(),
    make_kernel<Sm100DenseGated<Tile<256, 256, 256>, Cluster<2, 1>, bf16>>(),
    make_kernel<Sm100Dense<Tile<256, 192, 256>, Cluster<2, 1>, bf16>>(),
    make_kernel<Sm100Dense<Tile<256, 192, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, SixteenBits>, bf16>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, SixteenBits>, fp16>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, float>>(),
};
KernelList const sm100::lists::dense_m256 = make_list(kKernels);

}  // namespace fp4gemm
