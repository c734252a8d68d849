// The arithmetic of the epilogue, which is defined here alone and which every kernel calls:
//
//   D[m, n] = cast( act(z[m, n]) + beta * C[m, n] )
//   z[m, n] = alpha * (alpha_col[n] * (alpha_row[m] * acc[m, n])) + bias[n]
//
// and with a gated activation D[m, j] = cast( act(z[m, 2j], z[m, 2j + 1]) ). Each step rounds once to fp32,
// and the cast once more. The order of the brackets is fixed, so that D depends on acc alone and not on the
// tile or the architecture. An absent addend, activation or C is skipped, and an absent factor is 1.
//
// finish() and finish_pairs() are the whole formula. A kernel that must do something between two steps, such
// as exchange gate and up between lanes, calls the steps, which are the functions before them. All of them
// work on N elements of a thread at once, step after step, so that absent terms cost one branch. Their
// arguments are:
//   z               z[i] is an element, acc before and the result afterwards
//   row, column     row(v, i) and column(v, i) return the element of a vector, a RowVector or a ColumnVector,
//                   that belongs to z[i]
//   source          source(i) returns the element of C that belongs to z[i], as fp32
//   alpha           that of the group, see alpha_of
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass/numeric_conversion.h"
#include "cutlass_evt/epilogue/activation.hpp"
#include "cutlass_evt/epilogue/arguments.hpp"
#include "cutlass_evt/epilogue/arithmetic.hpp"
#include "cutlass_evt/load_after_wait.hpp"

namespace cutlass_evt::epilogue {

CUTLASS_HOST_DEVICE float load(float const* from) {
#if defined(__CUDA_ARCH__)
  return load_after_wait(from);
#else
  return *from;
#endif
}

/// alpha of a group.
CUTLASS_HOST_DEVICE float alpha_of(EpilogueArguments const& args, int group) {
  return args.alpha_groups == nullptr ? args.alpha : load(args.alpha_groups + group);
}

/// Element i of a vector, a RowVector or a ColumnVector, from memory; absent(v) if the vector or the element
/// is not there.
template <class V>
CUTLASS_HOST_DEVICE float element(EpilogueArguments const& args, V v, int group, int64_t i,
                                  bool present = true) {
  return present && args.has(v) ? load(args.vector(v).at(group, i)) : absent(v);
}

/// z[i] = the product of z[i] with all factors.
template <int N, class Z, class Row, class Column>
CUTLASS_HOST_DEVICE void scale(float alpha, Z&& z, Row const& row, Column const& column) {
  nodes::multiply_rn<float> const multiply;
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) {
    z[i] = multiply(alpha, multiply(column(kAlphaCol, i), multiply(row(kAlphaRow, i), z[i])));
  }
}

/// z[i] = z of the formula, from acc: the product with all factors, plus the vectors that are added.
///
/// kSkipsAbsent: whether vectors that are added are tested for their presence. If not, row(v, i) and
/// column(v, i) must return absent(v) for those that are absent, which adds nothing.
template <int N, bool kSkipsAbsent = true, class Z, class Row, class Column>
CUTLASS_HOST_DEVICE void scale_and_add(EpilogueArguments const& args, float alpha, Z&& z, Row const& row,
                                       Column const& column) {
  scale<N>(alpha, z, row, column);
  if (!kSkipsAbsent || args.has(kBias)) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      z[i] = nodes::add_rn<float>{}(z[i], column(kBias, i));
    }
  }
}

/// z[i] = act(z[i]), or for a gated activation z[j] = act(z[2j], z[2j + 1]) for j < N / 2. Only for calls
/// with an activation.
template <int N, class Z>
CUTLASS_HOST_DEVICE void activate(EpilogueArguments const& args, Z&& z) {
  if (is_gated(args.activation)) {
    nodes::activate_pairs<N>(args.activation, z);
  } else {
    nodes::activate_all<N>(args.activation, z);
  }
}

/// z[i] += beta * C. Only for calls with C.
template <int N, class Z, class Source>
CUTLASS_HOST_DEVICE void add_source(EpilogueArguments const& args, Z&& z, Source const& source) {
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N; ++i) {
    z[i] = nodes::add_rn<float>{}(z[i], nodes::multiply_rn<float>{}(args.beta, source(i)));
  }
}

/// The whole formula but for the cast, for an activation that is not gated.
template <int N, class Z, class Row, class Column, class Source>
CUTLASS_HOST_DEVICE void finish(EpilogueArguments const& args, float alpha, Z&& z, Row const& row,
                                Column const& column, Source const& source) {
  scale_and_add<N>(args, alpha, z, row, column);
  if (args.activation != Activation::kNone) {
    nodes::activate_all<N>(args.activation, z);
  }
  if (args.c != nullptr) {
    add_source<N>(args, z, source);
  }
}

/// The whole formula but for the cast, for a gated activation: N / 2 results of N columns.
template <int N, class Z, class Row, class Column>
CUTLASS_HOST_DEVICE void finish_pairs(EpilogueArguments const& args, float alpha, Z&& z, Row const& row,
                                      Column const& column) {
  scale_and_add<N>(args, alpha, z, row, column);
  nodes::activate_pairs<N>(args.activation, z);
}

/// In place of the element type of C and D: bf16 or fp16, whichever EpilogueArguments::output says. One
/// kernel then serves both.
struct SixteenBits {
  uint16_t bits;
};

/// The type as which a kernel stores elements of the type Out.
template <class Out>
using StoredAs = cute::conditional_t<cute::is_same_v<Out, SixteenBits>, uint16_t, Out>;

/// An element of C as fp32.
template <class Out>
CUTLASS_HOST_DEVICE float to_float(EpilogueArguments const&, Out c) {
  return static_cast<float>(c);
}
CUTLASS_HOST_DEVICE float to_float(EpilogueArguments const& args, SixteenBits c) {
  return args.output == OutputType::kBf16 ? static_cast<float>(cutlass::bfloat16_t::bitcast(c.bits))
                                          : static_cast<float>(cutlass::half_t::bitcast(c.bits));
}

/// The cast of one element.
template <class Out>
CUTLASS_HOST_DEVICE Out cast(float y) {
  return cutlass::NumericConverter<Out, float, cutlass::FloatRoundStyle::round_to_nearest>::convert(y);
}

/// The cast of two elements to two 16-bit numbers, the first of them in the low half.
template <class Out>
CUTLASS_HOST_DEVICE uint32_t cast_two(float first, float second) {
  cutlass::Array<float, 2> const from{first, second};
  auto const to =
      cutlass::NumericArrayConverter<Out, float, 2, cutlass::FloatRoundStyle::round_to_nearest>::convert(
          from);
  return reinterpret_cast<uint32_t const&>(to);
}

/// The cast of N elements to the type Out.
template <class Out, int N, class Z>
CUTLASS_HOST_DEVICE cutlass::Array<StoredAs<Out>, N> cast_all(EpilogueArguments const& args, Z const& z) {
  if constexpr (cute::is_same_v<Out, SixteenBits>) {
    if (args.output == OutputType::kBf16) {
      auto const results = cast_all<cutlass::bfloat16_t, N>(args, z);
      return reinterpret_cast<cutlass::Array<uint16_t, N> const&>(results);
    }
    auto const results = cast_all<cutlass::half_t, N>(args, z);
    return reinterpret_cast<cutlass::Array<uint16_t, N> const&>(results);
  } else {
    cutlass::Array<Out, N> results;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      results[i] = cast<Out>(z[i]);
    }
    return results;
  }
}

}  // namespace cutlass_evt::epilogue
