// The grouped SM120 kernels with the gated epilogue.
#include "sm120/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm120GroupedGatedBf16;
constexpr Kernel kGroupedBf16[] = {
    make_kernel<Sm120GroupedGated<Tile<128, 128, 128>, cutlass::bfloat16_t>>(),
};
KernelList const kSm120GroupedGatedBf16 = make_list(kGroupedBf16);

extern KernelList const kSm120GroupedGatedFp16;
constexpr Kernel kGroupedFp16[] = {
    make_kernel<Sm120GroupedGated<Tile<128, 128, 128>, cutlass::half_t>>(),
};
KernelList const kSm120GroupedGatedFp16 = make_list(kGroupedFp16);

}  // namespace fp4gemm
