// The SM120 kernel types. The lists, one line per tile, are in the sources. A source has few kernels, because
// each needs up to 3 GB of memory to compile.
#pragma once

#include "cutlass_evt/arch/sm120.hpp"
#include "cutlass_evt/epilogue/gated.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "kernel_impl.cuh"
#include "sm120/arch.hpp"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;
using cutlass_evt::epilogue::SixteenBits;

static_assert(cutlass_evt::Sm120::kArch == sm120::kArch, "the traits and the architecture disagree");

// SM120 has no clusters that would gain anything. Swapped kernels are for few rows of A, which are their n.
template <class Tile, class Out, bool kSwapped = false>
using Sm120Dense =
    cutlass_evt::Dense<cutlass_evt::Sm120, Tile, Cluster<1, 1>, cutlass_evt::epilogue::RowCol<Out, kSwapped>>;

template <class Tile, class Out, bool kSwapped = false>
using Sm120Grouped = cutlass_evt::Grouped<cutlass_evt::Sm120, Tile, Cluster<1, 1>,
                                          cutlass_evt::epilogue::RowCol<Out, kSwapped>>;

template <class Tile, class Out>
using Sm120DenseGated =
    cutlass_evt::Dense<cutlass_evt::Sm120, Tile, Cluster<1, 1>, cutlass_evt::epilogue::Gated<Out>>;

template <class Tile, class Out>
using Sm120GroupedGated =
    cutlass_evt::Grouped<cutlass_evt::Sm120, Tile, Cluster<1, 1>, cutlass_evt::epilogue::Gated<Out>>;

}  // namespace fp4gemm
