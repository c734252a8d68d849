// Short names over the CUTLASS visitor nodes, and compute functors whose rounding is fixed.
#pragma once

#include "cutlass/array.h"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/functional.h"
#include "cutlass/numeric_types.h"

namespace cutlass_evt {

/// An fp32 multiplier of the epilogue: a vector, one number on the device, or absent (data null).
struct Vector {
  float const* data = nullptr;
  bool is_vector = true;  // false: data points at one number
};

namespace nodes {

namespace fusion = cutlass::epilogue::fusion;

/// fl(a * b), to nearest even. cutlass::multiplies may be contracted with an addition that follows it; this
/// may not.
template <class T>
struct multiply_rn;

/// fl(a + b), to nearest even, never contracted with a product.
template <class T>
struct add_rn;

template <>
struct multiply_rn<float> {
  CUTLASS_HOST_DEVICE float operator()(float a, float b) const {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
  }
};

template <>
struct add_rn<float> {
  CUTLASS_HOST_DEVICE float operator()(float a, float b) const {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
  }
};

/// A scalar functor applied to each element of two arrays.
template <class Op, int N>
struct Elementwise {
  using Array = cutlass::Array<float, N>;
  CUTLASS_HOST_DEVICE Array operator()(Array const& a, Array const& b) const {
    Array result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      result[i] = Op{}(a[i], b[i]);
    }
    return result;
  }
};

template <int N>
struct multiply_rn<cutlass::Array<float, N>> : Elementwise<multiply_rn<float>, N> {};

template <int N>
struct add_rn<cutlass::Array<float, N>> : Elementwise<add_rn<float>, N> {};

constexpr auto kRoundToNearest = cutlass::FloatRoundStyle::round_to_nearest;

using Acc = fusion::Sm90AccFetch;

/// One host number, the same for every element.
using Scalar = fusion::Sm90ScalarBroadcast<float>;

// The stride's bool chooses between vector and single number at run time, so that one kernel serves both.
// Alignment 1: the vectors may start at any float.
/// (m) vector, broadcast along n.
template <class CtaTile>
using PerRow = fusion::Sm90ColBroadcast<0, CtaTile, float, float, cute::Stride<bool, cute::_0, int64_t>, 1>;

/// (n) vector, broadcast along m.
template <class CtaTile>
using PerCol = fusion::Sm90RowBroadcast<0, CtaTile, float, float, cute::Stride<cute::_0, bool, int64_t>, 1>;

/// left * right in fp32.
template <class Left, class Right>
using Multiply =
    fusion::Sm90EVT<fusion::Sm90Compute<multiply_rn, float, float, kRoundToNearest>, Left, Right>;

/// left + right in fp32, converted once to Out.
template <class Out, class Left, class Right>
using AddTo = fusion::Sm90EVT<fusion::Sm90Compute<add_rn, Out, float, kRoundToNearest>, Left, Right>;

/// The arguments of PerRow for a multiplier; absent means 1.
template <class Node>
typename Node::Arguments per_row(Vector v, float absent = 1.0f) {
  return {v.data, absent, {v.is_vector, cute::_0{}, 0}};
}

/// The arguments of PerCol for a multiplier; absent means 1.
template <class Node>
typename Node::Arguments per_col(Vector v, float absent = 1.0f) {
  return {v.data, absent, {cute::_0{}, v.is_vector, 0}};
}

}  // namespace nodes
}  // namespace cutlass_evt
