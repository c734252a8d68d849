// The tiles of the SM90 kernels on prepacked weights, each with its measured figures, and the lists that make
// up the kernel table. To add a tile: a struct here and its name in a list; without its figures the struct
// does not compile.
#pragma once

#include <type_traits>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_evt/mainloop/sm90_nvfp4_config.hpp"
#include "figures.hpp"
#include "tile_list.hpp"

namespace fp4gemm::sm90 {

// A tile has kTokens rows of A and kRows rows of B and advances by kDepth of k; these three are in its name.
// kDepthGroups: warpgroups that share the rows and take turns along k. kCluster: CTAs side by side along the
// rows of B that load the tokens for each other. kCtasPerSm: CTAs that fit on an SM, which bounds their
// registers and shared memory.
//
// The figures are those of MeasuredFigures. A tile of several CTAs on an SM has kSharedChunkUs too, and a
// tile whose last one of a group may be smaller (Sm90Nvfp4Config::kLeastTokens) has kSmall.
//
// They were measured on an H200, 2026-11-22, at 1755 to 1980 MHz (`python -m bench hopper`): lines through
// the times of (8192, 8192), (8192, 2048), (4096, 4096) and (16384, 16384) weights, by replay of a CUDA
// graph; kTileUs and kSharedChunkUs from weights of 36864 to 165888 rows with k from 768 to 7168, and from
// 128 and 256 experts. The figures of the tiles of up to 32 tokens were fitted once more, to 57 products with
// n and k from 2048 to 28672: there the selected kernel needs on average 1.6 % more time than the fastest. On
// an H100, which has the same SMs and less bandwidth, the figures before that fit were within 2 %.

/// What most tiles have; one that differs says so. Element is the type of the tokens, and of the decoded
/// weights.
template <class Element_>
struct OneCta {
  using Element = Element_;
  static constexpr int kDepthGroups = 1, kCluster = 1, kCtasPerSm = 1;
};

struct Tile8x64x384 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 8, kRows = 64, kDepth = 384;
  static constexpr int kDepthGroups = 2, kCtasPerSm = 3;
  static constexpr double kFixedUs = 2.5, kChunkUs = 0.090, kSplitUs = 0.7, kTileUs = 0.8;
  static constexpr double kSharedChunkUs = 0.212;
};

struct Tile8x64x512 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 8, kRows = 64, kDepth = 512;
  static constexpr int kDepthGroups = 2, kCtasPerSm = 2;
  static constexpr double kFixedUs = 1.6, kChunkUs = 0.088, kSplitUs = 1.4, kTileUs = 0.9;
  static constexpr double kSharedChunkUs = 0.139;
};

struct Tile8x64x1024 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 8, kRows = 64, kDepth = 1024;
  static constexpr int kDepthGroups = 4;
  static constexpr double kFixedUs = 2.6, kChunkUs = 0.066, kSplitUs = 1.5, kTileUs = 1.25;
};

struct Tile16x64x256 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 16, kRows = 64, kDepth = 256;
  static constexpr int kDepthGroups = 2, kCtasPerSm = 2;
  static constexpr double kFixedUs = 2.0, kChunkUs = 0.092, kSplitUs = 1.3, kTileUs = 0.5;
  static constexpr double kSharedChunkUs = 0.188;
};

struct Tile16x64x512 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 16, kRows = 64, kDepth = 512;
  static constexpr int kDepthGroups = 4;
  static constexpr double kFixedUs = 2.0, kChunkUs = 0.081, kSplitUs = 2.0, kTileUs = 1.5;
};

struct Tile16x128x256 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 16, kRows = 128, kDepth = 256;
  static constexpr int kDepthGroups = 2;
  static constexpr double kFixedUs = 2.9, kChunkUs = 0.172, kSplitUs = 1.0, kTileUs = 0.9;
};

struct Tile32x64x256 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 32, kRows = 64, kDepth = 256;
  static constexpr int kDepthGroups = 4;
  static constexpr double kFixedUs = 2.1, kChunkUs = 0.107, kSplitUs = 2.0, kTileUs = 1.35;
};

struct Tile32x128x128 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 32, kRows = 128, kDepth = 128;
  static constexpr int kCtasPerSm = 2;
  static constexpr double kFixedUs = 1.6, kChunkUs = 0.265, kSplitUs = 2.2, kTileUs = 0.9;
  static constexpr double kSharedChunkUs = 0.386;
  static constexpr SmallTile kSmall[] = {{16, 0.246}};
};

