// The grouped SM100 kernels with tiles of 128 rows. They share one mainloop.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, bf16>(),
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, fp16>(),
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, float>>(),
    make_kernel<Sm100GroupedGated<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, bf16>(),
    make_kernel<Sm100GroupedGated<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, fp16>(),
};
KernelList const sm100::lists::grouped_m128 = make_list(kKernels);

}  // namespace fp4gemm
