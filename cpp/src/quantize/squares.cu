// The launches of quantization in squares.
#include "quantize/launch.cuh"
#include "quantize/square.cuh"
#include "quantize/tile_grids.hpp"

namespace fp4gemm {

void launch_squares(TileLaunch const& launch, bool four_over_six, int num_matrices) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    auto const kernel = four_over_six ? quantize_squares<T, true> : quantize_squares<T, false>;
    for_grid_parts(num_matrices, kMaxGridY, [&](int64_t first_matrix, unsigned matrices) {
      for_tile_grids(launch.params.k, launch.params.m, [&](dim3 grid, unsigned first_tile) {
        dim3 const tiles(grid.x, grid.y, matrices);
        (void)launch_waiting(kernel, {tiles, kTileThreads<T>}, launch.device.can_overlap_launches(),
                             launch.stream, launch.params, first_tile, static_cast<unsigned>(first_matrix));
      });
    });
  });
}

}  // namespace fp4gemm
