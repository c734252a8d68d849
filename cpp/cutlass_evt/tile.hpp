// Short names for the static sizes of a kernel: its MMA tile and its cluster.
#pragma once

#include "cute/layout.hpp"
#include "cute/numeric/integral_constant.hpp"

namespace cutlass_evt {

/// Elements of D in m and n, and of the contraction in k, that one MMA tile covers. On SM100 a tile of m =
/// 256 belongs to a pair of CTAs.
template <int M, int N, int K>
using Tile = cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>;

/// CTAs of a cluster in m and n.
template <int M, int N>
using Cluster = cute::Shape<cute::Int<M>, cute::Int<N>, cute::_1>;

}  // namespace cutlass_evt
