// The row x column epilogue:
// D = cast( act( alpha * (alpha_col[n] * (alpha_row[m] * acc)) + bias[n] ) + beta * C ).
#pragma once

#include "cutlass_evt/epilogue/finish.hpp"

namespace cutlass_evt::epilogue {

/// The row x column epilogue. All terms but acc may be absent, in the same kernel.
///
/// Out is the element type of C and D, or SixteenBits. If Swapped, the kernel multiplies B by A and so
/// computes D^T, which suits products of few rows.
template <class Out, bool Swapped = false>
struct RowCol {
  static constexpr char const* kName = "rowcol";
  static constexpr bool kSwapped = Swapped;
  static constexpr bool kGated = false;
  using ElementOutput = StoredAs<Out>;
  using Result = Out;
  using Arguments = EpilogueArguments;

  template <int N, class... Terms>
  CUTLASS_HOST_DEVICE static void finish(Arguments const& args, Terms&&... terms) {
    epilogue::finish<N>(args, static_cast<Terms&&>(terms)...);
  }
};

}  // namespace cutlass_evt::epilogue
