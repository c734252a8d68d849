// The search for the amax of every column of x, or of all columns, in each group if there are groups, and of
// every row in the same pass.
#pragma once

#include "quantize/columns.cuh"

namespace fp4gemm {

constexpr int kMaxAmaxRows = 128;  // rows of a CTA of columns_amax
constexpr int kColumnAmaxThreads = 128;

/// The arguments of columns_amax.
struct ColumnAmaxParams {
  void const* x;
  int64_t row_stride;
  int64_t m;
  int64_t k;
  int64_t columns;     // of x^T: m, or the padded columns of its groups
  float* row_amax;     // (m), zeros before the launch; null: not written
  float* column_amax;  // (groups, k), or (groups) with column_is_tensor, or of the matrices of a stack; zeros
                       // before the launch
  bool column_is_tensor;
  SignMasks signs;
  int64_t const* rng_state;  // of DrawnSigns; else null
  Groups groups;
  int cta_rows = kMaxAmaxRows;  // rows of a CTA: 16, 32, 64 or kMaxAmaxRows
};

/// Replaces *amax by the maximum of it and value. Neither is negative, so that their bits compare as they do.
__device__ inline void combine_amax(float* amax, float value) {
  atomicMax(reinterpret_cast<unsigned int*>(amax), __float_as_uint(value));
}

/// The bits of max |x| of one row of a panel, NaN ignored.
template <class T>
__device__ inline uint32_t panel_row_bits(uint2 neighbours) {
  uint32_t const words[2] = {neighbours.x, neighbours.y};
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (sizeof(T) == 4) {
      uint32_t const magnitude = words[i] & 0x7FFFFFFFu;
      bits = max(bits, magnitude <= Block<T>::kInfinity ? magnitude : 0u);
    } else {
      uint32_t const low = words[i] & 0x7FFFu;
      uint32_t const high = words[i] >> 16 & 0x7FFFu;
      bits = max(bits, low <= Block<T>::kInfinity ? low : 0u);
      bits = max(bits, high <= Block<T>::kInfinity ? high : 0u);
    }
  }
  return bits;
}

/// Combines the maxima of the columns of a panel, those of a thread, into the amaxes of a group, without
/// groups those of a matrix. All lanes of a warp must call it with the same group.
///
/// @tparam T, Element The type of x, and that of its Hadamard transform, from which the bits come.
template <class T, class Element>
__device__ inline void combine_columns(ColumnAmaxParams const& p, uint32_t const (&bits)[Panel<T>::kColumns],
                                       int64_t column, int group) {
  constexpr int kColumns = Panel<T>::kColumns;
  if (p.column_is_tensor) {
    uint32_t all = bits[0];
#pragma unroll
    for (int j = 1; j < kColumns; ++j) {
      all = max(all, bits[j]);
    }
    all = __reduce_max_sync(0xFFFFFFFFu, all);
    if (threadIdx.x % 32 == 0) {
      combine_amax(p.column_amax + group, Block<Element>::from_bits(all));
    }
  } else if (column < p.k) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      combine_amax(p.column_amax + group * p.k + column + j, Block<Element>::from_bits(bits[j]));
    }
  }
}

/// Combines max |x| of every column, after the Hadamard transform if there is one, into column_amax, with
/// Form::kGroups that of every column in each group, and with Form::kBoth that of every row into row_amax.
/// Template parameters, first_tile and first_matrix are those of quantize_tiles; a CTA has cta_rows rows of
/// one column panel for each of its threads.
template <class T, class Rotation, Form kForm>
__global__ void __launch_bounds__(kColumnAmaxThreads)
    columns_amax(ColumnAmaxParams p, unsigned first_tile, unsigned first_matrix) {
  constexpr int kColumns = Panel<T>::kColumns;
  using Element = cuda::std::conditional_t<cuda::std::is_void_v<Rotation>, T, RotatedTo<Rotation>>;
  int64_t const column = (int64_t{blockIdx.x} * kColumnAmaxThreads + threadIdx.x) * kColumns;
  int64_t const first_row = int64_t{first_tile + blockIdx.y} * p.cta_rows;
  int64_t const end_row = min(first_row + p.cta_rows, p.columns);
  unsigned const matrix = kForm == Form::kColumns ? first_matrix + blockIdx.z : 0;
  constexpr bool kRows = kForm == Form::kBoth;
  bool const is_real = column < p.k;
  Signs<Rotation> const signs(p.signs, p.rng_state);
  __shared__ uint32_t row_bits[kRows ? kMaxAmaxRows : 1];
  if constexpr (kRows) {
    row_bits[threadIdx.x] = 0;
    __syncthreads();  // row_bits is zero before any warp adds to it
  }
  uint32_t bits[kColumns] = {};
  TileRows rows{};
  for (int64_t row = first_row; row < end_row; row += kBlock) {
    int const in_span = static_cast<int>(row % kGroupColumns);
    if (in_span == 0 || row == first_row) {
      if (kForm == Form::kGroups && rows.count > 0) {
        // The span before is complete, and this one may be of another group.
        combine_columns<T, Element>(p, bits, column, rows.group);
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          bits[j] = 0;
        }
      }
      rows = find_span<kForm>(p.groups, p.m, row - in_span, matrix);
    }
    Panel<T> panel{};
    if (is_real && in_span < rows.count) {
      T const* const first = static_cast<T const*>(p.x) + (rows.first + in_span) * p.row_stride + column;
      panel.template load<kForm == Form::kGroups>(first, p.row_stride, rows.count - in_span);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      bits[j] = max(bits[j], block_amax_bits(column_block<T, Rotation>(panel, j, signs)));
    }
    if constexpr (kRows) {
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        uint32_t of_row = panel_row_bits<T>(panel.rows[i]);
        of_row = __reduce_max_sync(0xFFFFFFFFu, of_row);
        if (threadIdx.x % 32 == 0) {
          atomicMax(&row_bits[row - first_row + i], of_row);
        }
      }
    }
  }
  if (rows.count > 0) {
    combine_columns<T, Element>(p, bits, column, rows.group);
  }
  if constexpr (kRows) {
    __syncthreads();  // every warp has added its maxima to row_bits
    if (first_row + threadIdx.x < end_row) {
      combine_amax(p.row_amax + first_row + threadIdx.x, Block<T>::from_bits(row_bits[threadIdx.x]));
    }
  }
}

}  // namespace fp4gemm
