// Quantization along rows: one kernel reads x, finds the amax of each row where it is not given, and writes
// codes, swizzled scales and their zero padding, or the decoded values. A row that fits in the registers of
// the threads that share it is read once.
#pragma once

#include "quantize/four_over_six.cuh"
#include "quantize/row_reduce.cuh"
#include "quantize/row_shape.cuh"

namespace fp4gemm {

__device__ inline int64_t amax_index(AmaxAt at, TileRows const& rows, int64_t row) {
  switch (at) {
    case AmaxAt::kStart: return 0;
    case AmaxAt::kRow: return row;
    case AmaxAt::kGroup: return rows.group;
    case AmaxAt::kGroupStart: return rows.group_start;
  }
  return 0;
}

/// The results of one row, as one of its threads writes them. The thread has the blocks thread,
/// thread + kThreadsPerRow, ... of the row; a block is named by its offset from the first of them, which
/// makes addresses constant distances from one pointer.
struct RowOutput {
  int thread;      // among those that share the row
  int num_blocks;  // in the row
  int num_scales;  // in the row, padding included
  bool is_decoded;
  uint8_t* values;     // of block `thread`: 8 bytes of codes, or 32 bytes of decoded values
  uint8_t* scales;     // of block `thread`, in global or shared memory
  int64_t scale_step;  // bytes from the scale of a block to that of the fourth block after it

  /// The scales of blocks whose offset is a multiple of four.
  __device__ uint8_t* scale_at(int offset) const { return scales + offset / 4 * scale_step; }

  /// Writes a block, or the zero padding of the scales behind the last block.
  __device__ void store(int offset, QuantizedBlock const& quantized) const {
    if (is_decoded) {
      if (thread + offset < num_blocks) {
        uint4* const target = reinterpret_cast<uint4*>(values) + 2 * offset;
        target[0] = decode_eight(quantized.codes.x, quantized.scale);
        target[1] = decode_eight(quantized.codes.y, quantized.scale);
      }
      return;
    }
    if (thread + offset < num_blocks) {
      reinterpret_cast<uint2*>(values)[offset] = quantized.codes;
    }
    if (thread + offset < num_scales) {
      *scale_at(offset) = quantized.scale;
    }
  }

  /// Writes block number `block` of the row, which may be one of another thread.
  __device__ void store_block(int block, QuantizedBlock const& quantized) const {
    int64_t const offset = block - thread;
    if (is_decoded) {
      uint4* const target = reinterpret_cast<uint4*>(values) + 2 * offset;
      target[0] = decode_eight(quantized.codes.x, quantized.scale);
      target[1] = decode_eight(quantized.codes.y, quantized.scale);
      return;
    }
    reinterpret_cast<uint2*>(values)[offset] = quantized.codes;
    scales[scale_step * (block / 4 - thread / 4) + (block % 4 - thread % 4)] = quantized.scale;
  }

  /// Writes zeros as the scales of a row of padding.
  template <class Shape>
  __device__ void store_padding() const {
    for (int block = thread; !is_decoded && block < num_scales; block += Shape::kThreadsPerRow) {
      *scale_at(block - thread) = 0;
    }
  }
};

/// The blocks of one turn that a thread holds in registers: thread + turn * kTurnBlocks + i * kThreadsPerRow.
template <class Loader, class Shape>
struct Turn {
  using Element = typename Loader::Element;

  Block<Element> blocks[Shape::kBlocksPerThread];
  uint32_t amax_bits[Shape::kBlocksPerThread];  // max |x| of each; larger than kInfinity if it holds a NaN

  static __device__ int offset_of(int turn, int i) {
    return turn * Shape::kTurnBlocks + i * Shape::kThreadsPerRow;
  }

  __device__ float amax(int i) const { return Block<Element>::from_bits(amax_bits[i]); }

  /// Loads the blocks, those beyond the row as zeros, and returns the largest of amax_bits.
  __device__ uint32_t load(Loader const& loader, int turn, int thread, int num_blocks) {
#pragma unroll
    for (int i = 0; i < Shape::kBlocksPerThread; ++i) {
      if (thread + offset_of(turn, i) < num_blocks) {
        blocks[i] = loader.load(offset_of(turn, i));
      } else {
        blocks[i] = {};
      }
    }
    return find_amax();
  }

