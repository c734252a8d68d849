// The gated epilogue: D[m, j] = cast( act(z[m, 2j], z[m, 2j + 1]) ), with z as in finish.hpp. The columns of
// gate and up are interleaved in the product, so that D is half as wide.
#pragma once

#include "cutlass_evt/epilogue/finish.hpp"

namespace cutlass_evt::epilogue {

/// An unsigned type of half the size of Out. The kernel stores D as elements of this type: those of columns
/// 2j and 2j + 1 together are element j of D. So CUTLASS stores tiles of the usual shape and needs no change.
template <class Out>
using HalfOf = cute::conditional_t<sizeof(Out) == 4, uint16_t, uint8_t>;

/// The gated epilogue. n is even; D (m, n/2) is stored as (m, n) elements of half the size. Out is the
/// element type of D. There is no C, and the activation must be gated.
template <class Out>
struct Gated {
  static constexpr char const* kName = "gated";
  static constexpr bool kSwapped = false;
  static constexpr bool kGated = true;
  using ElementOutput = HalfOf<Out>;
  using Result = Out;
  using Arguments = EpilogueArguments;

  template <int N, class Z, class Row, class Column, class Source>
  CUTLASS_HOST_DEVICE static void finish(Arguments const& args, float alpha, Z& z, Row const& row,
                                         Column const& column, Source const&) {
    finish_pairs<N>(args, alpha, z, row, column);
  }
};

}  // namespace cutlass_evt::epilogue
