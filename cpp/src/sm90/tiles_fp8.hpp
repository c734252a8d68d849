// The tiles of the SM90 kernels on e4m3 tokens and weights that are prepacked for them, as sm90/tiles.hpp has
// those of the kernels for fp16 and bf16 tokens.
//
// kPartTokens: the tokens of a tile whose sums are promoted at a time (MixedInputConfig); absent in the tiles
// whose sums stay in the accumulators of the tensor cores, which use_fast_accum allows.
//
// The figures were fitted to the times of 136 products on an H200, 2026-11-26, dense ones with n and k from
// 2048 to 28672 and m from 1 to 2048, and 128 experts with 1 to 256 tokens on average. With them the selected
// kernel needs 0.7 % more time than the fastest on average, and 13 % at most.
#pragma once

#include "cutlass/float8.h"
#include "sm90/tiles.hpp"

namespace fp4gemm::sm90 {

struct Fp8Tile16x64x256 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 16, kRows = 64, kDepth = 256;
  static constexpr int kDepthGroups = 2, kCtasPerSm = 2;
  static constexpr int kPartTokens = 16;
  static constexpr double kFixedUs = 2.1, kChunkUs = 0.082, kSplitUs = 0.7, kTileUs = 1.0;
  static constexpr double kSharedChunkUs = 0.134;
};

struct Fp8Tile16x64x512 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 16, kRows = 64, kDepth = 512;
  static constexpr int kDepthGroups = 4;
  static constexpr int kPartTokens = 16;
  static constexpr double kFixedUs = 2.8, kChunkUs = 0.067, kSplitUs = 1.7, kTileUs = 1.4;
};

struct Fp8Tile32x64x256 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 32, kRows = 64, kDepth = 256;
  static constexpr int kDepthGroups = 2;
  static constexpr int kPartTokens = 32;
  static constexpr double kFixedUs = 2.2, kChunkUs = 0.086, kSplitUs = 1.7, kTileUs = 0.9;
};

// For experts with up to about 24 tokens. The figures were fitted to 128 experts with 4 and 16 tokens on
// average and (1536, 2048), (2048, 768) and (4096, 1536) weights: the model is within 6 % of those six times.
// A CTA that has an SM to itself was not measured: its kChunkUs is that of Fp8Tile32x128x128 for 16 tokens,
// and the selection takes other tiles for such products.
struct Fp8Tile32x64x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 32, kRows = 64, kDepth = 128;
  static constexpr int kCtasPerSm = 3;
  static constexpr int kPartTokens = 32;
  static constexpr double kFixedUs = 2.2, kChunkUs = 0.16, kSplitUs = 1.7, kTileUs = 0.9;
  static constexpr double kSharedChunkUs = 0.22;
};

struct Fp8Tile32x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 32, kRows = 128, kDepth = 128;
  static constexpr int kPartTokens = 32;
  static constexpr double kFixedUs = 2.3, kChunkUs = 0.169, kSplitUs = 2.3, kTileUs = 0.9;
  static constexpr SmallTile kSmall[] = {{16, 0.16}};
};

struct Fp8Tile64x64x256 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 64, kRows = 64, kDepth = 256;
  static constexpr int kDepthGroups = 2;
  static constexpr int kPartTokens = 64;
  static constexpr double kFixedUs = 2.1, kChunkUs = 0.12, kSplitUs = 2.5, kTileUs = 1.1;
};

struct Fp8Tile64x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 64, kRows = 128, kDepth = 128;
  static constexpr int kPartTokens = 64;
  static constexpr double kFixedUs = 2.5, kChunkUs = 0.21, kSplitUs = 3.2, kTileUs = 1.2;
};

// For experts with about 64 tokens, of which many have a few more: 4 to 9 % faster there than other tiles.
struct Fp8Tile96x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 96, kRows = 128, kDepth = 128;
  static constexpr int kPartTokens = 96;
  static constexpr double kFixedUs = 2.1, kChunkUs = 0.273, kSplitUs = 3.6, kTileUs = 0.8;
};

struct Fp8Tile128x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 128, kRows = 128, kDepth = 128;
  static constexpr int kPartTokens = 128;
  static constexpr double kFixedUs = 1.8, kChunkUs = 0.296, kSplitUs = 4.8, kTileUs = 1.0;
};

struct Fp8Tile256x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 256, kRows = 128, kDepth = 128;
  static constexpr int kPartTokens = 64;
  static constexpr double kFixedUs = 2.5, kChunkUs = 0.479, kSplitUs = 7.6, kTileUs = 2.5;
  static constexpr SmallTile kSmall[] = {{64, 0.229}, {128, 0.302}};
};

struct Fp8Fast64x64x256 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 64, kRows = 64, kDepth = 256;
  static constexpr int kDepthGroups = 2;
  static constexpr double kFixedUs = 2.2, kChunkUs = 0.11, kSplitUs = 2.5, kTileUs = 1.1;
};

struct Fp8Fast64x128x256 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 64, kRows = 128, kDepth = 256;
  static constexpr double kFixedUs = 2.7, kChunkUs = 0.171, kSplitUs = 2.8, kTileUs = 1.3;
};

struct Fp8Fast128x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 128, kRows = 128, kDepth = 128;
  static constexpr double kFixedUs = 1.9, kChunkUs = 0.255, kSplitUs = 5.4, kTileUs = 1.3;
};

struct Fp8Fast256x128x128 : OneCta<cutlass::float_e4m3_t> {
  static constexpr int kTokens = 256, kRows = 128, kDepth = 128;
  static constexpr double kFixedUs = 2.2, kChunkUs = 0.397, kSplitUs = 7.4, kTileUs = 1.9;
  static constexpr SmallTile kSmall[] = {{64, 0.243}, {128, 0.289}};
};

// A translation unit for each list.
using Fp8Tiles =
    TileList<Fp8Tile16x64x256, Fp8Tile16x64x512, Fp8Tile32x64x128, Fp8Tile32x64x256, Fp8Tile32x128x128,
             Fp8Tile64x64x256, Fp8Tile64x128x128, Fp8Tile96x128x128, Fp8Tile128x128x128, Fp8Tile256x128x128>;
using Fp8FastTiles = TileList<Fp8Fast64x64x256, Fp8Fast64x128x256, Fp8Fast128x128x128, Fp8Fast256x128x128>;

}  // namespace fp4gemm::sm90
