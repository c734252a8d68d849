// The SM90 kernels on prepacked weights and bf16 tokens, for activations that are not quantized.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm90::PrepackedFamily>(sm90::Bf16Tiles{});

KernelList const sm90::lists::prepacked_bf16 = make_list(kTable);

}  // namespace fp4gemm
