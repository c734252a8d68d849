// Quantization along columns: blocks of 16 along m, written transposed, alone or together with the blocks
// along k. The result is described as the rows of x^T.
#pragma once

#include "quantize/four_over_six.cuh"
#include "quantize/groups.cuh"
#include "quantize/hadamard.cuh"

namespace fp4gemm {

/// 16 rows of kColumns adjacent columns, which are 8 bytes of each row: a block of x^T for each column.
template <class T>
struct Panel {
  static constexpr int kColumns = 8 / static_cast<int>(sizeof(T));

  uint2 rows[kBlock];

  /// Loads the panel whose first element is x, which must be 8-byte aligned.
  ///
  /// @tparam kPartial Whether only the first `count` rows exist; the others become zeros.
  template <bool kPartial>
  __device__ void load(T const* x, int64_t row_stride, int64_t count) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      rows[i] = !kPartial || i < count ? load_after_wait(reinterpret_cast<uint2 const*>(x + i * row_stride))
                                       : uint2{};
    }
  }

  /// The 16 elements of column j.
  __device__ Block<T> column(int j) const {
    Block<T> block;
    if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        block.words[i] = j == 0 ? rows[i].x : rows[i].y;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) {
        uint32_t const first = j < 2 ? rows[2 * i].x : rows[2 * i].y;
        uint32_t const second = j < 2 ? rows[2 * i + 1].x : rows[2 * i + 1].y;
        block.words[i] = __byte_perm(first, second, j % 2 == 0 ? 0x5410 : 0x7632);
      }
    }
    return block;
  }
};

/// The output for one direction, x (along rows) or x^T (along columns), and the amaxes that it is scaled by.
struct Side {
  uint8_t* codes = nullptr;  // null, and decoded null: this direction is not quantized
  uint8_t* scales = nullptr;
  uint4* decoded = nullptr;  // fp16 values in place of codes and scales; of columns alone
  // One, or with amax_per_row one for each row of the result. With groups of columns, those of a group follow
  // those of the group before it.
  float const* amax = nullptr;
  bool amax_per_row = false;
  int num_blocks = 0;  // in a row of the result
  int num_words = 0;   // of 4 scales in a row of the result, padding included
};

/// The columns of matrix `matrix` of a stack whose transposes have k rows; the results of the matrices follow
/// each other. The amaxes are still those of the first matrix.
__device__ inline Side columns_of_matrix(Side side, int64_t k, int64_t matrix) {
  int64_t const first_block = matrix * k * side.num_blocks;
  if (side.decoded != nullptr) {
    side.decoded += 2 * first_block;  // 8 values each
  } else {
    side.codes += first_block * (kBlock / 2);
    side.scales += matrix * scale_rows_of(k) * side.num_words * kScaleWord;
  }
  return side;
}

/// The arguments of quantize_tiles and quantize_squares.
struct TileParams {
  void const* x;
  int64_t row_stride;
  int64_t m;
  int64_t k;
  Side row;
  Side column;
  SignMasks signs;  // of the Hadamard transform of the columns
  CastOptions cast;
  Groups groups;
};

// A CTA quantizes kTileRows rows by kTileColumns columns of x. The scales along k of such a tile are one tile
// of 512 bytes of the swizzled layout.
constexpr int kTileRows = 128;
constexpr int kTileColumns = 64;

constexpr int kSpanBlocks = kGroupColumns / kBlock;  // blocks of a span, 64 columns of x^T in one group

/// Which results a kernel writes.
enum class Form {
  kColumns,  // x^T
  kBoth,     // x and x^T
  kGroups,   // x^T of groups of rows, each padded to a multiple of 64 columns
};

/// The rows of x that are the 64 columns of x^T from `at` on, a multiple of 64. Without groups, these are the
/// columns of matrix `matrix` of a stack of matrices of m rows, which counts as the group, and `count` is the
/// number of all its rows from there on. All lanes of a warp must call it with the same arguments.
template <Form kForm>
__device__ inline TileRows find_span(Groups const& groups, int64_t m, int64_t at, int64_t matrix) {
  if constexpr (kForm == Form::kGroups) {
    return find_tile<kGroupColumns>(groups, m, at / kGroupColumns);
  } else {
    int64_t const start = matrix * m;
    return {start + at, m - at, static_cast<int>(matrix), start};
  }
}

