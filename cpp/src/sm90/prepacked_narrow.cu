// The SM90 kernels on prepacked weights and fp16 tokens, in tiles of few tokens.
#include "sm90/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm90::PrepackedFamily>(sm90::NarrowTiles{});

KernelList const sm90::lists::prepacked_narrow = make_list(kTable);

}  // namespace fp4gemm
