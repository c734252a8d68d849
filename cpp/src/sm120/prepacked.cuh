// The SM120 kernels on prepacked weights, for few tokens.
#pragma once

#include "cutlass_evt/kernel/sm120_nvfp4.hpp"
#include "prepacked_rows.cuh"
#include "sm120/arch.hpp"

namespace fp4gemm::sm120 {

// A tile has kTokens rows of A and kRows rows of B and advances by kDepth of k; these three are in its name.
// kDepthGroups: groups of four warps that share the rows and divide k between them.

template <class Element_>
struct Tile8x64x512 {
  using Element = Element_;  // of the tokens, and of the decoded weights
  static constexpr int kTokens = 8, kRows = 64, kDepth = 512, kDepthGroups = 4;
};

template <class Element_>
struct Tile16x64x256 {
  using Element = Element_;
  static constexpr int kTokens = 16, kRows = 64, kDepth = 256, kDepthGroups = 4;
};

template <class Element_>
struct Tile32x128x128 {
  using Element = Element_;
  static constexpr int kTokens = 32, kRows = 128, kDepth = 128, kDepthGroups = 1;
};

template <class Element_>
struct Tile64x128x64 {
  using Element = Element_;
  static constexpr int kTokens = 64, kRows = 128, kDepth = 64, kDepthGroups = 1;
};

template <class Element>
using PrepackedTiles =
    TileList<Tile8x64x512<Element>, Tile16x64x256<Element>, Tile32x128x128<Element>, Tile64x128x64<Element>>;

/// The Family of prepacked_rows.cuh.
struct PrepackedFamily {
  static constexpr int kArch = sm120::kArch;
  template <class Tile>
  using Config = cutlass_evt::Sm120Nvfp4Config<typename Tile::Element, Tile::kRows / 64, Tile::kDepthGroups,
                                               Tile::kTokens, Tile::kDepth / 64, /*CtasPerSm=*/1>;
  template <class Tile>
  static constexpr bool kCanQuantize = false;

  /// None: nothing was measured. The cost model derives the time from the tile (sm120/prepacked_cost.hpp).
  template <class Tile>
  static constexpr MeasuredFigures const* figures() {
    return nullptr;
  }

  template <class Config, class Epilogue, class Quantizer>
  static constexpr auto* entry() {
    return cutlass_evt::sm120_nvfp4_gemm<Config, Epilogue, Quantizer>;
  }
};

}  // namespace fp4gemm::sm120