/// The block that column j of a panel is quantized from.
///
/// @tparam Rotation void for the column itself, or that of its Hadamard transform (hadamard.cuh).
template <class T, class Rotation>
__device__ inline auto column_block(Panel<T> const& panel, int j, Signs<Rotation> const& signs) {
  if constexpr (cuda::std::is_void_v<Rotation>) {
    return panel.column(j);
  } else {
    return rotated<Rotation>(panel.column(j), signs);
  }
}

/// Quantizes any block with any amax. It is not inlined, since few blocks need it.
///
/// @tparam Cast A cast for Range::kAny.
template <class Cast, class T>
__device__ __noinline__ QuantizedBlock quantize_any(CastOptions const& options,
                                                    typename Cast::Shared const& shared, Block<T> block,
                                                    float outer_amax, int64_t index) {
  QuantizedBlock result;
  Cast const cast(options, shared, outer_amax);
  cast.quantize(without_nan(block), Block<T>::from_bits(amax_bits_ignoring_nan(block)), index, result);
  return result;
}

/// A cast for the blocks of one direction: for Range::kRegular where that suffices, else for Range::kAny.
template <class Cast>
class SideCast {
 public:
  __device__ SideCast(CastOptions const& options, int draw)
      : options_(options), shared_(options, draw), any_shared_(options, draw) {}

  template <class T>
  __device__ QuantizedBlock quantize(Block<T> const& block, float outer_amax, int64_t index) const {
    uint32_t const bits = block.amax_bits();
    if (bits <= Block<T>::kInfinity && is_regular<Cast>(outer_amax)) {
      QuantizedBlock result;
      Cast const cast(options_, shared_, outer_amax);
      if (cast.quantize(block, Block<T>::from_bits(bits), index, result)) {
        return result;
      }
    }
    return quantize_any<AnyCast>(options_, any_shared_, block, outer_amax, index);
  }

 private:
  using AnyCast = typename Cast::template Rebind<Range::kAny>;

  CastOptions const& options_;
  typename Cast::Shared shared_;
  typename AnyCast::Shared any_shared_;
};

/// Threads of a CTA: one for each panel of its tile.
template <class T>
constexpr int kTileThreads = kTileColumns / Panel<T>::kColumns * (kTileRows / kBlock);

