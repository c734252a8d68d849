// Fusion<Op>: makes one of our epilogues a CUTLASS fusion operation, for every architecture.
#pragma once

#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/callbacks.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass_evt/epilogue/nodes.hpp"

namespace cutlass_evt {

/// Give this to a CUTLASS epilogue CollectiveBuilder as its FusionOperation. The builder supplies the CTA
/// tile, and the epilogue's `thread` arguments become Op::Arguments, by name.
///
/// Op must have: kName, ElementOutput, Arguments, and Tree<CtaTile> with `type` (the visitor tree) and
/// `lower(Arguments)`.
///
/// The callbacks of SM100, SM103 and SM120 alias to those of SM90 in CUTLASS, so the specialisation below
/// reaches them all.
template <class Op>
struct Fusion : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = typename Op::ElementOutput;
  using ElementCompute = float;
  static constexpr auto RoundStyle = nodes::kRoundToNearest;
};

}  // namespace cutlass_evt

namespace cutlass::epilogue::fusion {

template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore, class Op,
          class CtaTile, class EpilogueTile>
struct FusionCallbacks<
    epilogue::Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    cutlass_evt::Fusion<Op>, CtaTile, EpilogueTile> : Op::template Tree<CtaTile>::type {
  using Tree = typename Op::template Tree<CtaTile>;
  using Impl = typename Tree::type;
  using Operation = cutlass_evt::Fusion<Op>;

  struct Arguments : Op::Arguments {
    Arguments() = default;
    Arguments(typename Op::Arguments const& args) : Op::Arguments(args) {}
    operator typename Impl::Arguments() const { return Tree::lower(*this); }
  };

  using Impl::Impl;
};

}  // namespace cutlass::epilogue::fusion