  /// The RMS norm in place of h, which is what the loader of a norm loads; writes the sum x + residual. *norm
  /// becomes 1 / sqrt(mean(h^2) + epsilon). Returns the largest of the new amax_bits. `slot`: see row_sum.
  __device__ uint32_t normalize(Loader const& loader, Input const& input, int thread, int num_blocks,
                                int slot, float* norm) {
    static_assert(!Shape::kLooped, "the sum of squares needs the whole row in registers");
    float sums[Shape::kBlocksPerThread];
#pragma unroll
    for (int i = 0; i < Shape::kBlocksPerThread; ++i) {
      sums[i] = 0.0f;
      if (thread + offset_of(0, i) < num_blocks) {
        sums[i] = Loader::sum_of_squares(blocks[i]);
        loader.store_sum(offset_of(0, i), blocks[i]);
      }
    }
    float const sum = row_sum<Shape::kThreadsPerRow>(sums, slot);
    float const mean = __fdiv_rn(sum, static_cast<float>(input.k));
    *norm = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, input.epsilon)));
#pragma unroll
    for (int i = 0; i < Shape::kBlocksPerThread; ++i) {
      if (thread + offset_of(0, i) < num_blocks) {
        blocks[i] = loader.finish(offset_of(0, i), blocks[i], *norm);
      }
    }
    return find_amax();
  }

 private:
  __device__ uint32_t find_amax() {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < Shape::kBlocksPerThread; ++i) {
      amax_bits[i] = blocks[i].amax_bits();
      largest = max(largest, amax_bits[i]);
    }
    return largest;
  }
};

/// A block that is read again, as the cast sees it.
template <class Loader>
__device__ auto reload(Loader const& loader, int offset, [[maybe_unused]] float norm) {
  if constexpr (Loader::kIsNorm) {
    return loader.finish(offset, loader.reload(offset), norm);
  } else {
    return loader.load(offset);
  }
}

/// The amax of a row whose threads found the maxima `bits`, NaN ignored. *has_nan: a NaN lies anywhere in the
/// row. `slot`: see row_max; the one that a row with a NaN uses in addition is 2.
template <class Loader, class Shape>
__device__ float find_row_amax(Loader const& loader, uint32_t bits, int thread, int num_blocks, float norm,
                               int slot, bool* has_nan) {
  using Block = Block<typename Loader::Element>;
  bits = row_max<Shape::kThreadsPerRow>(bits, slot);
  *has_nan = bits > Block::kInfinity;
  if (*has_nan) {
    bits = 0;
#pragma unroll 1
    for (int block = thread; block < num_blocks; block += Shape::kThreadsPerRow) {
      bits = max(bits, amax_bits_ignoring_nan(reload(loader, block - thread, norm)));
    }
    bits = row_max<Shape::kThreadsPerRow>(bits, 2);
  }
  return Block::from_bits(bits);
}

/// Gives the blocks of a turn that a cast left open to its resolve(), one after the other, each to the whole
/// warp. Bit i of `unclear` is set if block i of this lane is open. All lanes of the warp must call it.
template <class Loader, class Cast, class Shape>
__device__ void resolve_blocks(Loader const& loader, Cast const& cast, RowOutput const& out, int turn,
                               uint32_t unclear) {
  __syncwarp();  // every lane has stored its blocks, some of which other lanes store again below
  unsigned lanes = __ballot_sync(0xFFFFFFFFu, unclear != 0);
#pragma unroll 1
  while (lanes != 0) {
    int const source = __ffs(static_cast<int>(lanes)) - 1;
    int const i = __ffs(static_cast<int>(__shfl_sync(0xFFFFFFFFu, unclear, source))) - 1;
    int const lane = out.thread % 32;
    // The block of lane `source`, from this lane's own first block. The scales of four neighbouring blocks
    // are adjacent.
    int const offset = Turn<Loader, Shape>::offset_of(turn, i) + source - lane;
    int const words = (out.thread + offset) / 4 - out.thread / 4;
    cast.resolve(loader.elements(offset), out.values + int64_t{offset} * (out.is_decoded ? 32 : 8),
                 out.scales + out.scale_step * words + (source % 4 - lane % 4), out.is_decoded);
    if (lane == source) {
      unclear &= unclear - 1;
    }
    lanes = __ballot_sync(0xFFFFFFFFu, unclear != 0);
  }
}

