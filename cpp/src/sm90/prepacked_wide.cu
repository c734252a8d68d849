// The SM90 kernels on prepacked weights for many tokens.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

using cutlass_evt::Sm90Nvfp4Config;

constexpr auto kTable = prepacked_table<Sm90Nvfp4Config<cutlass::half_t, 2, 1, 64, 1, 4, 1>,
                                        Sm90Nvfp4Config<cutlass::half_t, 2, 1, 128, 2, 2, 1>,
                                        Sm90Nvfp4Config<cutlass::half_t, 2, 1, 256, 2, 1, 1>>();

extern KernelList const kSm90PrepackedWide;
KernelList const kSm90PrepackedWide = {kTable.data(), static_cast<int>(kTable.size())};

}  // namespace fp4gemm
