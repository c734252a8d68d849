// The grouped SM100 kernels with bf16 output.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Grouped<Tile<256, 256, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Grouped<Tile<256, 128, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Grouped<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100Grouped<Tile<128, 64, 256>, Cluster<1, 1>, cutlass::bfloat16_t, true>>(),
};
KernelList const sm100::lists::grouped_bf16 = make_list(kKernels);

}  // namespace fp4gemm
