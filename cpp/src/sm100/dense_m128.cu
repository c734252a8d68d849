// The dense SM100 kernels with tiles of 128 rows. Those of 128x128 share one mainloop.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Dense<Tile<128, 256, 256>, Cluster<1, 1>, bf16>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, bf16>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, fp16>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, float>>(),
    make_kernel<Sm100DenseGated<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, bf16>(),
    make_kernel<Sm100DenseGated<Tile<128, 128, 256>, Cluster<1, 1>, SixteenBits>, fp16>(),
};
KernelList const sm100::lists::dense_m128 = make_list(kKernels);

}  // namespace fp4gemm