/// Quantizes x^T, or x and x^T, with a CTA for each tile. The grid covers the padded scales, so that their
/// zero padding is written too.
///
/// @tparam T The type of x.
/// @tparam Cast A cast for Range::kRegular (cast.cuh).
/// @tparam Rotation void, or that of the Hadamard transform of the columns (hadamard.cuh).
/// @tparam kForm Which results are written.
///
/// The parameters stay in constant memory, so that references to the options do not copy them to the stack.
/// first_tile is the tile that the CTAs with blockIdx.y = 0 process, and first_matrix the matrix of those
/// with blockIdx.z = 0, see for_grid_parts. Form::kColumns alone may have more than one matrix: a stack of
/// matrices (m, k), with an amax each, or one for each of their columns, and random numbers of their own.
template <class T, class Cast, class Rotation, Form kForm>
__global__ void __launch_bounds__(kTileThreads<T>)
    quantize_tiles(__grid_constant__ TileParams const p, unsigned first_tile, unsigned first_matrix) {
  constexpr int kThreads = kTileThreads<T>;
  constexpr int kColumnsPerThread = Panel<T>::kColumns;
  constexpr int kLanes = kTileColumns / kColumnsPerThread;
  constexpr int kRowGroups = kTileRows / kBlock;
  __shared__ uint2
      column_codes[kTileColumns][kRowGroups + 1];  // one more, so that columns start in different banks
  __shared__ alignas(8) uint8_t column_scales[kTileColumns][kRowGroups];
  __shared__ alignas(16) uint8_t row_scales[512];
#if __CUDA_ARCH__ >= 900
  // As in rows.cuh: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif

  int64_t const first_row = int64_t{first_tile + blockIdx.y} * kTileRows;
  int64_t const first_column = int64_t{blockIdx.x} * kTileColumns;
  int const thread = static_cast<int>(threadIdx.x);
  unsigned const matrix = kForm == Form::kColumns ? first_matrix + blockIdx.z : 0;
  Side const out = columns_of_matrix(p.column, p.k, matrix);

  {
    int const lane = thread % kLanes;
    int const group = thread / kLanes;
    int64_t const column = first_column + lane * kColumnsPerThread;
    int64_t const block = first_row / kBlock + group;
    static_assert(32 / kLanes * kBlock <= kGroupColumns, "the panels of a warp lie in one span");
    TileRows const rows = find_span<kForm>(p.groups, p.m, block / kSpanBlocks * kGroupColumns, matrix);
    int const in_span = static_cast<int>(block % kSpanBlocks) * kBlock;
    bool const is_real = in_span < rows.count && column < p.k;
    SideCast<Cast> const cast(p.cast, static_cast<int>(1 + 2 * matrix));
    Signs<Rotation> const signs(p.signs, p.cast.rng_state);
    Panel<T> panel;
    if (is_real) {
      T const* const first = static_cast<T const*>(p.x) + (rows.first + in_span) * p.row_stride + column;
      panel.template load<kForm == Form::kGroups>(first, p.row_stride, rows.count - in_span);
    }
#pragma unroll
    for (int j = 0; j < kColumnsPerThread; ++j) {
      QuantizedBlock quantized{};
      if (is_real) {
        int64_t const amax_at = p.column.amax_per_row ? rows.group * p.k + column + j : int64_t{rows.group};
        float const amax = load_after_wait(p.column.amax + amax_at);
        quantized = cast.quantize(column_block<T, Rotation>(panel, j, signs), amax,
                                  (column + j) * p.column.num_blocks + block);
      }
      column_codes[lane * kColumnsPerThread + j][group] = quantized.codes;
      column_scales[lane * kColumnsPerThread + j][group] = quantized.scale;
    }
  }
  if constexpr (kForm == Form::kBoth) {
    constexpr int kBlocksPerRow = kTileColumns / kBlock;
    SideCast<Cast> const cast(p.cast, 0);
#pragma unroll 2
    for (int i = thread; i < kTileRows * kBlocksPerRow; i += kThreads) {
      int const in_tile = i / kBlocksPerRow;
      int const block = i % kBlocksPerRow;
      int64_t const row = first_row + in_tile;
      int64_t const column = first_column + block * kBlock;
      QuantizedBlock quantized{};
      if (row < p.m && column < p.k) {
        int64_t const index = row * p.row.num_blocks + column / kBlock;
        float const amax = load_after_wait(p.row.amax + (p.row.amax_per_row ? row : 0));
        quantized =
            cast.quantize(load_block(static_cast<T const*>(p.x) + row * p.row_stride + column), amax, index);
        reinterpret_cast<uint2*>(p.row.codes)[index] = quantized.codes;
      }
      row_scales[in_tile % 32 * 16 + in_tile / 32 * 4 + block] = quantized.scale;
    }
  }
  __syncthreads();  // the results of the tile are in shared memory

  for (int i = thread; i < kTileColumns * kRowGroups; i += kThreads) {
    int64_t const column = first_column + i / kRowGroups;
    int64_t const block = first_row / kBlock + i % kRowGroups;
    if (column < p.k && block < out.num_blocks) {
      int64_t const index = column * out.num_blocks + block;
      uint2 const codes = column_codes[i / kRowGroups][i % kRowGroups];
      if (out.decoded == nullptr) {
        reinterpret_cast<uint2*>(out.codes)[index] = codes;
      } else {
        uint8_t const scale = column_scales[i / kRowGroups][i % kRowGroups];
        out.decoded[2 * index] = decode_eight(codes.x, scale);
        out.decoded[2 * index + 1] = decode_eight(codes.y, scale);
      }
    }
  }
  if (out.decoded != nullptr) {
    return;  // without scales
  }
  for (int i = thread; i < kTileColumns * (kRowGroups / 4); i += kThreads) {
    int const in_tile = i % kTileColumns;
    int const word = i / kTileColumns;
    int const block = static_cast<int>(first_row / kBlock) + 4 * word;
    if (block < 4 * out.num_words) {
      *reinterpret_cast<uint32_t*>(out.scales + scale_offset(first_column + in_tile, block, out.num_words)) =
          *reinterpret_cast<uint32_t const*>(&column_scales[in_tile][4 * word]);
    }
  }
  if constexpr (kForm == Form::kBoth) {
    if (thread < 32 && static_cast<int>(blockIdx.x) < p.row.num_words) {
      reinterpret_cast<uint4*>(
          p.row.scales + scale_offset(first_row, 4 * static_cast<int>(blockIdx.x), p.row.num_words))[thread] =
          reinterpret_cast<uint4 const*>(row_scales)[thread];
    }
  }
}

}  // namespace fp4gemm