struct Tile32x128x256 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 32, kRows = 128, kDepth = 256;
  static constexpr int kDepthGroups = 2;
  static constexpr double kFixedUs = 3.2, kChunkUs = 0.190, kSplitUs = 2.5, kTileUs = 1.0;
  static constexpr SmallTile kSmall[] = {{16, 0.163}};
};

struct Tile64x128x256 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 64, kRows = 128, kDepth = 256;
  static constexpr double kFixedUs = 3.5, kChunkUs = 0.235, kSplitUs = 1.8, kTileUs = 1.4;
};

// For experts with about 64 tokens, of which many have a few more. The figures of this tile were set by hand,
// above a fit to products of (8192, 8192) and (4096, 4096) weights and of 128 experts (1536, 2048) and (2048,
// 1536) on an H200, 2026-11-23; bench/notes/hopper_tried.md says why.
struct Tile80x192x128 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 80, kRows = 192, kDepth = 128;
  static constexpr double kFixedUs = 3.5, kChunkUs = 0.400, kSplitUs = 3.4, kTileUs = 2.0;
};

struct Tile96x128x128 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 96, kRows = 128, kDepth = 128;
  static constexpr double kFixedUs = 3.5, kChunkUs = 0.285, kSplitUs = 3.6, kTileUs = 2.0;
};

struct Tile128x128x128 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 128, kRows = 128, kDepth = 128;
  static constexpr int kCluster = 2;
  static constexpr double kFixedUs = 5.2, kChunkUs = 0.345, kSplitUs = 2.9, kTileUs = 3.3;
};

struct Tile128x192x128 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 128, kRows = 192, kDepth = 128;
  static constexpr double kFixedUs = 2.5, kChunkUs = 0.560, kSplitUs = 5.0, kTileUs = 4.0;
};

struct Tile256x128x64 : OneCta<cutlass::half_t> {
  static constexpr int kTokens = 256, kRows = 128, kDepth = 64;
  static constexpr int kCluster = 2;
  static constexpr double kFixedUs = 6.3, kChunkUs = 0.612, kSplitUs = 4.5, kTileUs = 4.5;
  static constexpr SmallTile kSmall[] = {{64, 0.36}, {128, 0.43}};
};

/// The tokens of a tile whose sums are promoted at a time: those of e4m3 tiles that say so.
template <class Tile, class = void>
constexpr int kPartTokensOf = 0;
template <class Tile>
constexpr int kPartTokensOf<Tile, std::void_t<decltype(Tile::kPartTokens)>> = Tile::kPartTokens;

/// The kernel's configuration of a tile.
template <class Tile>
using ConfigOf = cutlass_evt::Sm90Nvfp4Config<
    typename Tile::Element, Tile::kRows / 64, Tile::kDepthGroups, Tile::kTokens, Tile::kCluster,
    Tile::kDepth / cutlass_evt::MixedInputPacking<typename Tile::Element>::Type::kDepth, Tile::kCtasPerSm,
    kPartTokensOf<Tile>>;

/// The same tile with bf16 tokens. Decoding weights to bf16 needs more instructions than decoding them to
/// fp16, which shows the more the fewer tokens a tile has. The factor is for kChunkUs alone: a tile of few
/// tokens that has kSharedChunkUs or kSmall too needs a struct of its own with its own figures.
template <class Tile>
struct Bf16 : Tile {
  static_assert(
      Tile::kTokens > 32 || (Tile::kCtasPerSm == 1 && ConfigOf<Tile>::kLeastTokens == Tile::kTokens),
      "a bf16 tile of few tokens inherits kSharedChunkUs or kSmall of the fp16 tile, which are too small");
  using Element = cutlass::bfloat16_t;
  static constexpr double kChunkUs = Tile::kChunkUs * (Tile::kTokens <= 16   ? 1.45
                                                       : Tile::kTokens < 256 ? 1.2
                                                                             : 1.05);
};

// The bf16 tiles with several CTAs on an SM, for experts with few tokens and for weights with many rows.
// Their figures were fitted to 200 products on an H200, 2026-11-27: ten weights with m from 1 to 96, and ten
// sets of 32 to 256 experts with 1 to 1024 tokens. There the selected bf16 kernel needs on average 1.0 %
// (dense) and 0.3 % (experts) more time than the fastest.
struct Bf16Tile8x64x384 : OneCta<cutlass::bfloat16_t> {
  static constexpr int kTokens = 8, kRows = 64, kDepth = 384;
  static constexpr int kDepthGroups = 2, kCtasPerSm = 3;
  static constexpr double kFixedUs = 2.9, kChunkUs = 0.074, kSplitUs = 0.1, kTileUs = 1.0;
  static constexpr double kSharedChunkUs = 0.259;
};

