// What the kernels on prepacked weights take, measured: the data behind their selection on H100 and H200.
#pragma once

#include "kernel.hpp"

namespace fp4gemm {

/// What 64 of k take of a last tile with so many tokens or fewer.
struct SmallTile {
  int tokens;
  double chunk_us;
};

/// Microseconds of a product: fixed, and for every 64 of k of each tile that a worker has in turn; more where
/// tiles are split along k, and for each tile after the first. shared_chunk_us: where ctas_per_sm of them
/// share a multiprocessor, of each, a small tile's in proportion. small: those of fewer tokens that are
/// faster, from the smallest on.
struct PrepackedFigures {
  int tile_m, tile_n, tile_k;
  double fixed_us, chunk_us, split_us, tile_us;
  int ctas_per_sm;
  double shared_chunk_us;
  SmallTile small[2];

  constexpr double chunk_us_of(int64_t tokens) const {
    for (SmallTile const& tile : small) {
      if (tokens <= tile.tokens) {
        return tile.chunk_us;
      }
    }
    return chunk_us;
  }
};

// An H200, 2026-11-22, 1755 to 1980 MHz: lines through the times of (8192, 8192), (8192, 2048), (4096, 4096)
// and (16384, 16384) weights by CUDA graph replay; tile_us and shared_chunk_us from weights of 36864 to
// 165888 rows with k from 768 to 7168, and from 128 and 256 experts (`python -m bench hopper`). With them the
// choice is within 1 % of the best of all kernels on average, over 46 shapes, and within 2 % on an H100,
// which has the same multiprocessors and less bandwidth.
constexpr PrepackedFigures kPrepackedFigures[] = {
    {8, 64, 384, 2.2, 0.085, 0.9, 0.8, 3, 0.212, {}},
    {8, 64, 512, 1.6, 0.088, 1.8, 0.9, 2, 0.139, {}},
    {8, 64, 1024, 2.9, 0.070, 1.3, 1.25, 1, 0, {}},
    {16, 64, 256, 1.5, 0.095, 1.8, 0.5, 2, 0.188, {}},
    {16, 64, 512, 2.2, 0.085, 1.9, 1.5, 1, 0, {}},
    {16, 128, 256, 3.0, 0.162, 1.3, 0.9, 1, 0, {}},
    {32, 64, 256, 2.2, 0.105, 1.8, 1.35, 1, 0, {}},
    {32, 128, 256, 3.2, 0.190, 1.3, 1.0, 1, 0, {{16, 0.163}}},
    {32, 128, 128, 1.6, 0.265, 2.2, 0.9, 2, 0.386, {{16, 0.246}}},
    {64, 128, 256, 3.5, 0.235, 1.8, 1.4, 1, 0, {}},
    {128, 128, 128, 5.2, 0.345, 2.9, 3.3, 1, 0, {}},
    {256, 128, 64, 6.3, 0.612, 4.5, 4.5, 1, 0, {{64, 0.36}, {128, 0.43}}},
};

// Splitting tiles costs more where CTAs share a multiprocessor: they do not advance alike.
constexpr double kSharedSplitUs = 1.0;

// Decoding to bf16 takes more instructions.
constexpr double kBf16Chunk = 1.3;

/// Those of a kernel of the table; of the last for a tile that has not been measured.
constexpr PrepackedFigures prepacked_figures(int tile_m, int tile_n, int tile_k, Operands operands) {
  PrepackedFigures found = kPrepackedFigures[sizeof(kPrepackedFigures) / sizeof(PrepackedFigures) - 1];
  for (PrepackedFigures const& figures : kPrepackedFigures) {
    if (figures.tile_m == tile_m && figures.tile_n == tile_n && figures.tile_k == tile_k) {
      found = figures;
    }
  }
  found.tile_m = tile_m;
  if (operands == Operands::kPrepackedBf16 && tile_m <= 32) {
    found.chunk_us *= kBf16Chunk;
  }
  return found;
}

}  // namespace fp4gemm
