// The dense SM120 kernels with fp16 and fp32 output.
#include "sm120/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm120DenseFp16;
constexpr Kernel kDenseFp16[] = {
    make_kernel<Sm120Dense<Tile<128, 128, 128>, cutlass::half_t>>(),
};
KernelList const kSm120DenseFp16 = make_list(kDenseFp16);

extern KernelList const kSm120DenseFp32;
constexpr Kernel kDenseFp32[] = {
    make_kernel<Sm120Dense<Tile<128, 128, 128>, float>>(),
};
KernelList const kSm120DenseFp32 = make_list(kDenseFp32);

}  // namespace fp4gemm
