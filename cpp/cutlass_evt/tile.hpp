// Short names for the static sizes of a kernel, its MMA tile and its cluster, and for its layouts.
#pragma once

#include "cute/layout.hpp"
#include "cute/numeric/integral_constant.hpp"
#include "cutlass/layout/matrix.h"

namespace cutlass_evt {

/// Elements of D in m and n, and of the contraction in k, that one MMA tile covers. On SM100 a tile of m =
/// 256 belongs to a pair of CTAs.
template <int M, int N, int K>
using Tile = cute::Shape<cute::Int<M>, cute::Int<N>, cute::Int<K>>;

/// CTAs of a cluster in m and n.
template <int M, int N>
using Cluster = cute::Shape<cute::Int<M>, cute::Int<N>, cute::_1>;

/// A layout of one matrix or, as CUTLASS writes it, of one matrix a group.
template <class Layout, bool kGrouped>
using LayoutOf = cute::conditional_t<kGrouped, Layout*, Layout>;

/// D is row-major; a swapped kernel computes D^T, which is column-major.
template <class Op, bool kGrouped>
using LayoutOfD =
    LayoutOf<cute::conditional_t<Op::kSwapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>,
             kGrouped>;

}  // namespace cutlass_evt
