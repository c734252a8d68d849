// The SM100 kernels with fp16 output: a few tiles that serve all shapes.
#include "sm100/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm100DenseFp16;
constexpr Kernel kDense[] = {
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, cutlass::half_t>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
    make_kernel<Sm100Dense<Tile<128, 64, 256>, Cluster<1, 1>, cutlass::half_t, true>>(),
};
KernelList const kSm100DenseFp16 = make_list(kDense);

extern KernelList const kSm100GroupedFp16;
constexpr Kernel kGrouped[] = {
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
};
KernelList const kSm100GroupedFp16 = make_list(kGrouped);

}  // namespace fp4gemm
