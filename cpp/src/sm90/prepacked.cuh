// The SM90 kernels on prepacked weights.
#pragma once

#include "cutlass_evt/kernel/sm90_nvfp4.hpp"
#include "prepacked_rows.cuh"
#include "sm90/arch.hpp"
#include "sm90/tiles.hpp"
#include "sm90/token_quantizer.cuh"

namespace fp4gemm::sm90 {

/// The Family of prepacked_rows.cuh. The tiles are those of sm90/tiles.hpp.
struct PrepackedFamily {
  static constexpr int kArch = sm90::kArch;
  template <class Tile>
  using Config = ConfigOf<Tile>;
  template <class Tile>
  static constexpr bool kCanQuantize = sm90::kCanQuantize<Tile>;
  template <class Tile>
  using QuantizingConfig = cutlass_evt::MixedInputQuantizingConfig<ConfigOf<Tile>>;
  using Quantizer = TokenQuantizer;

  template <class Tile>
  static constexpr MeasuredFigures const* figures() {
    if constexpr (sm90::kCanQuantize<Tile>) {
      static_assert(TokenQuantizer::suffices<QuantizingConfig<Tile>>(most_quantized<Tile>()),
                    "a tile has more elements of A than its warps can hold");
    }
    return &kFiguresOf<Tile>;
  }

  template <class Config, class Epilogue, class Quantizer>
  static constexpr auto* entry() {
    return cutlass_evt::sm90_nvfp4_gemm<Config, Epilogue, Quantizer>;
  }
};

}  // namespace fp4gemm::sm90
