// The SM100 kernel types. The lists, one line per tile, are in the sources. A source has few kernels, because
// each needs more than half a gigabyte of memory to compile.
#pragma once

#include "cutlass_evt/arch/sm100.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "kernel_impl.cuh"
#include "sm100/arch.hpp"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

static_assert(cutlass_evt::Sm100::kArch == sm100::kArch, "the traits and the architecture disagree");

// Two SMs share a tile of m = 256. Swapped kernels are for few rows of A, which are their n.
template <class Tile, class Cluster, class Out, bool kSwapped = false>
using Sm100Dense =
    cutlass_evt::Dense<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out, kSwapped>>;

template <class Tile, class Cluster, class Out, bool kSwapped = false>
using Sm100Grouped =
    cutlass_evt::Grouped<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out, kSwapped>>;

}  // namespace fp4gemm
