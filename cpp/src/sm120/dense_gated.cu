// The dense SM120 kernels with the gated epilogue.
#include "sm120/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm120DenseGatedBf16;
constexpr Kernel kDenseBf16[] = {
    make_kernel<Sm120DenseGated<Tile<128, 128, 128>, cutlass::bfloat16_t>>(),
};
KernelList const kSm120DenseGatedBf16 = make_list(kDenseBf16);

extern KernelList const kSm120DenseGatedFp16;
constexpr Kernel kDenseFp16[] = {
    make_kernel<Sm120DenseGated<Tile<128, 128, 128>, cutlass::half_t>>(),
};
KernelList const kSm120DenseGatedFp16 = make_list(kDenseFp16);

}  // namespace fp4gemm