struct Bf16Tile8x64x512 : OneCta<cutlass::bfloat16_t> {
  static constexpr int kTokens = 8, kRows = 64, kDepth = 512;
  static constexpr int kDepthGroups = 2, kCtasPerSm = 2;
  static constexpr double kFixedUs = 3.3, kChunkUs = 0.085, kSplitUs = 0.8, kTileUs = 1.0;
  static constexpr double kSharedChunkUs = 0.184;
};

struct Bf16Tile32x128x128 : OneCta<cutlass::bfloat16_t> {
  static constexpr int kTokens = 32, kRows = 128, kDepth = 128;
  static constexpr int kCtasPerSm = 2;
  static constexpr double kFixedUs = 4.2, kChunkUs = 0.271, kSplitUs = 0.6, kTileUs = 0.86;
  static constexpr double kSharedChunkUs = 0.476;
  static constexpr SmallTile kSmall[] = {{16, 0.257}};
};

// A translation unit for each list; the order is that of the kernel table.
using NarrowTiles = TileList<Tile8x64x384, Tile8x64x512, Tile8x64x1024, Tile16x64x256, Tile16x64x512,
                             Tile16x128x256, Tile32x64x256, Tile32x128x128, Tile32x128x256>;
using WideTiles = TileList<Tile64x128x256, Tile80x192x128, Tile96x128x128, Tile128x128x128, Tile128x192x128,
                           Tile256x128x64>;
using Bf16Tiles = TileList<Bf16Tile8x64x384, Bf16Tile8x64x512, Bf16<Tile16x64x512>, Bf16<Tile16x128x256>,
                           Bf16<Tile32x64x256>, Bf16Tile32x128x128, Bf16<Tile64x128x256>,
                           Bf16<Tile128x128x128>, Bf16<Tile256x128x64>>;

// The products of 8 tokens, and of decoding to fp16, have a kernel that quantizes A itself.
template <class Tile>
constexpr bool kCanQuantize =
    Tile::kTokens == 8 && std::is_same<typename Tile::Element, cutlass::half_t>::value;

// For more elements, a launch of the quantizer before the GEMM is as fast or faster. With (8192, 8192)
// weights the GEMM that quantizes A is 1.8, 1.7 and 0.7 us faster at m = 1, 2, 3 and 0.4 us slower at m = 4;
// with (4096, 4096), 2.0 to 0.7 us faster at m = 1 to 4 and 0.8 us slower at m = 8; with (4096, 14336), 1.7
// and 1.0 us faster at m = 1 and 2.
constexpr int kMostQuantizedByAny = 28672;

/// MeasuredFigures::most_quantized.
template <class Tile>
constexpr int most_quantized() {
  if constexpr (kCanQuantize<Tile>) {
    using Config = cutlass_evt::MixedInputQuantizingConfig<ConfigOf<Tile>>;
    return cute::min(Config::kMostTokenBytes / 2, kMostQuantizedByAny);
  }
  return 0;
}

template <class Tile>
constexpr MeasuredFigures figures_of() {
  using Config = ConfigOf<Tile>;
  static_assert(Config::kRows == Tile::kRows && Config::kDepth == Tile::kDepth,
                "a tile has whole chunks of 64 rows and of 64 of k");
  MeasuredFigures figures{};
  figures.fixed_us = Tile::kFixedUs;
  figures.chunk_us = Tile::kChunkUs;
  figures.split_us = Tile::kSplitUs;
  figures.tile_us = Tile::kTileUs;
  figures.ctas_per_sm = Tile::kCtasPerSm;
  if constexpr (Tile::kCtasPerSm > 1) {
    figures.shared_chunk_us = Tile::kSharedChunkUs;
  }
  figures.most_quantized = most_quantized<Tile>();
  if constexpr (Config::kLeastTokens < Tile::kTokens) {
    int i = 0;
    for (SmallTile const& small : Tile::kSmall) {
      figures.small[i++] = small;
    }
  }
  return figures;
}

template <class Tile>
inline constexpr MeasuredFigures kFiguresOf = figures_of<Tile>();

}  // namespace fp4gemm::sm90
