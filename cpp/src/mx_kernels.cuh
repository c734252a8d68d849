// The kernels of SM100 and SM120 whose operands have an MX format: one tile, which serves all shapes. The
// dense kernels share a mainloop, and so do the grouped ones.
#pragma once

// First: it changes how the headers below encode tensor maps.
#include "cutlass_evt/arch/cutlass_driver_calls.hpp"

#include "cutlass_evt/epilogue/gated.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "cutlass_evt/tile.hpp"
#include "kernel_impl.cuh"

namespace fp4gemm {

/// The rows of the kernel table.
///
/// @tparam Machine The architecture with operands of the format: Sm100With or Sm120With.
/// @tparam Tile The tile of D, and the depth of a step along k.
template <class Machine, class Tile>
struct MxKernels {
  template <template <class, class, class, class> class Mode, class Op>
  using Gemm = Mode<Machine, Tile, cutlass_evt::Cluster<1, 1>, Op>;

  template <template <class, class, class, class> class Mode, class Out>
  using RowCol = Gemm<Mode, cutlass_evt::epilogue::RowCol<Out>>;

  template <template <class, class, class, class> class Mode>
  using Gated = Gemm<Mode, cutlass_evt::epilogue::Gated<cutlass_evt::epilogue::SixteenBits>>;

  template <template <class, class, class, class> class Mode>
  using SixteenBits = RowCol<Mode, cutlass_evt::epilogue::SixteenBits>;

  static constexpr Kernel kRows[] = {
      make_kernel<SixteenBits<cutlass_evt::Dense>, cutlass::bfloat16_t>(),
      make_kernel<SixteenBits<cutlass_evt::Dense>, cutlass::half_t>(),
      make_kernel<RowCol<cutlass_evt::Dense, float>>(),
      make_kernel<Gated<cutlass_evt::Dense>, cutlass::bfloat16_t>(),
      make_kernel<Gated<cutlass_evt::Dense>, cutlass::half_t>(),
      make_kernel<SixteenBits<cutlass_evt::Grouped>, cutlass::bfloat16_t>(),
      make_kernel<SixteenBits<cutlass_evt::Grouped>, cutlass::half_t>(),
      make_kernel<RowCol<cutlass_evt::Grouped, float>>(),
      make_kernel<Gated<cutlass_evt::Grouped>, cutlass::bfloat16_t>(),
      make_kernel<Gated<cutlass_evt::Grouped>, cutlass::half_t>(),
  };
};

}  // namespace fp4gemm
