// Fusion<Op>: makes one of our epilogues a CUTLASS fusion operation, for every architecture.
#pragma once

#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/callbacks.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass_evt/epilogue/nodes.hpp"

namespace cutlass_evt {

/// Give this to a CUTLASS epilogue CollectiveBuilder as its FusionOperation. The builder supplies the CTA
/// tile, and the epilogue's `thread` arguments become Op::ArgumentsOf<grouped>, by name.
///
/// Op must have: kName, kSwapped, ElementOutput, ArgumentsOf<bool grouped>, and Tree<CtaTile, bool grouped>
/// with `type` (the visitor tree) and `lower(ArgumentsOf<grouped>)`.
///
/// The callbacks of SM100, SM103 and SM120 alias to those of SM90 in CUTLASS, so the two specialisations
/// below reach them all.
template <class Op>
struct Fusion : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = typename Op::ElementOutput;
  using ElementCompute = float;
  static constexpr auto RoundStyle = nodes::kRoundToNearest;
};

constexpr int kOperandTileAlignment = 1024;  // bytes, the period of the 128-byte swizzle

/// The base of both specialisations below: the visitor tree, with its arguments by name.
template <class Op, class CtaTile, bool kGrouped>
struct Callbacks : Op::template Tree<CtaTile, kGrouped>::type {
  using Tree = typename Op::template Tree<CtaTile, kGrouped>;
  using Impl = typename Tree::type;
  using Operation = Fusion<Op>;

  struct Arguments : Op::template ArgumentsOf<kGrouped> {
    using Base = typename Op::template ArgumentsOf<kGrouped>;
    Arguments() = default;
    Arguments(Base const& args) : Base(args) {}
    operator typename Impl::Arguments() const { return Tree::lower(*this); }
  };

  // The epilogue's vectors lie before the operands in shared memory. CUTLASS's operand descriptors are valid
  // for tiles at multiples of 1024 bytes, the period of the 128-byte swizzle. On SM100 nothing else ensures
  // that alignment once the swizzle of D is narrower.
  struct alignas(kOperandTileAlignment) SharedStorage : Impl::SharedStorage {};

  using Impl::Impl;
};

}  // namespace cutlass_evt

namespace cutlass::epilogue::fusion {

template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore, class Op,
          class CtaTile, class EpilogueTile>
struct FusionCallbacks<
    epilogue::Sm90TmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC, DelayTmaStore>,
    cutlass_evt::Fusion<Op>, CtaTile, EpilogueTile> : cutlass_evt::Callbacks<Op, CtaTile, false> {
  using cutlass_evt::Callbacks<Op, CtaTile, false>::Callbacks;
};

template <int StagesC, int StagesD, int FragmentSize, bool ReuseSmemC, bool DelayTmaStore, int WarpGroups,
          class Op, class CtaTile, class EpilogueTile>
struct FusionCallbacks<epilogue::Sm90PtrArrayTmaWarpSpecialized<StagesC, StagesD, FragmentSize, ReuseSmemC,
                                                                DelayTmaStore, WarpGroups>,
                       cutlass_evt::Fusion<Op>, CtaTile, EpilogueTile>
    : cutlass_evt::Callbacks<Op, CtaTile, true> {
  using cutlass_evt::Callbacks<Op, CtaTile, true>::Callbacks;
};

}  // namespace cutlass::epilogue::fusion
