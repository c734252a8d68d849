// The SM90 kernels on prepacked weights and fp16 tokens, in tiles of many tokens.
// The tile of 80 tokens needs a wgmma of 80 columns, which CuTe has only with this definition.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED

#include "sm90/prepacked.cuh"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm90::PrepackedFamily>(sm90::WideTiles{});

KernelList const sm90::lists::prepacked_wide = make_list(kTable);

}  // namespace fp4gemm
