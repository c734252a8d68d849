// What the kernels on prepacked weights take, measured: the data behind their selection on H100 and H200.
#pragma once

#include "kernel.hpp"

namespace fp4gemm {

/// Microseconds of a product: fixed, and for every 64 of k of each tile that a worker has in turn; more where
/// tiles are split along k, and for each tile after the first. chunk_2_us: where two CTAs share a
/// multiprocessor, of each; 0 for kernels that have one. chunk_64_us, chunk_128_us: of a last tile with so
/// many tokens or fewer; 0 where it takes as long as any.
struct PrepackedFigures {
  int tile_m, tile_n, tile_k;
  double fixed_us, chunk_us, split_us, tile_us, chunk_2_us, chunk_64_us, chunk_128_us;

  constexpr double chunk_us_of(int64_t tokens) const {
    return chunk_64_us > 0 && tokens <= 64     ? chunk_64_us
           : chunk_128_us > 0 && tokens <= 128 ? chunk_128_us
                                               : chunk_us;
  }
};

// An H200, 2026-11-22, 1755 to 1980 MHz: lines through the times of (8192, 8192), (8192, 2048), (4096, 4096)
// and (16384, 16384) weights by CUDA graph replay, tile_us from 128 and 256 experts (`python -m bench
// hopper`). An H100 has the same multiprocessors and less bandwidth.
constexpr PrepackedFigures kPrepackedFigures[] = {
    {8, 64, 512, 2.5, 0.078, 0.7, 0.8, 0.152, 0, 0},  {8, 64, 1024, 2.9, 0.070, 1.3, 1.5, 0, 0, 0},
    {16, 64, 256, 1.5, 0.097, 1.8, 0.8, 0.193, 0, 0}, {16, 64, 512, 2.2, 0.088, 1.9, 1.5, 0, 0, 0},
    {16, 128, 512, 3.2, 0.165, 1.3, 1.8, 0, 0, 0},    {32, 64, 256, 2.2, 0.105, 1.8, 1.7, 0, 0, 0},
    {32, 128, 256, 3.2, 0.185, 1.3, 1.8, 0, 0, 0},    {64, 128, 256, 3.5, 0.235, 1.8, 1.4, 0, 0, 0},
    {128, 128, 128, 5.2, 0.345, 2.9, 3.3, 0, 0, 0},   {256, 128, 64, 6.3, 0.612, 4.5, 4.5, 0, 0.36, 0.43},
};

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
