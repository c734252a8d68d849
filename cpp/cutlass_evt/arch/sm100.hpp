// SM100 (Blackwell, compute capability 10.0 and 10.3): dense NVFP4 GEMM with one of our epilogues.
#pragma once

#include "cutlass/arch/arch.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/float_subbyte.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/layout/matrix.h"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/tile.hpp"

namespace cutlass_evt {

/// The tensor cores read packed e2m1 and swizzled e4m3 scales themselves.
struct Sm100 {
  static constexpr int kArch = 100;
  static constexpr bool kDecodedOperands = false;
  static constexpr int kMaxSharedBytes = 232448;

  using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  static constexpr int kOperandAlignment = 32;  // elements, 16 bytes

  // A tile of m = 256 is split over the two SMs of a CTA pair.
  template <class Tile>
  static constexpr bool kTwoSm = cute::size<0>(Tile{}) == 256;

  template <class Tile>
  using MainloopSchedule =
      cute::conditional_t<kTwoSm<Tile>, cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100,
                          cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100>;
  template <class Tile>
  using EpilogueSchedule = cute::conditional_t<kTwoSm<Tile>, cutlass::epilogue::TmaWarpSpecialized2Sm,
                                               cutlass::epilogue::TmaWarpSpecialized1Sm>;

  template <class Tile, class Cluster, class Op>
  struct Dense {
    using ElementD = typename Op::ElementOutput;
    static constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<ElementD>::value;
    using RowMajor = cutlass::layout::RowMajor;
    using ColumnMajor = cutlass::layout::ColumnMajor;

    // Epilogue tiles of 128 bytes a row. CUTLASS would choose (128, 128) for n = 256, whose visitor tree
    // spills registers.
    using EpilogueTile = cute::Shape<cute::_128, cute::Int<128 / static_cast<int>(sizeof(ElementD))>>;
    using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster, EpilogueTile, float,
        float, void, RowMajor, kAlignmentD, ElementD, RowMajor, kAlignmentD, EpilogueSchedule<Tile>,
        Fusion<Op>>::CollectiveOp;

    // CUTLASS 4.2.0 counts the stages without rounding the barriers up to 128 bytes and may take one stage
    // too many; the extra carve-out gives the barriers their room.
    static constexpr int kCarveout = static_cast<int>(sizeof(typename Epilogue::SharedStorage)) + 1024;
    using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
        cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Element, RowMajor, kOperandAlignment,
        Element, ColumnMajor, kOperandAlignment, float, Tile, Cluster,
        cutlass::gemm::collective::StageCountAutoCarveout<kCarveout>, MainloopSchedule<Tile>>::CollectiveOp;

    using Kernel =
        cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue, void>;
    static_assert(Kernel::SharedStorageSize <= kMaxSharedBytes,
                  "the tile needs more shared memory than SM100 has");

    /// Operands: a (m, k) and b (n, k) packed e2m1, rows contiguous, with their swizzled scales.
    static typename Mainloop::Arguments mainloop_arguments(void const* a, void const* scale_a, void const* b,
                                                           void const* scale_b, int m, int n, int k) {
      using Config = typename Mainloop::Sm1xxBlkScaledConfig;
      using Data = typename Mainloop::ArrayElementA;
      using Scale = typename Mainloop::ElementSF;
      auto shape = cute::make_shape(m, n, k, 1);
      return {static_cast<Data const*>(a),        {k, {}, {}},
              static_cast<Data const*>(b),        {k, {}, {}},
              static_cast<Scale const*>(scale_a), Config::tile_atom_to_shape_SFA(shape),
              static_cast<Scale const*>(scale_b), Config::tile_atom_to_shape_SFB(shape)};
    }
  };
};

}  // namespace cutlass_evt
