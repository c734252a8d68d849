// The SM100 kernels for few tokens: the operands change places, so that tokens are the n of a tile.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Dense<Tile<256, 64, 256>, Cluster<2, 1>, bf16, true>>(),
    make_kernel<Sm100Dense<Tile<128, 64, 256>, Cluster<1, 1>, fp16, true>>(),
    make_kernel<Sm100Dense<Tile<128, 64, 256>, Cluster<1, 1>, float, true>>(),
    make_kernel<Sm100Grouped<Tile<128, 64, 256>, Cluster<1, 1>, bf16, true>>(),
};
KernelList const sm100::lists::swapped = make_list(kKernels);

}  // namespace fp4gemm
