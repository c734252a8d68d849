// The grouped SM120 kernels. All share one mainloop, so that one unit is faster to compile than three.
#include "sm120/kernels.cuh"

namespace fp4gemm {

extern KernelList const kSm120GroupedBf16;
constexpr Kernel kGroupedBf16[] = {
    make_kernel<Sm120Grouped<Tile<128, 128, 128>, cutlass::bfloat16_t>>(),
};
KernelList const kSm120GroupedBf16 = make_list(kGroupedBf16);

extern KernelList const kSm120GroupedFp16;
constexpr Kernel kGroupedFp16[] = {
    make_kernel<Sm120Grouped<Tile<128, 128, 128>, cutlass::half_t>>(),
};
KernelList const kSm120GroupedFp16 = make_list(kGroupedFp16);

extern KernelList const kSm120GroupedFp32;
constexpr Kernel kGroupedFp32[] = {
    make_kernel<Sm120Grouped<Tile<128, 128, 128>, float>>(),
};
KernelList const kSm120GroupedFp32 = make_list(kGroupedFp32);

}  // namespace fp4gemm
