// The measured figures of a kernel on prepacked weights, as the cost model reads them. An architecture whose
// kernels were measured has them beside its tiles: sm90/tiles.hpp.
#pragma once

#include <cstdint>

namespace fp4gemm {

/// A last tile of a group with so many tokens or fewer needs less time.
struct SmallTile {
  int tokens = 0;       // 0: no such tile
  double chunk_us = 0;  // for 64 of k
};

/// The time of a GEMM in microseconds: fixed_us, and chunk_us for every 64 of k of each tile that a worker
/// computes in turn; split_us more where tiles are split along k, and tile_us for each tile after the first.
struct MeasuredFigures {
  double fixed_us, chunk_us, split_us, tile_us;
  int ctas_per_sm;         // CTAs that fit on an SM
  double shared_chunk_us;  // chunk_us where so many CTAs share an SM; a small tile's grows in proportion
  SmallTile small[2];      // from the smallest on
  int most_quantized;      // elements of an A that the kernel quantizes itself; 0: it does not

  /// chunk_us of a tile that has so many tokens.
  constexpr double chunk_us_of(int64_t tokens) const {
    for (SmallTile const& tile : small) {
      if (tokens <= tile.tokens) {
        return tile.chunk_us;
      }
    }
    return chunk_us;
  }
};

}  // namespace fp4gemm