/// Quantizes and stores a row of finite elements with a regular amax. `turn` holds the first turn.
template <class Loader, class Cast, class Shape>
__device__ void quantize_regular_row(Loader const& loader, Cast const& cast, RowOutput const& out,
                                     int64_t first_block, int num_turns, Turn<Loader, Shape>& turn) {
  for (int t = 0; t < num_turns; ++t) {
    if (t > 0) {
      turn.load(loader, t, out.thread, out.num_blocks);
    }
    uint32_t unclear = 0;
#pragma unroll
    for (int i = 0; i < Shape::kBlocksPerThread; ++i) {
      int const offset = turn.offset_of(t, i);
      if (out.thread + offset >= out.num_scales) {
        break;  // behind the row, as are the blocks that follow
      }
      QuantizedBlock quantized;
      bool const is_clear = cast.quantize(turn.blocks[i], turn.amax(i), first_block + offset, quantized);
      unclear |= is_clear ? 0u : 1u << i;
      out.store(offset, quantized);
    }
    if constexpr (Cast::kResolves) {
      resolve_blocks<Loader, Cast, Shape>(loader, cast, out, t, unclear);
    }
  }
}

/// Quantizes and stores any row, reading it again. Such rows are rare, so that no registers are spent on
/// them.
template <class Loader, class AnyCast, class Shape>
__device__ void quantize_irregular_row(Loader const& loader, AnyCast const& cast, RowOutput const& out,
                                       int64_t first_block, float norm) {
  using Block = Block<typename Loader::Element>;
#pragma unroll 1
  for (int offset = 0; out.thread + offset < out.num_scales; offset += Shape::kThreadsPerRow) {
    QuantizedBlock quantized{};
    if (out.thread + offset < out.num_blocks) {
      Block const block = reload(loader, offset, norm);
      cast.quantize(without_nan(block), Block::from_bits(amax_bits_ignoring_nan(block)), first_block + offset,
                    quantized);
    }
    out.store(offset, quantized);
  }
}

/// Quantizes a block of any numbers.
template <class AnyCast, class T>
__device__ QuantizedBlock quantize_any(AnyCast const& cast, Block<T> const& block) {
  QuantizedBlock quantized;
  cast.quantize(without_nan(block), Block<T>::from_bits(amax_bits_ignoring_nan(block)), 0, quantized);
  return quantized;
}

/// The error of column `channel` of a row, x - q * ((s * A) * (1 / 6B)), or 0 outside of x. The block of the
/// column is quantized again, since another thread has done it.
///
/// @param inverse 1 / 6B.
template <class Loader, class AnyCast>
__device__ float error_of(RowParams const& p, Loader const& loader, AnyCast const& cast, float outer_amax,
                          float inverse, int thread, int channel) {
  if (channel < 0 || channel >= kBlock * p.num_blocks) {
    return 0.0f;
  }
  int const offset = channel / kBlock - thread;
  int const i = channel % kBlock;
  QuantizedBlock const quantized = quantize_any(cast, loader.load(offset));
  uint32_t const codes = i < kBlock / 2 ? quantized.codes.x : quantized.codes.y;
  float const q = __low2float(decode_e2m1_pair(codes >> (4 * (i % 8)) & 15u));
  float const factor = __fmul_rn(__fmul_rn(e4m3_to_float(quantized.scale), outer_amax), inverse);
  // From memory: no index of registers is known at run time only.
  return __fsub_rn(static_cast<float>(loader.elements(offset)[i]), __fmul_rn(q, factor));
}

