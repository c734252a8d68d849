// SM100 (Blackwell, compute capability 10.0 and 10.3): NVFP4 GEMM, dense and grouped, with one of our
// epilogues.
#pragma once

// First: it changes how the headers below encode tensor maps.
#include "cutlass_evt/arch/cutlass_driver_calls.hpp"

#include "cutlass/arch/arch.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/float_subbyte.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/layout/matrix.h"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/tile.hpp"

namespace cutlass_evt {

/// The architecture. Its tensor cores read packed e2m1 codes and swizzled e4m3 scales.
struct Sm100 {
  static constexpr int kArch = 100;
  static constexpr bool kDecodedOperands = false;
  static constexpr int kMaxSharedBytes = 232448;

  using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  static constexpr int kOperandAlignment = 32;  // elements, 16 bytes

  // A tile of m = 256 is computed by the two SMs of a CTA pair.
  template <class Tile>
  static constexpr bool kTwoSm = cute::size<0>(Tile{}) == 256;

  template <class Tile, bool kGrouped>
  using MainloopSchedule = cute::conditional_t<
      kGrouped,
      cute::conditional_t<kTwoSm<Tile>, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100,
                          cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100>,
      cute::conditional_t<kTwoSm<Tile>, cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100,
                          cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100>>;
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
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Element, LayoutA, kOperandAlignment,
        Element, LayoutB, kOperandAlignment, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<kCarveout>,
        MainloopSchedule<Tile, kGrouped>>::CollectiveOp;

    using Kernel = cutlass::gemm::kernel::GemmUniversal<ProblemShape, Mainloop, Epilogue, void>;
    static_assert(Kernel::SharedStorageSize <= kMaxSharedBytes,
                  "the tile needs more shared memory than SM100 has");

    static_assert(offsetof(typename Kernel::SharedStorage, tensors.mainloop) % kOperandTileAlignment == 0,
                  "operand tiles must start at multiples of the swizzle's period");

    using ElementData = typename Mainloop::ArrayElementA;
    using Scale = typename Mainloop::ElementSF;
    using Config = typename Mainloop::Sm1xxBlkScaledConfig;

    /// The operands are a (m, k) and b (n, k) as packed e2m1 codes, row-major and contiguous, and their
    /// swizzled scales.
    static typename Mainloop::Arguments mainloop_arguments(void const* a, void const* scale_a, void const* b,
                                                           void const* scale_b, int m, int n, int k) {
      auto shape = cute::make_shape(m, n, k, 1);
      return {static_cast<ElementData const*>(a), {k, {}, {}},
              static_cast<ElementData const*>(b), {k, {}, {}},
              static_cast<Scale const*>(scale_a), Config::tile_atom_to_shape_SFA(shape),
              static_cast<Scale const*>(scale_b), Config::tile_atom_to_shape_SFB(shape)};
    }

    /// The tables of block scales, one entry for each group.
    struct ScaleTable {
      using Layout = decltype(Config::deduce_layoutSFA());
      Scale const** a;
      Scale const** b;
      Layout* layout_a;
      Layout* layout_b;

      /// Calls allocate(array) for each table.
      template <class Allocate>
      void lay_out(Allocate const& allocate) {
        allocate(a);
        allocate(b);
        allocate(layout_a);
        allocate(layout_b);
      }

      /// Sets the entry of group g. row_k is the length of a whole row of the operands, of which the group
      /// may cover a part.
      CUTLASS_DEVICE void set(int g, void const* scale_a, void const* scale_b,
                              cute::Shape<int, int, int> const& shape, int row_k) const {
        a[g] = static_cast<Scale const*>(scale_a);
        b[g] = static_cast<Scale const*>(scale_b);
        layout_a[g] = Config::tile_atom_to_shape_SFA(shape);
        layout_b[g] = Config::tile_atom_to_shape_SFB(shape);
        int const row_tile_bytes = (row_k / 16 + 3) / 4 * 512;
        cute::get<0, 1>(layout_a[g].stride()) = row_tile_bytes;
        cute::get<0, 1>(layout_b[g].stride()) = row_tile_bytes;
      }
    };

    template <class Table>
    static typename Mainloop::Arguments grouped_mainloop_arguments(Table const& table) {
      return {table.a,        table.stride_a,        table.b,        table.stride_b,
              table.scales.a, table.scales.layout_a, table.scales.b, table.scales.layout_b};
    }
  };
};

}  // namespace cutlass_evt
