// The sizes of the NVFP4 format: blocks, the swizzled layout of scales, chunks of prepacked weights.
#pragma once

#include <cstdint>

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

constexpr int kBlock = 16;           // elements that share an e4m3 scale
constexpr int kScaleTileRows = 128;  // rows of a tile of the swizzled layout of scales
constexpr int kScaleWord = 4;        // adjacent scales of a row in that layout, the columns of a tile
constexpr int kGroupColumns = 64;    // groups along k begin at multiples of this
constexpr int kPrepackedChunk = 64;  // rows, and of k, of a chunk of a prepacked weight
constexpr int kPrepackedChunkBytes = 2304;
constexpr int kPrepackedFp8Depth = 128;  // of k, of a chunk of a weight that is prepacked for FP8 tokens
constexpr int kPrepackedFp8ChunkBytes = 4608;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Words of kScaleWord scales in a row of num_blocks blocks, padding included.
constexpr int num_words_of(int64_t num_blocks) { return static_cast<int>(ceil_div(num_blocks, kScaleWord)); }

/// Rows of the swizzled scales of `rows` rows, padding included.
constexpr int64_t scale_rows_of(int64_t rows) { return round_up(rows, kScaleTileRows); }

/// The same for rows that are in groups if offs is not null.
inline int64_t scale_rows_of(int64_t rows, int32_t const* offs, int num_groups) {
  return offs != nullptr ? fp4gemm_grouped_scale_rows(rows, num_groups) : scale_rows_of(rows);
}

}  // namespace fp4gemm
