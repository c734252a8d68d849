// Nodes of the epilogues' visitor trees: short names for CUTLASS's, and a base for our own.
#pragma once

#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/functional.h"
#include "cutlass/numeric_types.h"
#include "cutlass_evt/epilogue/arithmetic.hpp"

namespace cutlass_evt {

/// A pointer to T in a dense kernel. In a grouped kernel, a device array with one such pointer for each
/// group.
template <class T, bool kGrouped>
using PointerOf = cute::conditional_t<kGrouped, T const* const*, T const*>;

/// An fp32 multiplier of the epilogue: a vector, one number on the device, or absent (data is null).
template <bool kGrouped>
struct VectorOf {
  PointerOf<float, kGrouped> data = nullptr;
  bool is_vector = true;  // false: data points at one number
};
using Vector = VectorOf<false>;

namespace nodes {

namespace fusion = cutlass::epilogue::fusion;

constexpr auto kRoundToNearest = cutlass::FloatRoundStyle::round_to_nearest;

/// The accumulator: an element of the product.
using Acc = fusion::Sm90AccFetch;

/// left * right in fp32.
template <class Left, class Right>
using Multiply =
    fusion::Sm90EVT<fusion::Sm90Compute<multiply_rn, float, float, kRoundToNearest>, Left, Right>;

/// left + right in fp32.
template <class Left, class Right>
using Add = fusion::Sm90EVT<fusion::Sm90Compute<add_rn, float, float, kRoundToNearest>, Left, Right>;

/// The base of a node that loads nothing in advance and needs no workspace: the members that CUTLASS requires
/// of every node. Arguments_ are the node's arguments, which are its kernel parameters too.
template <class Arguments_>
struct Node : fusion::Sm90VisitorImpl<> {
  struct SharedStorage {};
  using Arguments = Arguments_;
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE Node() {}
  CUTLASS_HOST_DEVICE Node(Params const& params, SharedStorage const&) : params(&params) {}

  Params const* params = nullptr;
};

struct ScalarArguments {
  float value = 1.0f;
  float const* groups = nullptr;  // (num_groups), replaces value where not null
};

/// One number for all elements: from the host or, in a grouped kernel, one on the device for each group.
struct Scalar : Node<ScalarArguments> {
  using Node<ScalarArguments>::Node;

  struct ConsumerStoreCallbacks : fusion::EmptyConsumerStoreCallbacks {
    float value;
    CUTLASS_DEVICE explicit ConsumerStoreCallbacks(float value) : value(value) {}

    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<float, N> visit(cutlass::Array<Accumulator, N> const&, int, int, int) {
      cutlass::Array<float, N> result;
      result.fill(value);
      return result;
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    int const group = cute::get<3>(args.tile_coord_mnkl);
    return ConsumerStoreCallbacks(params->groups != nullptr ? params->groups[group] : params->value);
  }
};

/// Nodes that broadcast vectors over a kernel's tile. A swapped kernel computes D^T: the rows of D are the
/// columns of its tile.
///
/// CtaTile is the kernel's tile. The strides are bools, which CUTLASS reads as 0 or 1: a vector or a single
/// number is chosen at run time, so that one kernel serves both. The alignment is 1: vectors may start at any
/// float.
template <class CtaTile, bool kGrouped, bool kSwapped>
struct Broadcast {
  using Element = cute::conditional_t<kGrouped, float*, float>;
  using AlongM =
      fusion::Sm90ColBroadcast<0, CtaTile, Element, float, cute::Stride<bool, cute::_0, int64_t>, 1>;
  using AlongN =
      fusion::Sm90RowBroadcast<0, CtaTile, Element, float, cute::Stride<cute::_0, bool, int64_t>, 1>;
  using PerRow = cute::conditional_t<kSwapped, AlongN, AlongM>;  // (m) of D
  using PerCol = cute::conditional_t<kSwapped, AlongM, AlongN>;  // (n) of D

  static typename AlongM::Arguments along_m(VectorOf<kGrouped> v, float absent) {
    return {v.data, absent, {v.is_vector, cute::_0{}, 0}};
  }
  static typename AlongN::Arguments along_n(VectorOf<kGrouped> v, float absent) {
    return {v.data, absent, {cute::_0{}, v.is_vector, 0}};
  }
  static typename PerRow::Arguments per_row(VectorOf<kGrouped> v, float absent = 1.0f) {
    if constexpr (kSwapped) {
      return along_n(v, absent);
    } else {
      return along_m(v, absent);
    }
  }
  static typename PerCol::Arguments per_col(VectorOf<kGrouped> v, float absent = 1.0f) {
    if constexpr (kSwapped) {
      return along_m(v, absent);
    } else {
      return along_n(v, absent);
    }
  }
};

}  // namespace nodes
}  // namespace cutlass_evt
