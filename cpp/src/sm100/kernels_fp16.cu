// The SM100 kernels with fp16 output: a few tiles that serve all shapes.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, cutlass::half_t>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
    make_kernel<Sm100Dense<Tile<128, 64, 256>, Cluster<1, 1>, cutlass::half_t, true>>(),
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
};
KernelList const sm100::lists::kernels_fp16 = make_list(kKernels);

}  // namespace fp4gemm
