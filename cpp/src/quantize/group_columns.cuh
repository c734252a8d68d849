// Quantization along columns of groups of few rows: one kernel finds the amaxes of a group and quantizes with
// them, where columns_amax and quantize_tiles would each read x.
#pragma once

#include "quantize/columns.cuh"

namespace fp4gemm {

/// Columns of x, and rows of x^T, of a CTA of quantize_group_columns. The scales of such a strip in one span
/// are one tile of 512 bytes of the swizzled layout.
constexpr int kStripColumns = 128;

/// Threads of a CTA of quantize_group_columns: one for each panel of a strip in a span.
template <class T>
constexpr int kStripThreads = kStripColumns / Panel<T>::kColumns * kSpanBlocks;

/// CTAs of quantize_group_columns that should fit on an SM, which bounds their registers. A thread holds a
/// block of each of its columns in registers; without a bound it would use up to 155.
template <class T, class Rotation>
constexpr int kStripCtas =
    (sizeof(T) == 2 && cuda::std::is_same_v<RotatedTo<Rotation>, float> ? 384 : 512) / kStripThreads<T>;

/// The spans of a group, and of all groups together.
struct GroupSpans {
  int first_row;   // of x
  int num_rows;    // 0 for an empty group
  unsigned first;  // span of x^T
  unsigned total;  // of all groups
};

/// The spans of a group. All lanes of a warp must call it with the same group.
///
/// An end that lies before the start of its group, or outside of x, is an error of the caller. Rows stay
/// inside of x in such a case, but spans may lie outside of x^T.
__device__ inline GroupSpans find_spans(Groups const& groups, int64_t m, int group) {
  auto const start_of = [&](int e) { return e > 0 ? clamp_row(load_after_wait(groups.offs + e - 1), m) : 0; };
  auto const rows_of = [&](int e) {
    return max(clamp_row(load_after_wait(groups.offs + e), m) - start_of(e), 0);
  };
  unsigned before = 0;
  unsigned total = 0;
  for (int e = static_cast<int>(threadIdx.x % 32); e < groups.num; e += 32) {
    auto const spans = static_cast<unsigned>(num_tiles<kGroupColumns>(rows_of(e)));
    before += e < group ? spans : 0u;
    total += spans;
  }
  before = __reduce_add_sync(0xFFFFFFFFu, before);
  total = __reduce_add_sync(0xFFFFFFFFu, total);
  return {start_of(group), rows_of(group), before, total};
}

/// Writes the codes and scales, or the decoded values, of a strip in a span from shared memory. All threads
/// of the CTA must call it.
template <int kThreads>
__device__ inline void store_span(TileParams const& p, uint2 const (&codes)[kStripColumns][kSpanBlocks + 1],
                                  uint8_t const (&scales)[kStripColumns][kSpanBlocks], int64_t first_column,
                                  unsigned span) {
  int const thread = static_cast<int>(threadIdx.x);
  int64_t const first_block = int64_t{span} * kSpanBlocks;
  if (p.column.decoded != nullptr) {
    constexpr int kHalves = 2 * kSpanBlocks;  // 8 elements, which are 16 bytes, of a row of x^T
    for (int i = thread; i < kStripColumns * kHalves; i += kThreads) {
      int const in_strip = i / kHalves;
      int const block = i % kHalves / 2;
      if (first_column + in_strip < p.k) {
        int64_t const index = (first_column + in_strip) * p.column.num_blocks + first_block;
        uint2 const both = codes[in_strip][block];
        p.column.decoded[2 * index + i % kHalves] =
            decode_eight(i % 2 == 0 ? both.x : both.y, scales[in_strip][block]);
      }
    }
    return;  // without scales
  }
  for (int i = thread; i < kStripColumns * kSpanBlocks; i += kThreads) {
    int const in_strip = i / kSpanBlocks;
    if (first_column + in_strip < p.k) {
      int64_t const index = (first_column + in_strip) * p.column.num_blocks + first_block;
      reinterpret_cast<uint2*>(p.column.codes)[index + i % kSpanBlocks] = codes[in_strip][i % kSpanBlocks];
    }
  }
  if (thread < kStripColumns) {
    int64_t const at = scale_offset(first_column + thread, static_cast<int>(first_block), p.column.num_words);
    *reinterpret_cast<uint32_t*>(p.column.scales + at) = *reinterpret_cast<uint32_t const*>(&scales[thread]);
  }
}

/// Quantizes x^T of groups of rows, each padded to a multiple of 64 columns, with amaxes of the columns of
/// each group that it finds itself: max |x|, after the Hadamard transform if there is one. A CTA has a strip
/// of one group, whose rows it reads twice unless they are one span; the second time they should be in the L1
/// cache. The CTAs of a strip together write zeros behind the last group.
///
/// @tparam T, Cast, Rotation Those of quantize_tiles.
///
/// amax (groups, k) is written; p.column.amax is not read. Group first_group is that of the CTAs with
/// blockIdx.y = 0, see for_grid_parts.
template <class T, class Cast, class Rotation>
__global__ void __launch_bounds__(kStripThreads<T>, kStripCtas<T, Rotation>)
    quantize_group_columns(__grid_constant__ TileParams const p, float* amax, unsigned first_group) {
  using Element = cuda::std::conditional_t<cuda::std::is_void_v<Rotation>, T, RotatedTo<Rotation>>;
  constexpr int kThreads = kStripThreads<T>;
  constexpr int kColumns = Panel<T>::kColumns;
  constexpr int kLanes = kStripColumns / kColumns;
  __shared__ uint32_t bits_of[kSpanBlocks][kStripColumns];
  __shared__ uint2
      codes[kStripColumns][kSpanBlocks + 1];  // one more, so that columns start in different banks
  __shared__ alignas(4) uint8_t scales[kStripColumns][kSpanBlocks];

#if __CUDA_ARCH__ >= 900
  // As in rows.cuh: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int const in_strip = static_cast<int>(threadIdx.x) % kLanes * kColumns;
  int const in_span = static_cast<int>(threadIdx.x) / kLanes;  // a block
  int64_t const first_column = int64_t{blockIdx.x} * kStripColumns;
  int64_t const column = first_column + in_strip;
  auto const group = static_cast<int>(first_group + blockIdx.y);
  GroupSpans const spans = find_spans(p.groups, p.m, group);
  int const num_spans = num_tiles<kGroupColumns>(spans.num_rows);
  unsigned const all_spans = static_cast<unsigned>(p.column.num_blocks) / kSpanBlocks;

  Signs<Rotation> const signs(p.signs, p.cast.rng_state);
  Block<Element> blocks[kColumns];  // of the thread, in the span that was loaded last
  bool is_real = false;             // whether any row of them exists
  auto const load = [&](int span) {
    int const row = span * kGroupColumns + in_span * kBlock;
    is_real = column < p.k && row < spans.num_rows;
    Panel<T> panel{};
    if (is_real) {
      T const* const first =
          static_cast<T const*>(p.x) + (int64_t{spans.first_row} + row) * p.row_stride + column;
      panel.template load<true>(first, p.row_stride, spans.num_rows - row);
    }
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      blocks[j] = column_block<T, Rotation>(panel, j, signs);
    }
  };

