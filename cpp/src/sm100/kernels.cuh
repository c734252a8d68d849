// The SM100 kernel types. The lists, one line per tile, are in the sources. Kernels of one tile share a
// mainloop, which takes longer to compile and more memory than an epilogue, so that a source has the kernels
// of some tiles, of every output type and epilogue.
#pragma once

#include "cutlass_evt/arch/sm100.hpp"
#include "cutlass_evt/epilogue/gated.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "kernel_impl.cuh"
#include "sm100/arch.hpp"

namespace fp4gemm {

using bf16 = cutlass::bfloat16_t;
using cutlass_evt::Cluster;
using cutlass_evt::Tile;
using cutlass_evt::epilogue::SixteenBits;
using fp16 = cutlass::half_t;

static_assert(cutlass_evt::Sm100::kArch == sm100::kArch, "the traits and the architecture disagree");

// Two SMs share a tile of m = 256. Swapped kernels are for few rows of A, which are their n.
template <class Tile, class Cluster, class Out, bool kSwapped = false>
using Sm100Dense =
    cutlass_evt::Dense<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out, kSwapped>>;

template <class Tile, class Cluster, class Out, bool kSwapped = false>
using Sm100Grouped =
    cutlass_evt::Grouped<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out, kSwapped>>;

template <class Tile, class Cluster, class Out>
using Sm100DenseGated =
    cutlass_evt::Dense<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

template <class Tile, class Cluster, class Out>
using Sm100GroupedGated =
    cutlass_evt::Grouped<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

}  // namespace fp4gemm