/// Quantizes the errors of p.channels and stores them behind the blocks of x. Half a warp has a block: each
/// lane finds one error, and all 16 quantize the same block, which the first one stores. All threads of the
/// row must call it.
template <class Loader, class AnyCast, class Shape>
__device__ void append_errors(RowParams const& p, Loader const& loader, AnyCast const& cast, float outer_amax,
                              RowOutput const& out) {
  constexpr int kHalfWarps = Shape::kThreadsPerRow / kBlock;
  // The zero padding of the scales covers the scales that are written here, and is written before.
  if constexpr (Shape::kWarpRows) {
    __syncwarp();
  } else {
    __syncthreads();
  }
  float const inverse = __frcp_rn(6.0f * p.cast.e4m3_max);
  int const lane = out.thread % 32;
  // The number of blocks is even, so that both halves of a warp have one or none.
#pragma unroll 1
  for (int b = out.thread / kBlock; b < p.num_residual_blocks; b += kHalfWarps) {
    int const channel = load_after_wait(p.channels + b * kBlock + lane % kBlock);
    float const error = error_of(p, loader, cast, outer_amax, inverse, out.thread, channel);
    Block<float> errors;
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      errors.words[j] = __float_as_uint(__shfl_sync(0xFFFFFFFFu, error, (lane & kBlock) + j));
    }
    QuantizedBlock const quantized = quantize_any(cast, errors);
    if (lane % kBlock == 0) {
      out.store_block(p.num_blocks + b, quantized);
    }
  }
}

/// Writes codes and amaxes of zero for rows behind the last group: `count` of them from number `index` on.
/// The CTAs of a launch cover at least as many rows as x has, so that together they write all that there are.
__device__ inline void zero_rows_outside_groups(RowParams const& p, int64_t index, int count) {
  int64_t const first = clamp_row(load_after_wait(p.groups.offs + p.groups.num - 1), p.m) + index;
  for (int64_t row = first; row < min(first + count, p.m); ++row) {
    for (int block = static_cast<int>(threadIdx.x); block < p.num_blocks;
         block += static_cast<int>(blockDim.x)) {
      int64_t const place = row * p.num_blocks + block;
      if (p.decoded == nullptr) {
        reinterpret_cast<uint2*>(p.codes)[place] = {};
      } else {
        p.decoded[2 * place] = {};
        p.decoded[2 * place + 1] = {};
      }
    }
    if (threadIdx.x == 0 && p.amax != nullptr) {
      p.amax[row] = 0.0f;
    }
  }
}

