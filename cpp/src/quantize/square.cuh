// Quantization in squares of 16 x 16 elements, for weights: a square has one scale, so that x and x^T have
// the same codes.
#pragma once

#include "quantize/columns.cuh"
#include "quantize/row_reduce.cuh"

namespace fp4gemm {

/// The results for matrix `matrix` of a stack; those of the matrices follow each other.
__device__ inline Side side_of(Side side, int64_t rows, int64_t matrix) {
  side.codes += matrix * rows * side.num_blocks * (kBlock / 2);
  side.scales += matrix * scale_rows_of(rows) * side.num_words * kScaleWord;
  return side;
}

/// Quantizes x, x^T or both, with a CTA for each tile of 128 x 64 elements. Rows beyond x count as zeros.
/// blockIdx.z + first_matrix is the matrix of a stack of matrices (m, k), each of which has an amax.
/// first_tile: see quantize_tiles.
///
/// @tparam T The type of x.
/// @tparam kFourOverSix Whether each square chooses between two scales (four_over_six.cuh). The error of a
///     square is the sum over its 16 rows of their errors along k.
template <class T, bool kFourOverSix>
__global__ void __launch_bounds__(kTileThreads<T>)
    quantize_squares(TileParams p, unsigned first_tile, unsigned first_matrix) {
  constexpr int kThreads = kTileThreads<T>;
  constexpr int kColumnsPerThread = Panel<T>::kColumns;
  constexpr int kLanes = kTileColumns / kColumnsPerThread;
  constexpr int kLanesPerBlock = kBlock / kColumnsPerThread;
  constexpr int kBlocksPerRow = kTileColumns / kBlock;
  constexpr int kRowGroups = kTileRows / kBlock;
  __shared__ float square_amax[kRowGroups][kBlocksPerRow];
  __shared__ uint8_t square_scale[kRowGroups][kBlocksPerRow];
  __shared__ float errors[kFourOverSix ? 2 : 1][kFourOverSix ? kTileRows : 1][kBlocksPerRow];

  int64_t const first_row = int64_t{first_tile + blockIdx.y} * kTileRows;
  int64_t const first_column = int64_t{blockIdx.x} * kTileColumns;
  int const thread = static_cast<int>(threadIdx.x);
  int64_t const matrix = int64_t{first_matrix} + blockIdx.z;
  T const* const x = static_cast<T const*>(p.x) + matrix * p.m * p.row_stride;
  float const outer_amax = __ldg(p.row.amax + matrix);
  OuterScale const outer = OuterScale::of<Range::kAny>(outer_amax, p.cast.e4m3_max);

  int const lane = thread % kLanes;
  int const group = thread / kLanes;
  int64_t const column = first_column + lane * kColumnsPerThread;
  int64_t const row = first_row + group * kBlock;
  Panel<T> panel{};
  if (column < p.k) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if (row + i < p.m) {
        panel.rows[i] = __ldg(reinterpret_cast<uint2 const*>(x + (row + i) * p.row_stride + column));
      }
    }
  }
  uint32_t bits = 0;
#pragma unroll
  for (int j = 0; j < kColumnsPerThread; ++j) {
    bits = max(bits, amax_bits_ignoring_nan(panel.column(j)));
  }
