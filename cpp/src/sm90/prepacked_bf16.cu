// The SM90 kernels on prepacked weights and bf16 tokens, for activations that are not quantized.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

using cutlass_evt::Sm90Nvfp4Config;

constexpr auto kTable = prepacked_table<Sm90Nvfp4Config<cutlass::bfloat16_t, 1, 4, 8, 1, 16, 1>,
                                        Sm90Nvfp4Config<cutlass::bfloat16_t, 1, 4, 16, 1, 8, 1>,
                                        Sm90Nvfp4Config<cutlass::bfloat16_t, 2, 1, 64, 1, 4, 1>,
                                        Sm90Nvfp4Config<cutlass::bfloat16_t, 2, 1, 256, 2, 1, 1>>();

extern KernelList const kSm90PrepackedBf16;
KernelList const kSm90PrepackedBf16 = {kTable.data(), static_cast<int>(kTable.size())};

}  // namespace fp4gemm
