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

/// CTAs of quantize_squares that should fit on an SM, which bounds their registers.
template <class T>
constexpr int kSquareCtas = (sizeof(T) == 4 ? 768 : 1024) / kTileThreads<T>;

/// The codes of a tile, as its threads exchange them.
template <class T>
struct SquareTile {
  static constexpr int kLanes = kTileColumns / Panel<T>::kColumns;  // threads beside each other
  static constexpr int kRowGroups = kTileRows / kBlock;
  static constexpr int kBlocksPerRow = kTileColumns / kBlock;
  static constexpr int kRowBytes = kTileColumns / 2;

  /// One block more in each column, so that the threads of a half-warp write to different banks.
  uint2 columns[kTileColumns][kRowGroups + 1];
  /// The rows of a group of 16, and 64 bytes more, so that the groups of a warp lie in different banks.
  alignas(16) uint8_t rows[kRowGroups][kBlock * kRowBytes + 64];
  alignas(4) uint8_t scales[kRowGroups][kBlocksPerRow];    // 0 for squares outside of x
  alignas(4) uint8_t scales_t[kBlocksPerRow][kRowGroups];  // the same, transposed

  /// The codes of a block of a row.
  __device__ uint2 const* row_block(int in_tile, int block) const {
    uint8_t const* const row = rows[in_tile / kBlock] + in_tile % kBlock * kRowBytes;
    return reinterpret_cast<uint2 const*>(row + block * (kBlock / 2));
  }

  /// Where the codes of a column are: neighbouring threads write neighbours.
  __device__ uint2* column(int in_tile) {
    return columns[in_tile % Panel<T>::kColumns * kLanes + in_tile / Panel<T>::kColumns];
  }
};

/// Bits of a where mask has ones, else bits of b.
__device__ inline uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  return (a & mask) | (b & ~mask);
}

/// Transposes 8 codes of kColumns neighbouring columns: codes[j] has those of column j, and the kColumns
/// codes of row i are written to rows + i * row_bytes.
template <int kColumns>
__device__ inline void store_rows(uint32_t const (&codes)[kColumns], uint8_t* rows, int row_bytes) {
  static_assert(kColumns == 2 || kColumns == 4, "the columns of a panel");
  constexpr uint32_t kLow = 0x0F0F0F0Fu;
  // Byte b of even has columns 0 and 1 of row 2b, and that of odd of row 2b + 1.
  uint32_t const even = select_bits(kLow, codes[0], codes[1] << 4);
  uint32_t const odd = select_bits(kLow, codes[0] >> 4, codes[1]);
  if constexpr (kColumns == 2) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      rows[i * row_bytes] = static_cast<uint8_t>((i % 2 == 0 ? even : odd) >> (i / 2 * 8));
    }
  } else {
    uint32_t const even_2 = select_bits(kLow, codes[2], codes[3] << 4);
    uint32_t const odd_2 = select_bits(kLow, codes[2] >> 4, codes[3]);
    uint32_t const pairs[4] = {
        __byte_perm(even, even_2, 0x5140),  // rows 0 and 2
        __byte_perm(odd, odd_2, 0x5140),    // 1 and 3
        __byte_perm(even, even_2, 0x7362),  // 4 and 6
        __byte_perm(odd, odd_2, 0x7362),    // 5 and 7
    };
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t const pair = pairs[i / 4 * 2 + i % 2];
      *reinterpret_cast<uint16_t*>(rows + i * row_bytes) =
          static_cast<uint16_t>(i % 4 < 2 ? pair : pair >> 16);
    }
  }
}

