// The SM120 kernels on prepacked weights and bf16 tokens.
#include "sm120/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm120::PrepackedFamily>(sm120::PrepackedTiles<cutlass::bfloat16_t>{});

extern KernelList const kSm120PrepackedBf16;
KernelList const kSm120PrepackedBf16 = {kTable.data(), static_cast<int>(kTable.size())};

}  // namespace fp4gemm
