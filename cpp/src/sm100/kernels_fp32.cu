// The SM100 kernels with fp32 output.
#include "sm100/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm100DenseFp32;
constexpr Kernel kDense[] = {
    make_kernel<Sm100Dense<Tile<256, 192, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, float>>(),
    make_kernel<Sm100Dense<Tile<128, 64, 256>, Cluster<1, 1>, float, true>>(),
};
KernelList const kSm100DenseFp32 = make_list(kDense);

extern KernelList const kSm100GroupedFp32;
constexpr Kernel kGrouped[] = {
    make_kernel<Sm100Grouped<Tile<256, 192, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, float>>(),
};
KernelList const kSm100GroupedFp32 = make_list(kGrouped);

}  // namespace fp4gemm
