// The SM120 kernels on prepacked weights and bf16 tokens.
#include "sm120/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm120::PrepackedFamily>(sm120::PrepackedTiles<cutlass::bfloat16_t>{});

KernelList const sm120::lists::prepacked_bf16 = make_list(kTable);

}  // namespace fp4gemm
