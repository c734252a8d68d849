// The dense SM100 kernels: one line a tile. Each output type is a translation unit of its own.
#pragma once

#include "cutlass_evt/arch/sm100.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "kernel_impl.cuh"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

template <class Tile, class Cluster, class Out>
using Sm100Dense = cutlass_evt::Dense<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out>>;

template <class Out>
constexpr Kernel kSm100DenseKernels[] = {
    make_kernel<Sm100Dense<Tile<256, 256, 256>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm100Dense<Tile<256, 128, 256>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm100Dense<Tile<128, 256, 256>, Cluster<1, 1>, Out>>(),
    make_kernel<Sm100Dense<Tile<128, 128, 256>, Cluster<1, 1>, Out>>(),
};

}  // namespace fp4gemm
