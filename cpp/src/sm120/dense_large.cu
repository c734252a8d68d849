// The dense SM120 kernel with the large tile, for products of many rows with bf16 output.
#include "sm120/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm120Dense<Tile<256, 128, 128>, cutlass::bfloat16_t>>(),
};
KernelList const sm120::lists::dense_large = make_list(kKernels);

}  // namespace fp4gemm
