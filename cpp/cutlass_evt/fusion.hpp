// Fusion<Op>: makes one of our epilogues a CUTLASS fusion operation, for every architecture.
#pragma once

#include "cutlass/epilogue/dispatch_policy.hpp"
#include "cutlass/epilogue/fusion/callbacks.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass_evt/epilogue/visitor.hpp"

namespace cutlass_evt {

/// Give this to a CUTLASS epilogue CollectiveBuilder as its FusionOperation. The builder supplies the CTA
/// tile, and the epilogue's `thread` arguments are made of Op::Arguments and, for a grouped kernel, the
/// tables of its groups.
///
/// Op must have:
///   kName          its name in the names of kernels
///   kSwapped       whether the kernel computes D^T
///   kGated         whether D has half as many columns as the product
///   Result         the element type of C and D, or epilogue::SixteenBits
///   ElementOutput  the type of the elements that CUTLASS stores: StoredAs<Result>, or half of one, see Gated
///   Arguments      EpilogueArguments, or a struct derived from it
///   finish<N>(Arguments, alpha, z, row, column, source), which finishes N elements as epilogue::finish does
///
/// The callbacks of SM100, SM103 and SM120 alias to those of SM90 in CUTLASS, so the two specialisations
/// below reach them all.
template <class Op>
struct Fusion : cutlass::epilogue::fusion::FusionOperation {
  using ElementOutput = typename Op::ElementOutput;
  using ElementCompute = float;
  static constexpr auto RoundStyle = cutlass::FloatRoundStyle::round_to_nearest;
};

constexpr int kOperandTileAlignment = 1024;  // bytes, the period of the 128-byte swizzle

/// The base of both specialisations below: the visitor tree and its arguments.
template <class Op, class CtaTile, bool kGrouped>
struct Callbacks : visitor::Tree<Op, CtaTile, kGrouped>::type {
  using Tree = visitor::Tree<Op, CtaTile, kGrouped>;
  using Impl = typename Tree::type;
  using Operation = Fusion<Op>;

  /// The arguments are a member and no base: CUTLASS treats an argument named beta as its own and refuses it.
  struct Arguments {
    visitor::Arguments<Op> all;
    Arguments() = default;
    Arguments(typename Op::Arguments const& epilogue, EpilogueTables const& tables = {})
        : all{epilogue, tables} {}
    operator typename Impl::Arguments() const { return Tree::lower(all); }
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
