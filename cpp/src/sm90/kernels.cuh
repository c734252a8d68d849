// The SM90 kernels except those on prepacked weights: one line per tile. Each output type is a translation
// unit of its own.
#pragma once

#include "cutlass_evt/arch/sm90.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "kernel_impl.cuh"
#include "sm90/packed.cuh"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

static_assert(cutlass_evt::Sm90::kArch == sm90::kArch, "the traits and the architecture disagree");

template <class Tile, class Cluster, class Out>
using Sm90Dense = cutlass_evt::Dense<cutlass_evt::Sm90, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out>>;

template <class Tile, class Cluster, class Out>
using Sm90Grouped =
    cutlass_evt::Grouped<cutlass_evt::Sm90, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out>>;

template <class Out>
constexpr Kernel kSm90DenseKernels[] = {
    make_kernel<Sm90Dense<Tile<128, 256, 64>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm90Dense<Tile<128, 128, 64>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm90Dense<Tile<64, 128, 64>, Cluster<1, 1>, Out>>(),
    make_packed_kernel<Out, 1>(),
    make_packed_kernel<Out, 2>(),
    make_packed_kernel<Out, 4>(),
    make_packed_kernel<Out, 8>(),
};

template <class Out>
constexpr Kernel kSm90GroupedKernels[] = {
    make_kernel<Sm90Grouped<Tile<128, 256, 64>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm90Grouped<Tile<64, 128, 64>, Cluster<1, 1>, Out>>(),
};

}  // namespace fp4gemm