/// Finds which of two scales the squares of a tile have, with four over six. Every thread of the CTA calls it
/// with the amax of the square that it has a panel of, and receives the scale.
template <class T>
__device__ inline uint8_t choose_scale(TileParams const& p, T const* x, float outer_amax, float amax,
                                       int64_t first_row, int64_t first_column) {
  using Tile = SquareTile<T>;
  using Cast = FourOverSixCast<Range::kAny>;
  constexpr int kThreads = kTileThreads<T>;
  constexpr int kBlocksPerRow = Tile::kBlocksPerRow;
  __shared__ float square_amax[Tile::kRowGroups][kBlocksPerRow];
  __shared__ uint8_t square_scale[Tile::kRowGroups][kBlocksPerRow];
  __shared__ float errors[2][kTileRows][kBlocksPerRow];
  int const thread = static_cast<int>(threadIdx.x);
  int const own_group = thread / Tile::kLanes;
  int const own_block = thread % Tile::kLanes / (kBlock / Panel<T>::kColumns);
  if (thread % (kBlock / Panel<T>::kColumns) == 0) {
    square_amax[own_group][own_block] = amax;
  }
  __syncthreads();  // square_amax is written
  Cast const cast(p.cast, typename Cast::Shared(p.cast, 0), outer_amax);
#pragma unroll 1
  for (int i = thread; i < kTileRows * kBlocksPerRow; i += kThreads) {
    int const in_tile = i / kBlocksPerRow;
    int const block = i % kBlocksPerRow;
    int64_t const row = first_row + in_tile;
    int64_t const column = first_column + block * kBlock;
    auto const both = cast.candidates(square_amax[in_tile / kBlock][block]);
    Block<T> const loaded =
        row < p.m && column < p.k ? without_nan(load_block(x + row * p.row_stride + column)) : Block<T>{};
    QuantizedBlock unused;
    errors[0][in_tile][block] = cast.exact_candidate(loaded, both.scale_4, unused);
    errors[1][in_tile][block] = cast.exact_candidate(loaded, both.scale_6, unused);
  }
  __syncthreads();  // the errors of all rows are written
  if (thread < Tile::kRowGroups * kBlocksPerRow) {
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
  return square_scale[own_group][own_block];
}

/// Quantizes x, x^T or both, with a CTA for each tile of 128 x 64 elements. Rows beyond x count as zeros.
/// blockIdx.z + first_matrix is the matrix of a stack of matrices (m, k), each of which has an amax.
/// first_tile: see quantize_tiles.
///
/// A square has one scale, so that each element has one code for both directions. A thread encodes the
/// columns of its panel. The rows are transposed in registers and in shared memory.
///
/// @tparam T The type of x.
/// @tparam kFourOverSix Whether each square chooses between two scales (four_over_six.cuh). The error of a
///     square is the sum over its 16 rows of their errors along k.
template <class T, bool kFourOverSix>
__global__ void __launch_bounds__(kTileThreads<T>, kFourOverSix ? 1 : kSquareCtas<T>)
    quantize_squares(__grid_constant__ TileParams const p, unsigned first_tile, unsigned first_matrix) {
  using Tile = SquareTile<T>;
  constexpr int kThreads = kTileThreads<T>;
  constexpr int kColumns = Panel<T>::kColumns;
  constexpr int kLanesPerBlock = kBlock / kColumns;
  __shared__ Tile tile;
#if __CUDA_ARCH__ >= 900
  // As in rows.cuh: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif

  int64_t const first_row = int64_t{first_tile + blockIdx.y} * kTileRows;
  int64_t const first_column = int64_t{blockIdx.x} * kTileColumns;
  int const thread = static_cast<int>(threadIdx.x);
  int64_t const matrix = int64_t{first_matrix} + blockIdx.z;
  T const* const x = static_cast<T const*>(p.x) + matrix * p.m * p.row_stride;
  float const outer_amax = load_after_wait(p.row.amax + matrix);

  {
    int const lane = thread % Tile::kLanes;
    int const group = thread / Tile::kLanes;
    int64_t const column = first_column + lane * kColumns;
    int64_t const row = first_row + group * kBlock;
    bool const is_real = row < p.m && column < p.k;
    Panel<T> panel{};
    if (is_real) {
      T const* const first = x + row * p.row_stride + column;
      if (row + kBlock <= p.m) {
        panel.template load<false>(first, p.row_stride, kBlock);
      } else {
        panel.template load<true>(first, p.row_stride, p.m - row);
      }
    }
    Block<T> blocks[kColumns];
    uint32_t bits = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      blocks[j] = panel.column(j);
      bits = max(bits, blocks[j].amax_bits());
    }
    if (bits > Block<T>::kInfinity) {
      bits = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        bits = max(bits, amax_bits_ignoring_nan(blocks[j]));
        blocks[j] = without_nan(blocks[j]);
      }
    }
#pragma unroll
    for (int step = 1; step < kLanesPerBlock; step *= 2) {
      bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, step));
    }
    float const amax = Block<T>::from_bits(bits);
    OuterScale const outer = OuterScale::of<Range::kAny>(outer_amax, p.cast.e4m3_max);
    uint8_t scale;
    if constexpr (kFourOverSix) {
      scale = choose_scale(p, x, outer_amax, amax, first_row, first_column);
    } else {
      scale = float_to_e4m3(__fmul_rn(amax, __fmul_rn(outer.encode, 1.0f / 6.0f)));
    }
    if (lane % kLanesPerBlock == 0) {
      uint8_t const stored = is_real ? scale : uint8_t{0};
      tile.scales[group][lane / kLanesPerBlock] = stored;
      tile.scales_t[lane / kLanesPerBlock][group] = stored;
    }
    float const factor = te_factor<Range::kAny>(scale, outer);
    uint32_t codes[2][kColumns];
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      codes[0][j] = encode_half(blocks[j], 0, factor);
      codes[1][j] = encode_half(blocks[j], 1, factor);
      tile.column(lane * kColumns + j)[group] = {codes[0][j], codes[1][j]};
    }
    uint8_t* const rows = tile.rows[group] + lane * (kColumns / 2);
    store_rows(codes[0], rows, Tile::kRowBytes);
    store_rows(codes[1], rows + kBlock / 2 * Tile::kRowBytes, Tile::kRowBytes);
  }
  __syncthreads();  // the codes and scales of the tile are in shared memory

  int64_t const rows_left = p.m - first_row;  // from the first row of the tile on
  if (p.row.codes != nullptr) {
    Side const out = side_of(p.row, p.m, matrix);
    constexpr int kRowsPerTurn = kThreads / Tile::kBlocksPerRow;
    int const block = thread % Tile::kBlocksPerRow;
    int const first = thread / Tile::kBlocksPerRow;
    if (first_column + block * kBlock < p.k) {
      int64_t const index = (first_row + first) * out.num_blocks + first_column / kBlock + block;
      uint2* target = reinterpret_cast<uint2*>(out.codes) + index;
#pragma unroll
      for (int i = 0; i < kTileRows; i += kRowsPerTurn) {
        if (first + i < rows_left) {
          *target = *tile.row_block(first + i, block);
        }
        target += kRowsPerTurn * out.num_blocks;
      }
    }
    int const first_block = static_cast<int>(first_column / kBlock);
    if (thread < kTileRows && first_block < kScaleWord * out.num_words) {
      // Words of a tile of scales in the order of memory.
      int const in_tile = thread % 4 * 32 + thread / 4;
      auto const word = *reinterpret_cast<uint32_t const*>(tile.scales[in_tile / kBlock]);
      int64_t const at = scale_offset(first_row, first_block, out.num_words);
      reinterpret_cast<uint32_t*>(out.scales + at)[thread] = in_tile < rows_left ? word : 0u;
    }
  }
  if (p.column.codes != nullptr) {
    Side const out = side_of(p.column, p.k, matrix);
    constexpr int kColumnsPerTurn = kThreads / Tile::kRowGroups;
    int const group = thread % Tile::kRowGroups;
    int const first = thread / Tile::kRowGroups;
    if (group * kBlock < rows_left) {
      int64_t const index = (first_column + first) * out.num_blocks + first_row / kBlock + group;
      uint2* target = reinterpret_cast<uint2*>(out.codes) + index;
#pragma unroll
      for (int i = 0; i < kTileColumns; i += kColumnsPerTurn) {
        if (first_column + first + i < p.k) {
          *target = tile.column(first + i)[group];
        }
        target += kColumnsPerTurn * out.num_blocks;
      }
    }
    constexpr int kWords = Tile::kRowGroups / kScaleWord;
    if (thread < kTileColumns * kWords) {
      int const in_tile = thread % 2 * 32 + thread / 2 % 32;
      int const first_group = thread / kTileColumns * kScaleWord;
      int const block = static_cast<int>(first_row / kBlock) + first_group;
      if (block < kScaleWord * out.num_words) {
        int64_t const at = scale_offset(first_column + in_tile, block, out.num_words);
        *reinterpret_cast<uint32_t*>(out.scales + at) =
            *reinterpret_cast<uint32_t const*>(tile.scales_t[in_tile / kBlock] + first_group);
      }
    }
  }
}

}  // namespace fp4gemm
