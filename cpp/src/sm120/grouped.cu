// The grouped SM120 kernels, of either epilogue. They share one mainloop, which takes longer to compile than
// an epilogue, so that one unit is faster than several.
#include "sm120/kernels.cuh"

namespace fp4gemm {

using GroupedTile = Tile<128, 128, 128>;

extern KernelList const kSm120GroupedBf16;
constexpr Kernel kBf16[] = {make_kernel<Sm120Grouped<GroupedTile, cutlass::bfloat16_t>>()};
KernelList const kSm120GroupedBf16 = make_list(kBf16);

extern KernelList const kSm120GroupedFp16;
constexpr Kernel kFp16[] = {make_kernel<Sm120Grouped<GroupedTile, cutlass::half_t>>()};
KernelList const kSm120GroupedFp16 = make_list(kFp16);

extern KernelList const kSm120GroupedFp32;
constexpr Kernel kFp32[] = {make_kernel<Sm120Grouped<GroupedTile, float>>()};
KernelList const kSm120GroupedFp32 = make_list(kFp32);

extern KernelList const kSm120GroupedGatedBf16;
constexpr Kernel kGatedBf16[] = {make_kernel<Sm120GroupedGated<GroupedTile, cutlass::bfloat16_t>>()};
KernelList const kSm120GroupedGatedBf16 = make_list(kGatedBf16);

extern KernelList const kSm120GroupedGatedFp16;
constexpr Kernel kGatedFp16[] = {make_kernel<Sm120GroupedGated<GroupedTile, cutlass::half_t>>()};
KernelList const kSm120GroupedGatedFp16 = make_list(kGatedFp16);

}  // namespace fp4gemm
