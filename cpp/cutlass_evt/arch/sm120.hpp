// SM120 (consumer and workstation Blackwell, compute capability 12.0 and 12.1): GEMM of operands with block
// scales, dense and grouped, with one of our epilogues.
#pragma once

// First: it changes how the headers below encode tensor maps.
#include "cutlass_evt/arch/cutlass_driver_calls.hpp"

#include "cutlass/arch/arch.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/layout/matrix.h"
#include "cutlass_evt/arch/block_scaled.hpp"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/operands/nvfp4.hpp"
#include "cutlass_evt/tile.hpp"

namespace cutlass_evt {

/// The architecture with operands of a format, which is a struct of cutlass_evt/operands/. Its tensor cores
/// read the values and the swizzled block scales, as SM100's do, but with mma.sync and from registers: there
/// is no tensor memory, no pair of SMs, and no multicast.
template <class Format_>
struct Sm120With {
  using Format = Format_;
  static constexpr int kArch = 120;
  static constexpr int kMaxSharedBytes = 101376;

  // Two consumer warpgroups share a tile (cooperative). The other schedule, pingpong, lacks a fence in
  // CUTLASS before 4.4.
  template <bool kGrouped>
  using MainloopSchedule =
      cute::conditional_t<kGrouped, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  template <bool kGrouped>
  using EpilogueSchedule =
      cute::conditional_t<kGrouped, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
                          cutlass::epilogue::TmaWarpSpecializedCooperative>;

  /// The CUTLASS types of one kernel; see Dense for the parameters.
  template <class Tile, class Cluster, class Op, bool kGrouped>
  struct Collectives {
    static_assert(cute::size(Cluster{}) == 1, "SM120 has no multicast, so that clusters gain nothing");
    using ElementD = typename Op::ElementOutput;
    static constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<ElementD>::value;
    using LayoutA = LayoutOf<cutlass::layout::RowMajor, kGrouped>;
    using LayoutB = LayoutOf<cutlass::layout::ColumnMajor, kGrouped>;
    using LayoutD = LayoutOfD<Op, kGrouped>;
    using ProblemShape =
        cute::conditional_t<kGrouped, cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>,
                            cute::Shape<int, int, int, int>>;

    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD, kAlignmentD, ElementD,
        LayoutD, kAlignmentD, EpilogueSchedule<kGrouped>, Fusion<Op>>::CollectiveOp;

    // CUTLASS 4.2.0 computes the number of stages without rounding the size of the mbarriers up to 128 bytes
    // and can arrive at one stage too many. The larger carve-out leaves room for them.
    static constexpr int kCarveout = static_cast<int>(sizeof(typename Epilogue::SharedStorage)) + 1024;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm120, cutlass::arch::OpClassBlockScaledTensorOp, typename Format::ElementA, LayoutA,
        Format::kAlignmentA, typename Format::ElementB, LayoutB, Format::kAlignmentB, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<kCarveout>,
        MainloopSchedule<kGrouped>>::CollectiveOp;

    using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue, void>;
    static_assert(Kernel::SharedStorageSize <= kMaxSharedBytes,
                  "the tile needs more shared memory than SM120 has");

    static_assert(offsetof(typename Kernel::SharedStorage, tensors.mainloop) % kOperandTileAlignment == 0,
                  "operand tiles must start at multiples of the swizzle's period");

    using Operands = BlockScaledOperands<Mainloop>;
  };
};

using Sm120 = Sm120With<Nvfp4>;

}  // namespace cutlass_evt
