// The gated epilogue: D[m, j] = cast( act(z[m, 2j], z[m, 2j + 1]) ), with z as in scaled.hpp. The columns of
// gate and up are interleaved in the product, so that D is half as wide.
#pragma once

#include "cutlass/numeric_conversion.h"
#include "cutlass_evt/epilogue/activation.hpp"
#include "cutlass_evt/epilogue/scaled.hpp"

namespace cutlass_evt {

namespace nodes {

/// An unsigned type of half the size of Out. The kernel stores D as elements of this type: those of columns
/// 2j and 2j + 1 together are element j of D. So CUTLASS stores tiles of the usual shape and needs no change.
template <class Out>
using HalfOf = cute::conditional_t<sizeof(Out) == 4, uint16_t, uint8_t>;

/// The last node: makes one element of D of two columns of its child, and returns it as two halves.
template <class Out>
struct PackPairs : Node<ActivationArguments> {
  using Node<ActivationArguments>::Node;

  struct ConsumerStoreCallbacks : fusion::EmptyConsumerStoreCallbacks {
    Activation kind;
    CUTLASS_DEVICE explicit ConsumerStoreCallbacks(Activation kind) : kind(kind) {}

    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<HalfOf<Out>, N> visit(cutlass::Array<Accumulator, N> const&, int, int, int,
                                                        cutlass::Array<float, N> const& z) {
      static_assert(N % 2 == 0, "a thread must hold whole pairs of columns");
      cutlass::Array<float, N> values = z;
      activate_pairs<N>(kind, values);
      cutlass::Array<Out, N / 2> results;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N / 2; ++i) {
        results[i] = cutlass::NumericConverter<Out, float, kRoundToNearest>::convert(values[i]);
      }
      return reinterpret_cast<cutlass::Array<HalfOf<Out>, N> const&>(results);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const&) {
    return ConsumerStoreCallbacks(this->params->kind);
  }
};

}  // namespace nodes

namespace epilogue {

/// The gated epilogue. n is even; D (m, n/2) is stored as (m, n) elements of half the size, which its row
/// stride counts. Out is the element type of D.
template <class Out>
struct Gated {
  static constexpr char const* kName = "gated";
  static constexpr bool kSwapped = false;
  static constexpr bool kGated = true;
  using ElementOutput = nodes::HalfOf<Out>;
  using Result = Out;

  template <bool kGrouped>
  struct ArgumentsOf : ScaledArguments<kGrouped> {
    Activation activation = Activation::kSwiGlu;  // one that is gated
  };
  using Arguments = ArgumentsOf<false>;

  /// The visitor tree for one CTA tile.
  template <class CtaTile, bool kGrouped>
  struct Tree {
    using Scaled = nodes::Scaled<CtaTile, kGrouped, kSwapped>;
    using type = nodes::fusion::Sm90EVT<nodes::PackPairs<Out>, typename Scaled::type>;

    static typename type::Arguments lower(ArgumentsOf<kGrouped> const& args) {
      return {Scaled::lower(args), {args.activation}};
    }
  };
};

}  // namespace epilogue
}  // namespace cutlass_evt