#pragma unroll
  for (int step = 1; step < kLanesPerBlock; step *= 2) {
    bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, step));
  }
  if (lane % kLanesPerBlock == 0) {
    float const amax = Block<T>::from_bits(bits);
    square_amax[group][lane / kLanesPerBlock] = amax;
    if constexpr (!kFourOverSix) {
      square_scale[group][lane / kLanesPerBlock] =
          float_to_e4m3(__fmul_rn(amax, __fmul_rn(outer.encode, 1.0f / 6.0f)));
    }
  }
  __syncthreads();  // square_amax and, without four over six, square_scale are written

  auto const load = [&](int in_tile, int block) {
    int64_t const at_row = first_row + in_tile;
    int64_t const at_column = first_column + block * kBlock;
    return at_row < p.m && at_column < p.k ? without_nan(load_block(x + at_row * p.row_stride + at_column))
                                           : Block<T>{};
  };
  if constexpr (kFourOverSix) {
    using Cast = FourOverSixCast<Range::kAny>;
    Cast const cast(p.cast, typename Cast::Shared(p.cast, 0), outer_amax);
#pragma unroll 1
    for (int i = thread; i < kTileRows * kBlocksPerRow; i += kThreads) {
      int const in_tile = i / kBlocksPerRow;
      int const block = i % kBlocksPerRow;
      auto const both = cast.candidates(square_amax[in_tile / kBlock][block]);
      Block<T> const loaded = load(in_tile, block);
      QuantizedBlock unused;
      errors[0][in_tile][block] = cast.exact_candidate(loaded, both.scale_4, unused);
      errors[1][in_tile][block] = cast.exact_candidate(loaded, both.scale_6, unused);
    }
    __syncthreads();  // the errors of all rows are written
    if (thread < kRowGroups * kBlocksPerRow) {
      int const square_row = thread / kBlocksPerRow;
      int const block = thread % kBlocksPerRow;
      float sums[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float terms[kBlock];
#pragma unroll
        for (int i = 0; i < kBlock; ++i) {
          terms[i] = errors[c][square_row * kBlock + i][block];
        }
        fold_by_halves<kBlock / 2>(terms);
        sums[c] = terms[0];
      }
      auto const both = cast.candidates(square_amax[square_row][block]);
      square_scale[square_row][block] = sums[0] < sums[1] ? both.scale_4 : both.scale_6;
    }
    __syncthreads();  // square_scale is written
  }

  if (p.row.codes != nullptr) {
    Side const out = side_of(p.row, p.m, matrix);
#pragma unroll 1
    for (int i = thread; i < kTileRows * kBlocksPerRow; i += kThreads) {
      int const in_tile = i / kBlocksPerRow;
      int const block = i % kBlocksPerRow;
      bool const is_real = first_row + in_tile < p.m && first_column + block * kBlock < p.k;
      uint8_t const scale = square_scale[in_tile / kBlock][block];
      float const factor = te_factor<Range::kAny>(scale, outer);
      Block<T> const loaded = load(in_tile, block);
      if (is_real) {
        int64_t const index = (first_row + in_tile) * out.num_blocks + first_column / kBlock + block;
        reinterpret_cast<uint2*>(out.codes)[index] = {encode_half(loaded, 0, factor),
                                                      encode_half(loaded, 1, factor)};
      }
      int const scale_block = static_cast<int>(first_column / kBlock) + block;
      if (scale_block < 4 * out.num_words) {
        out.scales[scale_offset(first_row + in_tile, scale_block, out.num_words)] =
            is_real ? scale : uint8_t{0};
      }
    }
  }
  if (p.column.codes != nullptr) {
    Side const out = side_of(p.column, p.k, matrix);
    uint8_t const scale = square_scale[group][lane / kLanesPerBlock];
    float const factor = te_factor<Range::kAny>(scale, outer);
    bool const is_real = row < p.m && column < p.k;
    int const block = static_cast<int>(row / kBlock);
#pragma unroll
    for (int j = 0; j < kColumnsPerThread; ++j) {
      Block<T> const loaded = without_nan(panel.column(j));
      if (is_real) {
        reinterpret_cast<uint2*>(out.codes)[(column + j) * out.num_blocks + block] = {
            encode_half(loaded, 0, factor), encode_half(loaded, 1, factor)};
      }
      if (block < 4 * out.num_words) {
        out.scales[scale_offset(column + j, block, out.num_words)] = is_real ? scale : uint8_t{0};
      }
    }
  }
}

}  // namespace fp4gemm
