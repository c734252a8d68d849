// Short names for the static sizes of a kernel, its MMA tile and its cluster, and for its layouts.
#pragma once

#include "cute/layout.hpp"
#include "cute/numeric/integral_constant.hpp"
#include "cutlass/layout/matrix.h"

namespace cutlass_evt {

/// The extents in m, n and k of one MMA tile. On SM100 a tile of m = 256 belongs to a pair of CTAs.
template <int M, int N, int K>
using Tile = cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>;

/// The CTAs of a cluster in m and n.
template <int M, int N>
using Cluster = cute::Shape<cute::Int<M>, cute::Int<N>, cute::_1>;

/// The layout of a matrix or, for a grouped kernel, CUTLASS's notation for one matrix per group.
template <class Layout, bool kGrouped>
using LayoutOf = cute::conditional_t<kGrouped, Layout*, Layout>;

/// D is row-major; a swapped kernel computes D^T, which is column-major.
template <class Op, bool kGrouped>
using LayoutOfD =
    LayoutOf<cute::conditional_t<Op::kSwapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>,
             kGrouped>;

}  // namespace cutlass_evt
