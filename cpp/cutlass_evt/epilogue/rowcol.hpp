// The row x column epilogue: D = cast( alpha * (alpha_col[n] * (alpha_row[m] * acc)) + bias[n] ).
#pragma once

#include "cutlass/numeric_conversion.h"
#include "cutlass_evt/epilogue/nodes.hpp"

namespace cutlass_evt::epilogue {

/// alpha_row (m,), alpha_col (n,) and bias (n,) are fp32; each multiplier may be a vector, one number on the
/// device or absent, all in the same kernel. Every step rounds once to fp32, the cast to Out once more; the
/// order of the brackets is fixed, so that the result depends on acc alone, not on tile or architecture.
template <class Out>
struct RowCol {
  static constexpr char const* kName = "rowcol";
  using ElementOutput = Out;

  struct Arguments {
    Vector alpha_row;  // (m)
    Vector alpha_col;  // (n)
    float alpha = 1.0f;
    float const* bias = nullptr;  // (n)
  };

  /// The formula for one element, for kernels without a visitor tree.
  CUTLASS_HOST_DEVICE static Out apply(float acc, float alpha_row, float alpha_col, float alpha, float bias) {
    nodes::multiply_rn<float> const multiply;
    float const scaled = multiply(alpha, multiply(alpha_col, multiply(alpha_row, acc)));
    return cutlass::NumericConverter<Out, float, nodes::kRoundToNearest>::convert(
        nodes::add_rn<float>{}(scaled, bias));
  }

  /// Visitor tree for one CTA tile.
  template <class CtaTile>
  struct Tree {
    using Row = nodes::PerRow<CtaTile>;
    using Col = nodes::PerCol<CtaTile>;
    using ScaledByRow = nodes::Multiply<Row, nodes::Acc>;
    using ScaledByCol = nodes::Multiply<Col, ScaledByRow>;
    using ScaledByAlpha = nodes::Multiply<nodes::Scalar, ScaledByCol>;
    using type = nodes::AddTo<Out, Col, ScaledByAlpha>;

    static typename type::Arguments lower(Arguments const& args) {
      // An absent bias adds -0.0, the only number x for which y + x is y for every y, +0 and -0 included.
      return {nodes::per_col<Col>({args.bias}, -0.0f),
              {{{args.alpha}, {}, {}},
               {nodes::per_col<Col>(args.alpha_col), {nodes::per_row<Row>(args.alpha_row), {}, {}}, {}},
               {}},
              {}};
    }
  };
};

}  // namespace cutlass_evt::epilogue
