// The row x column epilogue:
// D = cast( act( alpha * (alpha_col[n] * (alpha_row[m] * acc)) + bias[n] ) + beta * C ).
#pragma once

#include "cutlass/numeric_conversion.h"
#include "cutlass_evt/epilogue/activation.hpp"
#include "cutlass_evt/epilogue/scaled.hpp"
#include "cutlass_evt/epilogue/source.hpp"

namespace cutlass_evt::epilogue {

/// The row x column epilogue. scaled.hpp describes the vectors; C (m, n) has the type of D. All terms but acc
/// may be absent, in the same kernel. Every step rounds once to fp32, and the cast to Out once more. The
/// order of the brackets is fixed, so that the result depends on acc alone and not on tile or architecture.
///
/// Out is the element type of D. If Swapped, the kernel multiplies B by A and so computes D^T, which suits
/// products of few rows.
template <class Out, bool Swapped = false>
struct RowCol {
  static constexpr char const* kName = "rowcol";
  static constexpr bool kSwapped = Swapped;
  static constexpr bool kGated = false;
  using ElementOutput = Out;
  using Result = Out;

  template <bool kGrouped>
  struct ArgumentsOf : ScaledArguments<kGrouped> {
    Activation activation = Activation::kNone;
    PointerOf<Out, kGrouped> c = nullptr;  // (m, n)
    int64_t c_row_stride = 0;              // elements
    float c_scale = 1.0f;  // beta; CUTLASS treats an argument of that name as its own and refuses it
  };
  using Arguments = ArgumentsOf<false>;

  /// The formula for one element, for code without a visitor tree. c is null where C is absent.
  CUTLASS_HOST_DEVICE static Out apply(float acc, float alpha_row, float alpha_col, float alpha, float bias,
                                       Activation activation, Out const* c, float beta) {
    float y = nodes::activate_one(activation, nodes::scaled(acc, alpha_row, alpha_col, alpha, bias));
    if (c != nullptr) {
      y = nodes::add_rn<float>{}(y, nodes::multiply_rn<float>{}(beta, static_cast<float>(*c)));
    }
    return cutlass::NumericConverter<Out, float, nodes::kRoundToNearest>::convert(y);
  }

  /// The visitor tree for one CTA tile, and how the arguments become those of its nodes.
  template <class CtaTile, bool kGrouped>
  struct Tree {
    using Scaled = nodes::Scaled<CtaTile, kGrouped, kSwapped>;
    using Activated = nodes::fusion::Sm90EVT<
        nodes::fusion::Sm90Compute<nodes::activate, float, float, nodes::kRoundToNearest>,
        typename Scaled::type>;
    using type = nodes::fusion::Sm90EVT<nodes::AddSource<Out, kGrouped, kSwapped>, Activated>;

    static typename type::Arguments lower(ArgumentsOf<kGrouped> const& args) {
      typename Activated::Arguments const activated{Scaled::lower(args), {args.activation}};
      return {activated, {args.c, args.c_row_stride, args.c_scale}};
    }
  };
};

}  // namespace cutlass_evt::epilogue
