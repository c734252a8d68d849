// SM90 (Hopper): GEMM of two exact fp16 operands, dense and grouped, with one of our epilogues.
#pragma once

// First: it changes how the headers below encode tensor maps.
#include "cutlass_evt/arch/cutlass_driver_calls.hpp"

#include "cutlass/arch/arch.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/half.h"
#include "cutlass/layout/matrix.h"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/tile.hpp"

namespace cutlass_evt {

/// The architecture. An operand element is an e2m1 value times its e4m3 block scale. fp16 holds that exactly,
/// so that the tensor cores multiply the same numbers as Blackwell's.
struct Sm90 {
  static constexpr int kArch = 90;
  static constexpr bool kDecodedOperands = true;
  static constexpr int kMaxSharedBytes = 232448;

  using Element = cutlass::half_t;
  static constexpr int kOperandAlignment = 8;  // elements, 16 bytes

  // Two consumer warpgroups share a tile of m >= 128 (cooperative). A tile of m = 64 belongs to one
  // warpgroup, and the two work on different tiles in turn (pingpong).
  template <class Tile>
  static constexpr bool kCooperative = cute::size<0>(Tile{}) >= 128;

  template <class Tile, bool kGrouped>
  using MainloopSchedule = cute::conditional_t<
      kGrouped,
      cute::conditional_t<kCooperative<Tile>, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative,
                          cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>,
      cute::conditional_t<kCooperative<Tile>, cutlass::gemm::KernelTmaWarpSpecializedCooperative,
                          cutlass::gemm::KernelTmaWarpSpecializedPingpong>>;
  template <class Tile, bool kGrouped>
  using EpilogueSchedule = cute::conditional_t<
      kGrouped,
      cute::conditional_t<kCooperative<Tile>, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
                          cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>,
      cute::conditional_t<kCooperative<Tile>, cutlass::epilogue::TmaWarpSpecializedCooperative,
                          cutlass::epilogue::TmaWarpSpecialized>>;

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
    using Scheduler =
        cute::conditional_t<kGrouped, cutlass::gemm::GroupScheduler, cutlass::gemm::PersistentScheduler>;

    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
        cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutD, kAlignmentD, ElementD,
        LayoutD, kAlignmentD, EpilogueSchedule<Tile, kGrouped>, Fusion<Op>>::CollectiveOp;

    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, LayoutA, kOperandAlignment, Element,
        LayoutB, kOperandAlignment, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
            sizeof(typename Epilogue::SharedStorage))>,
        MainloopSchedule<Tile, kGrouped>>::CollectiveOp;

    using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue, Scheduler>;
    static_assert(Kernel::SharedStorageSize <= kMaxSharedBytes,
                  "the tile needs more shared memory than SM90 has");

    struct Operands {
      using ElementData = Element;

      /// The operands are a (m, k) and b (n, k) in fp16, row-major and contiguous.
      static typename Mainloop::Arguments mainloop_arguments(void const* a, void const*, void const* b,
                                                             void const*, int, int, int k) {
        return {static_cast<Element const*>(a), {k, {}, {}}, static_cast<Element const*>(b), {k, {}, {}}};
      }

      /// The tables of block scales: none, since the operands are decoded.
      struct ScaleTable {
        template <class Allocate>
        void lay_out(Allocate const&) {}
        CUTLASS_DEVICE void set(int, void const*, void const*, cute::Shape<int, int, int> const&, int) const {
        }
      };

      template <class Table>
      static typename Mainloop::Arguments grouped_mainloop_arguments(Table const& table) {
        return {table.a, table.stride_a, table.b, table.stride_b};
      }
    };
  };
};

}  // namespace cutlass_evt
