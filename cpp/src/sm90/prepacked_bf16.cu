// The SM90 kernels on prepacked weights and bf16 tokens, for activations that are not quantized.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm90::PrepackedFamily>(sm90::Bf16Tiles{});

extern KernelList const kSm90PrepackedBf16;
KernelList const kSm90PrepackedBf16 = {kTable.data(), static_cast<int>(kTable.size())};

}  // namespace fp4gemm
