// The gated epilogue: D[m, j] = cast( silu(z[m, 2j]) * z[m, 2j + 1] ), with z as in scaled.hpp. The columns
// of gate and up are interleaved in the product, so that D is half as wide.
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

/// fl(silu(gate_z) * up), rounded once more to Out.
template <class Out>
CUTLASS_HOST_DEVICE Out swiglu(float gate_z, float up) {
  float const product = activate_pair<Formula<Activation::kSwiGlu>>(gate_z, up);
  return cutlass::NumericConverter<Out, float, kRoundToNearest>::convert(product);
}

/// The last node: makes one element of D of two columns of its child, and returns it as two halves.
template <class Out>
struct PackPairs : Node<cute::tuple<>> {
  using Node<cute::tuple<>>::Node;

  struct ConsumerStoreCallbacks : fusion::EmptyConsumerStoreCallbacks {
    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<HalfOf<Out>, N> visit(cutlass::Array<Accumulator, N> const&, int, int, int,
                                                        cutlass::Array<float, N> const& z) {
      static_assert(N % 2 == 0, "a thread must hold whole pairs of columns");
      cutlass::Array<Out, N / 2> results;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N / 2; ++i) {
        results[i] = swiglu<Out>(z[2 * i], z[2 * i + 1]);
      }
      return reinterpret_cast<cutlass::Array<HalfOf<Out>, N> const&>(results);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const&) {
    return ConsumerStoreCallbacks{};
  }
};

}  // namespace nodes

namespace epilogue {

/// The gated epilogue. n is even; D (m, n/2) is stored as (m, n) elements of half the size, which its row
/// stride counts. Out is the element type of D.
template <class Out>
struct SwiGlu {
  static constexpr char const* kName = "swiglu";
  static constexpr bool kSwapped = false;
  static constexpr bool kGated = true;
  using ElementOutput = nodes::HalfOf<Out>;
  using Result = Out;

  template <bool kGrouped>
  using ArgumentsOf = ScaledArguments<kGrouped>;
  using Arguments = ArgumentsOf<false>;

  /// The visitor tree for one CTA tile.
  template <class CtaTile, bool kGrouped>
  struct Tree {
    using Scaled = nodes::Scaled<CtaTile, kGrouped, kSwapped>;
    using type = nodes::fusion::Sm90EVT<nodes::PackPairs<Out>, typename Scaled::type>;

    static typename type::Arguments lower(ArgumentsOf<kGrouped> const& args) {
      return {Scaled::lower(args), {}};
    }
  };
};

}  // namespace epilogue
}  // namespace cutlass_evt
