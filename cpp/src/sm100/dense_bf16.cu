// The dense SM100 kernels with bf16 output, which nearly every layer uses: all tiles that the cost model
// selects for some size.
#include "sm100/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm100DenseBf16;
constexpr Kernel kDense[] = {
    make_kernel<Sm100Dense<Tile<256, 256, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Dense<Tile<256, 192, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Dense<Tile<128, 256, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Dense<Tile<256, 64, 256>, Cluster<2, 1>, cutlass::bfloat16_t, true>>(),
};
KernelList const kSm100DenseBf16 = make_list(kDense);

}  // namespace fp4gemm