/// Quantizes rows of x. The CTAs of the grid cover all rows of the scale buffer, so that its zero padding is
/// written too.
///
/// @tparam Loader What a row is made from (loaders.cuh).
/// @tparam Cast How a block becomes codes and a scale (cast.cuh), for Range::kRegular. Rows with a NaN or an
///     extreme amax go through the same cast for Range::kAny.
/// @tparam Shape How threads share the rows, a RowShape.
///
/// Dynamic shared memory: (num_words) uint4 where the scales of four rows are collected, that is, with
/// Cover::kQuads for rows of at most kMaxStagedWords words.
template <class Loader, class Cast, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, min_ctas<Loader, Shape>()) quantize_rows(RowParams p) {
  using Element = typename Loader::Element;
  using AnyCast = typename Cast::template Rebind<Range::kAny>;
  constexpr bool kQuads = Shape::kCover == Cover::kQuads;
  // Element w holds the scales of blocks 4w to 4w + 3, first those of the first of the four rows.
  extern __shared__ uint4 staged[];
#if __CUDA_ARCH__ >= 900
  // The kernel may start while the one before it still runs: no thread reads or writes global memory before
  // this wait. The kernel after it may be started now, since it waits in the same way or is launched without
  // overlap.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif

  // The CTA has kCtaRows rows of one tile of 128 rows of the scale buffer. Row first_in_tile + r * kRowStep
  // of the tile is row rows.first + that of x if it is below rows.count, and padding otherwise.
  int64_t const index = int64_t{blockIdx.x} * Shape::kCtaRows;
  int64_t const tile = index / kScaleTileRows;
  int const first_in_tile = static_cast<int>(index % kScaleTileRows) / (kQuads ? kQuad : 1);
  TileRows rows{tile * kScaleTileRows, min(p.m - tile * kScaleTileRows, int64_t{kScaleTileRows}), 0, 0};
  if constexpr (Shape::kGrouped) {
    if (p.groups.offs != nullptr) {
      rows = find_tile(p.groups, p.m, tile);
    }
  }
  int const thread = static_cast<int>(Shape::kWarpRows ? threadIdx.x % 32 : threadIdx.x);
  bool const finds_amax =
      Shape::kAmax == Amax::kRow || (Shape::kAmax == Amax::kEither && p.amax_in == nullptr);
  bool const is_staged = kQuads && (!Shape::kLooped || p.num_words <= kMaxStagedWords);
  int const num_scales = kScaleWord * p.num_words;
  int const num_turns = Shape::kLooped ? (num_scales + Shape::kTurnBlocks - 1) / Shape::kTurnBlocks : 1;

  // Whole warps construct these, before their lanes may diverge.
  typename Cast::Shared const shared(p.cast, 0);
  typename AnyCast::Shared const any_shared(p.cast, 0);

  // All threads that share a row take the same branches up to the cast, so that they meet at the barriers of
  // row_max and row_sum. The slots of these alternate from round to round.
#pragma unroll 1
  for (int round = 0; round < Shape::kRounds; ++round) {
    int const of_quad = Shape::kWarpRows ? static_cast<int>(threadIdx.x / 32) : round;
    int const in_tile = first_in_tile + of_quad * Shape::kRowStep;
    int64_t const row = rows.first + in_tile;
    int64_t const row_blocks = p.num_blocks + (Shape::kResidual ? p.num_residual_blocks : 0);
    int64_t const first_block = row * row_blocks + thread;
    bool const is_decoded = p.decoded != nullptr;
    RowOutput const out{
        thread,
        p.num_blocks,
        num_scales,
        is_decoded,
        is_decoded ? reinterpret_cast<uint8_t*>(p.decoded) + 32 * first_block : p.codes + 8 * first_block,
        is_staged ? reinterpret_cast<uint8_t*>(staged) + thread / 4 * 16 + of_quad * 4 + thread % 4
                  : p.scales + scale_offset(tile * kScaleTileRows + in_tile, thread, p.num_words),
        is_staged ? 16 : 512};
    if (in_tile >= rows.count) {
      out.template store_padding<Shape>();
      continue;
    }

    Loader const loader(p.input, row, thread);
    Turn<Loader, Shape> turn;
    uint32_t bits = 0;
    // The first turn is loaded last, so that it stays in registers.
    for (int t = num_turns - 1; t >= 0; --t) {
      bits = max(bits, turn.load(loader, t, thread, p.num_blocks));
    }
    float norm = 0.0f;
    if constexpr (Loader::kIsNorm) {
      bits = turn.normalize(loader, p.input, thread, p.num_blocks, round % 2, &norm);
    }

    // A NaN in the blocks of this thread or, where the amax is found, anywhere in the row.
    bool has_nan = bits > Block<Element>::kInfinity;
    float outer_amax = 0.0f;
    if (finds_amax) {
      outer_amax =
          find_row_amax<Loader, Shape>(loader, bits, thread, p.num_blocks, norm, round % 2, &has_nan);
    } else {
      outer_amax = p.amax_in[amax_index(p.amax_at, rows, row)];
    }
    if (p.amax != nullptr && thread == 0) {
      p.amax[row] = outer_amax;
    }

    bool is_irregular = has_nan || !is_regular<Cast>(outer_amax);
    if constexpr (Cast::kResolves) {
      is_irregular = __any_sync(0xFFFFFFFFu, is_irregular);  // whole warps resolve blocks
    }
    if (is_irregular) {
      AnyCast const cast(p.cast, any_shared, outer_amax);
      quantize_irregular_row<Loader, AnyCast, Shape>(loader, cast, out, first_block, norm);
    } else {
      Cast const cast(p.cast, shared, outer_amax);
      quantize_regular_row<Loader, Cast, Shape>(loader, cast, out, first_block, num_turns, turn);
    }
    if constexpr (Shape::kResidual) {
      AnyCast const cast(p.cast, any_shared, outer_amax);
      append_errors<Loader, AnyCast, Shape>(p, loader, cast, outer_amax, out);
    }
  }

  if (is_staged && p.decoded == nullptr) {
    __syncthreads();  // the scales of all four rows are in shared memory
    uint4* const target = reinterpret_cast<uint4*>(
        p.scales + scale_offset(tile * kScaleTileRows + first_in_tile, 0, p.num_words));
    for (int word = static_cast<int>(threadIdx.x); word < p.num_words; word += static_cast<int>(blockDim.x)) {
      target[word * 32] = staged[word];
    }
  }
  if constexpr (Shape::kGrouped) {
    if (p.groups.offs != nullptr) {
      zero_rows_outside_groups(p, index, Shape::kCtaRows);
    }
  }
}

}  // namespace fp4gemm
