// The first part of every epilogue: z = alpha * (alpha_col[n] * (alpha_row[m] * acc)) + bias[n].
#pragma once

#include "cutlass_evt/epilogue/nodes.hpp"

namespace cutlass_evt {

/// alpha_row (m,), alpha_col (n,) and bias (n,) are fp32. Each multiplier may be a vector, one number on the
/// device or absent, and bias absent, all in the same kernel. Every step rounds once to fp32.
template <bool kGrouped>
struct ScaledArguments {
  VectorOf<kGrouped> alpha_row;  // (m)
  VectorOf<kGrouped> alpha_col;  // (n)
  float alpha = 1.0f;
  PointerOf<float, kGrouped> bias = nullptr;  // (n)
  float const* alpha_groups = nullptr;        // (num_groups), replaces alpha; for grouped kernels only
};

namespace nodes {

/// An absent bias adds -0.0, the only x for which y + x is y for every y, including +0 and -0.
constexpr float kNoBias = -0.0f;

/// The formula for one element, for code without a visitor tree.
CUTLASS_HOST_DEVICE float scaled(float acc, float alpha_row, float alpha_col, float alpha, float bias) {
  multiply_rn<float> const multiply;
  return add_rn<float>{}(multiply(alpha, multiply(alpha_col, multiply(alpha_row, acc))), bias);
}

/// The visitor tree for one CTA tile; CtaTile and kSwapped are those of Broadcast.
template <class CtaTile, bool kGrouped, bool kSwapped>
struct Scaled {
  using Broadcast = nodes::Broadcast<CtaTile, kGrouped, kSwapped>;
  using Row = typename Broadcast::PerRow;
  using Col = typename Broadcast::PerCol;
  using ByRow = Multiply<Row, Acc>;
  using ByCol = Multiply<Col, ByRow>;
  using ByAlpha = Multiply<Scalar, ByCol>;
  using type = Add<Col, ByAlpha>;

  static typename type::Arguments lower(ScaledArguments<kGrouped> const& args) {
    typename ByRow::Arguments const by_row{Broadcast::per_row(args.alpha_row), {}, {}};
    typename ByCol::Arguments const by_col{Broadcast::per_col(args.alpha_col), by_row, {}};
    typename ByAlpha::Arguments const by_alpha{{args.alpha, args.alpha_groups}, by_col, {}};
    return {Broadcast::per_col({args.bias}, kNoBias), by_alpha, {}};
  }
};

}  // namespace nodes
}  // namespace cutlass_evt
