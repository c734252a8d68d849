// The SM100 kernels with fp32 output.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Dense<Tile<256, 192, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<128, 64, 256>, Cluster<1, 1>, float, true>>(),
    make_kernel<Sm100Grouped<Tile<256, 192, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, float>>(),
};
KernelList const sm100::lists::kernels_fp32 = make_list(kKernels);

}  // namespace fp4gemm
