// The dense SM120 kernels with the tile that serves all shapes, of either epilogue. They share one mainloop,
// which takes longer to compile than an epilogue, so that one unit is faster than several.
#include "sm120/kernels.cuh"

namespace fp4gemm {

using DenseTile = Tile<128, 128, 128>;

extern KernelList const kSm120DenseBf16;
constexpr Kernel kBf16[] = {make_kernel<Sm120Dense<DenseTile, cutlass::bfloat16_t>>()};
KernelList const kSm120DenseBf16 = make_list(kBf16);

extern KernelList const kSm120DenseFp16;
constexpr Kernel kFp16[] = {make_kernel<Sm120Dense<DenseTile, cutlass::half_t>>()};
KernelList const kSm120DenseFp16 = make_list(kFp16);

extern KernelList const kSm120DenseFp32;
constexpr Kernel kFp32[] = {make_kernel<Sm120Dense<DenseTile, float>>()};
KernelList const kSm120DenseFp32 = make_list(kFp32);

extern KernelList const kSm120DenseGatedBf16;
constexpr Kernel kGatedBf16[] = {make_kernel<Sm120DenseGated<DenseTile, cutlass::bfloat16_t>>()};
KernelList const kSm120DenseGatedBf16 = make_list(kGatedBf16);

extern KernelList const kSm120DenseGatedFp16;
constexpr Kernel kGatedFp16[] = {make_kernel<Sm120DenseGated<DenseTile, cutlass::half_t>>()};
KernelList const kSm120DenseGatedFp16 = make_list(kGatedFp16);

}  // namespace fp4gemm
