// The operands of kernels whose tensor cores read values and swizzled block scales, as arguments of CUTLASS.
// SM100 and SM120 share them.
#pragma once

#include "cute/layout.hpp"
#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// Mainloop is the CUTLASS mainloop of the kernel.
template <class Mainloop>
struct BlockScaledOperands {
  using ElementA = typename Mainloop::ArrayElementA;
  using ElementB = typename Mainloop::ArrayElementB;
  using Scale = typename Mainloop::ElementSF;
  using Config = typename Mainloop::Sm1xxBlkScaledConfig;
  static constexpr int kBlock = Config::SFVecSize;  // elements of a row that share a scale

  /// The operands are a (m, k) and b (n, k), row-major and contiguous, and their swizzled scales.
  static typename Mainloop::Arguments mainloop_arguments(void const* a, void const* scale_a, void const* b,
                                                         void const* scale_b, int m, int n, int k) {
    auto shape = cute::make_shape(m, n, k, 1);
    return {static_cast<ElementA const*>(a),    {k, {}, {}},
            static_cast<ElementB const*>(b),    {k, {}, {}},
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
      // From CUTLASS 4.5 on, a shape of rank 3 gives a layout of rank 2, which is not the type of the table.
      auto const whole = cute::append<4>(shape, 1);
      layout_a[g] = Config::tile_atom_to_shape_SFA(whole);
      layout_b[g] = Config::tile_atom_to_shape_SFB(whole);
      int const row_tile_bytes = (row_k / kBlock + 3) / 4 * 512;
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

}  // namespace cutlass_evt
