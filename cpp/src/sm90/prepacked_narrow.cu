// The SM90 kernels on prepacked weights and fp16 tokens, in tiles of few tokens.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm90::PrepackedFamily>(sm90::NarrowTiles{});

extern KernelList const kSm90PrepackedNarrow;
KernelList const kSm90PrepackedNarrow = {kTable.data(), static_cast<int>(kTable.size())};

}  // namespace fp4gemm
