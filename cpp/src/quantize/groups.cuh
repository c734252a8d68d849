// Grouped input: which rows of x a tile of the result belongs to, found by each warp from the group ends.
#pragma once

#include <cstdint>

#include "cutlass_evt/load_after_wait.hpp"
#include "quantize/sizes.hpp"

namespace fp4gemm {

using cutlass_evt::load_after_wait;

/// Group e holds rows offs[e-1]..offs[e]-1 of x. It starts at the next tile of the result: its scales at a
/// multiple of 128 rows of their buffer or, quantized along columns, its columns at a multiple of 64.
struct Groups {
  int const* offs = nullptr;  // (num) cumulative ends, on the device; null: one group of all rows
  int num = 0;
};

/// Where the rows of a tile come from.
struct TileRows {
  int64_t first;  // row of x that the tile begins with
  int64_t count;  // rows of x in the tile; the others are padding
  int group;
  int64_t group_start;  // first row of x of the group
};

__device__ inline int clamp_row(int row, int64_t m) { return min(max(row, 0), static_cast<int>(m)); }

/// Tiles of kTileRows that `rows` rows need.
template <int kTileRows>
__device__ inline int num_tiles(int rows) {
  return static_cast<int>((static_cast<unsigned>(rows) + (kTileRows - 1u)) / kTileRows);
}

/// The rows of x in tile `tile` of the result. All lanes of a warp must call it with the same tile. The
/// groups are divided among the lanes, each of which counts the tiles of consecutive ones.
///
/// An end that lies before the start of its group, or outside of x, is an error of the caller. Such a group
/// counts as empty, or as clipped to x, so that rows.first and rows.count stay inside x and the sums below
/// stay in 32 bits whatever the ends are.
template <int kTileRows = kScaleTileRows>
__device__ inline TileRows find_tile(Groups const& groups, int64_t m, int64_t tile) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const per_lane = (groups.num + 31) / 32;
  int const first = min(lane * per_lane, groups.num);
  int const last = min(first + per_lane, groups.num);
  int const start = first > 0 ? clamp_row(load_after_wait(groups.offs + first - 1), m) : 0;
  int own = 0;  // tiles of the lane's groups
  int begin = start;
#pragma unroll 4
  for (int e = first; e < last; ++e) {
    int const end = max(clamp_row(load_after_wait(groups.offs + e), m), begin);
    own += num_tiles<kTileRows>(end - begin);
    begin = end;
  }
  int up_to = own;  // tiles of the groups of this lane and of those before it
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
    up_to += lane >= step ? other : 0;
  }
  unsigned const found = __ballot_sync(0xFFFFFFFFu, up_to > tile);
  if (found == 0) {
    return {0, 0, 0, 0};  // behind the last group
  }
  int const source = __ffs(static_cast<int>(found)) - 1;
  int64_t in_lane = tile - __shfl_sync(0xFFFFFFFFu, up_to - own, source);  // among the tiles of the source
  begin = __shfl_sync(0xFFFFFFFFu, start, source);
  for (int e = source * per_lane;; ++e) {
    int const end = max(clamp_row(load_after_wait(groups.offs + e), m), begin);
    int const tiles = num_tiles<kTileRows>(end - begin);
    if (in_lane < tiles) {
      int64_t const row = begin + in_lane * kTileRows;
      return {row, min(end - row, int64_t{kTileRows}), e, begin};
    }
    in_lane -= tiles;
    begin = end;
  }
}

}  // namespace fp4gemm
