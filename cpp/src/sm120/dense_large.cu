// The dense SM120 kernel with the large tile, for products of many rows with bf16 output.
#include "sm120/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm120DenseLargeBf16;
constexpr Kernel kDense[] = {
    make_kernel<Sm120Dense<Tile<256, 128, 128>, cutlass::bfloat16_t>>(),
};
KernelList const kSm120DenseLargeBf16 = make_list(kDense);

}  // namespace fp4gemm
