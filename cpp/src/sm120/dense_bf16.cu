// The dense SM120 kernels with bf16 output, which nearly every layer uses: both tiles.
#include "sm120/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm120DenseBf16;
constexpr Kernel kDense[] = {
    make_kernel<Sm120Dense<Tile<256, 128, 128>, cutlass::bfloat16_t>>(),
    make_kernel<Sm120Dense<Tile<128, 128, 128>, cutlass::bfloat16_t>>(),
};
KernelList const kSm120DenseBf16 = make_list(kDense);

}  // namespace fp4gemm
