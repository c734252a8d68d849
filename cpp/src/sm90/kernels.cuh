// The SM90 kernels except those on prepacked weights: one line per tile. Each output type is a translation
// unit of its own.
#pragma once

#include "cutlass_evt/arch/sm90.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "kernel_impl.cuh"
#include "sm90/arch.hpp"
#include "sm90/packed.cuh"
#include "sm90/ragged_k.hpp"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

static_assert(cutlass_evt::Sm90::kArch == sm90::kArch, "the traits and the architecture disagree");

template <class Tile, class Cluster, class Out>
using Sm90Dense = cutlass_evt::Dense<cutlass_evt::Sm90, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out>>;

template <class Tile, class Cluster, class Out>
using Sm90Grouped =
    cutlass_evt::Grouped<cutlass_evt::Sm90, Tile, Cluster, cutlass_evt::epilogue::RowCol<Out>>;

/// The table row of a grouped kernel. CUTLASS's kernel multiplies groups that are ragged in m, and one of our
/// own with the same tile those that are ragged in k, which are bound by storing D if k is small.
template <class K>
struct Sm90GroupedRow : KernelRow<K, typename K::Op::Result> {
  using Base = KernelRow<K, typename K::Op::Result>;

  static size_t workspace_bytes(Problem const& p) {
    return p.ragged == FP4GEMM_RAGGED_K ? 0 : Base::workspace_bytes(p);
  }

  static fp4gemm_status_t launch(Problem const& p, void* workspace, fp4gemm_stream_t stream) {
    if (p.ragged == FP4GEMM_RAGGED_K) {
      return sm90::launch_ragged_k<typename K::Op::Result, Base::kTraits.tile_m, Base::kTraits.tile_n,
                                   Base::kTraits.cluster_m>(Base::kName.text, p, stream);
    }
    return Base::launch(p, workspace, stream);
  }
};

template <class Out>
constexpr Kernel kSm90Kernels[] = {
    make_kernel<Sm90Dense<Tile<128, 256, 64>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm90Dense<Tile<128, 128, 64>, Cluster<2, 1>, Out>>(),
    make_kernel<Sm90Dense<Tile<64, 128, 64>, Cluster<1, 1>, Out>>(),
    make_packed_kernel<Out, 1>(),
    make_packed_kernel<Out, 2>(),
    make_packed_kernel<Out, 4>(),
    make_packed_kernel<Out, 8>(),
    make_row<Sm90GroupedRow<Sm90Grouped<Tile<128, 256, 64>, Cluster<2, 1>, Out>>>(),
    make_row<Sm90GroupedRow<Sm90Grouped<Tile<64, 128, 64>, Cluster<1, 1>, Out>>>(),
};

}  // namespace fp4gemm
