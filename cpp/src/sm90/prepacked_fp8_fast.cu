// The SM90 kernels on e4m3 tokens whose sums stay in the accumulators of the tensor cores.
#include "sm90/prepacked.cuh"
#include "sm90/tiles_fp8.hpp"

namespace fp4gemm {

constexpr auto kTable = prepacked_table<sm90::PrepackedFamily>(sm90::Fp8FastTiles{});

KernelList const sm90::lists::prepacked_fp8_fast = make_list(kTable);

}  // namespace fp4gemm
