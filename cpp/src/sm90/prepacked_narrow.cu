// The SM90 kernels on prepacked weights for few tokens.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

using cutlass_evt::Sm90Nvfp4Config;

constexpr auto kTable = prepacked_table<
    Sm90Nvfp4Config<cutlass::half_t, 1, 2, 8, 1, 6, 3>, Sm90Nvfp4Config<cutlass::half_t, 1, 2, 8, 1, 8, 2>,
    Sm90Nvfp4Config<cutlass::half_t, 1, 4, 8, 1, 16, 1>, Sm90Nvfp4Config<cutlass::half_t, 1, 2, 16, 1, 4, 2>,
    Sm90Nvfp4Config<cutlass::half_t, 1, 4, 16, 1, 8, 1>, Sm90Nvfp4Config<cutlass::half_t, 2, 2, 16, 1, 4, 1>,
    Sm90Nvfp4Config<cutlass::half_t, 1, 4, 32, 1, 4, 1>, Sm90Nvfp4Config<cutlass::half_t, 2, 1, 32, 1, 2, 2>,
    Sm90Nvfp4Config<cutlass::half_t, 2, 2, 32, 1, 4, 1>>();

extern KernelList const kSm90PrepackedNarrow;
KernelList const kSm90PrepackedNarrow = {kTable.data(), static_cast<int>(kTable.size())};

}  // namespace fp4gemm
