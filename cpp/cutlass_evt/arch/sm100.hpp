// SM100 (Blackwell, compute capability 10.0 and 10.3): GEMM of operands with block scales, dense and grouped,
// with one of our epilogues.
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
/// read the values and the swizzled block scales.
template <class Format_>
struct Sm100With {
  using Format = Format_;
  static constexpr int kArch = 100;
  static constexpr int kMaxSharedBytes = 232448;

  // A tile of m = 256 is computed by the two SMs of a CTA pair.
  template <class Tile>
  static constexpr bool kTwoSm = cute::size<0>(Tile{}) == 256;

  template <class Tile, bool kGrouped>
  using EpilogueSchedule =
      cute::conditional_t<kGrouped,
                          cute::conditional_t<kTwoSm<Tile>, cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm,
                                              cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>,
                          cute::conditional_t<kTwoSm<Tile>, cutlass::epilogue::TmaWarpSpecialized2Sm,
                                              cutlass::epilogue::TmaWarpSpecialized1Sm>>;

  /// The CUTLASS types of one kernel; see Dense for the parameters.
  template <class Tile, class Cluster, class Op, bool kGrouped>
  struct Collectives {
    using ElementD = typename Op::ElementOutput;
    static constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<ElementD>::value;
    using LayoutA = LayoutOf<cutlass::layout::RowMajor, kGrouped>;
    using LayoutB = LayoutOf<cutlass::layout::ColumnMajor, kGrouped>;
    using LayoutD = LayoutOfD<Op, kGrouped>;
    using ProblemShape =
        cute::conditional_t<kGrouped, cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>,
                            cute::Shape<int, int, int, int>>;

    // While the visitor tree is evaluated, a thread holds one row of the epilogue tile. 32 columns leave
    // enough registers; CUTLASS's choice, up to 128, spills. For tiles of n = 256, CUTLASS overlaps its two
    // accumulators in tensor memory by all but these columns, and 32 would leave no room there for the block
    // scales.
    static constexpr int kEpilogueColumns = cute::size<1>(Tile{}) == 256 ? 64 : 32;
    static_assert(kEpilogueColumns * sizeof(ElementD) <= 128 || cute::size<1>(Tile{}) != 256,
                  "fp32 output needs tiles of n up to 192");
    using EpilogueTile = cute::Shape<cute::_128, cute::Int<kEpilogueColumns>>;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster, EpilogueTile, float,
        float, void, LayoutD, kAlignmentD, ElementD, LayoutD, kAlignmentD, EpilogueSchedule<Tile, kGrouped>,
        Fusion<Op>>::CollectiveOp;

    // CUTLASS 4.2.0 computes the number of stages without rounding the size of the mbarriers up to 128 bytes
    // and can arrive at one stage too many. The larger carve-out leaves room for them.
    static constexpr int kCarveout = static_cast<int>(sizeof(typename Epilogue::SharedStorage)) + 1024;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, typename Format::ElementA, LayoutA,
        Format::kAlignmentA, typename Format::ElementB, LayoutB, Format::kAlignmentB, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<kCarveout>,
        typename Format::template Sm100Schedule<kGrouped, kTwoSm<Tile>>>::CollectiveOp;

    using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue, void>;
    static_assert(Kernel::SharedStorageSize <= kMaxSharedBytes,
                  "the tile needs more shared memory than SM100 has");

    static_assert(offsetof(typename Kernel::SharedStorage, tensors.mainloop) % kOperandTileAlignment == 0,
                  "operand tiles must start at multiples of the swizzle's period");

    using Operands = BlockScaledOperands<Mainloop>;
  };
};

using Sm100 = Sm100With<Nvfp4>;

}  // namespace cutlass_evt
