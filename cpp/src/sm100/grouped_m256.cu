// The grouped SM100 kernels with tiles of 256 rows, which two SMs share.
#include "sm100/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm100Grouped<Tile<256, 256, 256>, Cluster<2, 1>, bf16>>(),
    make_kernel<Sm100Grouped<Tile<256, 192, 256>, Cluster<2, 1>, float>>(),
    make_kernel<Sm100Grouped<Tile<256, 128, 256>, Cluster<2, 1>, bf16>>(),
};
KernelList const sm100::lists::grouped_m256 = make_list(kKernels);

}  // namespace fp4gemm
