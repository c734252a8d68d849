// SM90 (Hopper, compute capability 9.0) as data.
#include "sm90/arch.hpp"

#include "architecture.hpp"
#include "quantize/quantize.hpp"
#include "sm90/figures.hpp"

namespace fp4gemm {

extern KernelList const kSm90DenseBf16, kSm90DenseFp16, kSm90DenseFp32;
extern KernelList const kSm90GroupedBf16, kSm90GroupedFp16, kSm90GroupedFp32;
extern KernelList const kSm90DenseGatedBf16, kSm90DenseGatedFp16;
extern KernelList const kSm90GroupedGatedBf16, kSm90GroupedGatedFp16;
extern KernelList const kSm90PrepackedNarrow, kSm90PrepackedWide, kSm90PrepackedBf16;

namespace sm90 {
namespace {

KernelList const* const kLists[] = {
    &kSm90DenseBf16,        &kSm90DenseFp16,
    &kSm90DenseFp32,        &kSm90GroupedBf16,
    &kSm90GroupedFp16,      &kSm90GroupedFp32,
    &kSm90DenseGatedBf16,   &kSm90DenseGatedFp16,
    &kSm90GroupedGatedBf16, &kSm90GroupedGatedFp16,
    &kSm90PrepackedNarrow,  &kSm90PrepackedWide,
    &kSm90PrepackedBf16,    nullptr,
};

}  // namespace

bool quantizes_a(Kernel const& kernel, Problem const& p) {
  return kernel.figures != nullptr && !kernel.is_grouped && p.a_dtype != FP4GEMM_FP32 &&
         p.m <= kernel.info.tile_m && p.m * round_up(p.k, kPrepackedChunk) <= kernel.figures->most_quantized;
}

extern Architecture const architecture;
Architecture const architecture{kArch,   FP4GEMM_ARCH_DEVICES, /*is_executed=*/true, kLists, &estimate_clocks,
                                nullptr, &quantizes_a};

}  // namespace sm90
}  // namespace fp4gemm