  uint32_t bits[kColumns] = {};
  for (int span = num_spans - 1; span >= 0; --span) {
    load(span);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      bits[j] = max(bits[j], block_amax_bits(blocks[j]));
    }
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    bits_of[in_span][in_strip + j] = bits[j];
  }
  __syncthreads();  // the maxima of all blocks of the strip are in shared memory
  float amaxes[kColumns];
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
#pragma unroll
    for (int i = 0; i < kSpanBlocks; ++i) {
      bits[j] = max(bits[j], bits_of[i][in_strip + j]);
    }
    amaxes[j] = Block<Element>::from_bits(bits[j]);
    if (in_span == 0 && column < p.k) {
      amax[int64_t{group} * p.k + column + j] = amaxes[j];
    }
  }

  SideCast<Cast> const cast(p.cast, 1);
  for (int i = 0; i < num_spans && spans.first + i < all_spans; ++i) {
    if (i > 0) {
      load(i);  // the first span was loaded last
    }
    int64_t const block = int64_t{spans.first + i} * kSpanBlocks + in_span;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      QuantizedBlock quantized{};
      if (is_real) {
        quantized = cast.quantize(blocks[j], amaxes[j], (column + j) * p.column.num_blocks + block);
      }
      codes[in_strip + j][in_span] = quantized.codes;
      scales[in_strip + j][in_span] = quantized.scale;
    }
    __syncthreads();  // the results of the span are in shared memory
    store_span<kThreads>(p, codes, scales, first_column, spans.first + i);
    __syncthreads();  // they may be written over
  }

  unsigned span = spans.total + static_cast<unsigned>(group);
  if (span >= all_spans) {
    return;
  }
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    codes[in_strip + j][in_span] = {};
    scales[in_strip + j][in_span] = 0;
  }
  __syncthreads();  // the zeros are in shared memory
  for (; span < all_spans; span += static_cast<unsigned>(p.groups.num)) {
    store_span<kThreads>(p, codes, scales, first_column, span);
  }
}

}  // namespace fp4gemm
