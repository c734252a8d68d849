// The grids of the kernels that quantize tiles of kTileRows x kTileColumns elements.
#pragma once

#include "quantize/columns.cuh"
#include "quantize/grid.hpp"

namespace fp4gemm {

/// Calls launch(grid, first_tile) for the grids of CTAs that together cover x^T (k, columns), a CTA for each
/// tile of kTileColumns x kTileRows. They cover whole tiles of 128 x 4 scales of either side.
template <class Launch>
void for_tile_grids(int64_t k, int64_t columns, Launch const& launch) {
  auto const width = static_cast<unsigned>(scale_rows_of(k) / kTileColumns);
  for_grid_parts(ceil_div(columns, kTileRows), kMaxGridY, [&](int64_t first, unsigned count) {
    launch(dim3(width, count), static_cast<unsigned>(first));
  });
}

}  // namespace fp4gemm
