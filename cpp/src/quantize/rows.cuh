// Quantization along rows: one read of x where a row fits in registers; swizzled scales and their zero
// padding, or the decoded values, are written in place.
#pragma once

#include "quantize/four_over_six.cuh"
#include "quantize/groups.cuh"
#include "quantize/loaders.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {

/// Where the amax of a row is read.
enum class AmaxAt { kStart, kRow, kGroup, kGroupStart };

struct RowParams {
  Input input;
  int64_t m;
  int num_blocks;  // of 16 in a row
  int num_words;   // of 4 scales in a row, padded
  uint8_t* codes;
  uint8_t* scales;
  uint4* decoded;        // out, (m, 2 * num_blocks): fp16 values in place of codes and scales; null: those
  float* amax;           // out, (m); null: not wanted
  float const* amax_in;  // Amax::kGiven: read at
  AmaxAt amax_at;
  Groups groups;
  CastOptions cast;
};

enum class Amax {
  kRow,     // of each row: found here
  kGiven,   // read from amax_in
  kEither,  // read from amax_in if there is one
};

/// Rows of x behind the last group: codes and amax of zero. CTA after CTA takes as many of them as it has
/// rows, and the CTAs have as many rows in all as x or more.
__device__ inline void zero_rows_outside_groups(RowParams const& p, int64_t index, int count) {
  int64_t const first = clamp_row(__ldg(p.groups.offs + p.groups.num - 1), p.m) + index;
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

/// The maximum over the threads of a row. Every thread of the CTA must call it; `slot` (0..2) differs from
/// that of the call before, so that a fast warp's next maximum leaves the one that a slow warp still reads.
template <int kThreadsPerRow>
__device__ uint32_t row_max(uint32_t bits, int slot) {
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if constexpr (kThreadsPerRow > 32) {
    constexpr int kWarps = kThreadsPerRow / 32;
    __shared__ uint32_t partial[3][kWarps];
    int const lane = static_cast<int>(threadIdx.x % 32);
    if (lane == 0) {
      partial[slot][threadIdx.x / 32] = bits;
    }
    __syncthreads();
    bits = __reduce_max_sync(0xFFFFFFFFu, partial[slot][lane % kWarps]);
  }
  return bits;
}

/// The sum over the blocks of a row, folded by halves: block j takes that of j + N/2, then N = N/2, from N
/// the next power of two, blocks beyond the row being zero. So the order does not depend on the number of
/// threads.
template <int kThreadsPerRow, int kBlocksPerThread>
__device__ float row_sum(float (&sums)[kBlocksPerThread], int slot) {
#pragma unroll
  for (int half = kBlocksPerThread / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < half; ++i) {
      sums[i] = __fadd_rn(sums[i], sums[i + half]);
    }
  }
  float sum = sums[0];
  int const lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (kThreadsPerRow > 32) {
    constexpr int kWarps = kThreadsPerRow / 32;
    __shared__ float partial[2][kWarps][32];
    partial[slot][threadIdx.x / 32][lane] = sum;
    __syncthreads();
    float parts[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      parts[i] = partial[slot][i][lane];
    }
#pragma unroll
    for (int half = kWarps / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        parts[i] = __fadd_rn(parts[i], parts[i + half]);
      }
    }
    sum = parts[0];
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, half));
  }
  return sum;
}

/// How a CTA covers a tile of 128 rows of scales.
enum class Cover {
  kQuads,    // rows r, r + 32, r + 64 and r + 96, whose scales lie side by side and are written 16 bytes at a
             // time
  kSingles,  // one row: the most CTAs, for few rows
};

constexpr int kQuad = 4;
constexpr int kMaxStagedWords = 2048;  // scales of longer rows go to memory directly

__device__ inline int64_t amax_index(AmaxAt at, TileRows const& rows, int64_t row) {
  switch (at) {
    case AmaxAt::kStart: return 0;
    case AmaxAt::kRow: return row;
    case AmaxAt::kGroup: return rows.group;
    case AmaxAt::kGroupStart: return rows.group_start;
  }
  return 0;
}

template <int kThreadsPerRow>
constexpr int kRowThreads = kThreadsPerRow < 128 ? 128 : kThreadsPerRow;

/// CTAs of a multiprocessor that the registers must suffice for: the latency of memory and of barriers takes
/// 1024 threads to hide, 768 where that would spill.
template <class Loader, bool kSpills, int kThreadsPerRow>
constexpr int kMinCtas = (kSpills || Loader::kIsNorm ? 768 : 1024) / kRowThreads<kThreadsPerRow>;

/// kThreadsPerRow threads (32, with four rows a CTA at a time, or a whole CTA) take a row, kBlocksPerThread
/// blocks each at a time. The grid covers the rows of the scale buffer, so that its zero padding is written
/// too.
///
/// kLooped: a row may be longer than one turn of its threads; what does not fit in registers is read twice.
template <class Loader, class Cast, Amax kAmax, Cover kCover, bool kGrouped, bool kLooped, int kThreadsPerRow,
          int kBlocksPerThread>
__global__ void __launch_bounds__(
    kRowThreads<kThreadsPerRow>,
    kMinCtas<Loader,
             sizeof(typename Loader::Element) == 4 ? kGrouped || kBlocksPerThread > 1 : kGrouped && kLooped,
             kThreadsPerRow>) quantize_rows(RowParams p) {
  using Element = typename Loader::Element;
  static_assert(kThreadsPerRow == 32 || kThreadsPerRow >= 128,
                "a row belongs to one warp or to a CTA of four or more");
  constexpr bool kWarpRows = kThreadsPerRow == 32;
  constexpr int kTurnBlocks = kThreadsPerRow * kBlocksPerThread;
  constexpr int kRowStep = kCover == Cover::kQuads ? 32 : 1;
  constexpr int kCtaRows = kWarpRows || kCover == Cover::kQuads ? kQuad : 1;  // rows of a CTA
  constexpr int kRounds = kWarpRows ? 1 : kCtaRows;                           // of rows, one after the other
  extern __shared__ uint4 staged[];  // (num_words): the scales of four rows, four blocks each
#if __CUDA_ARCH__ >= 900
  // Nothing before this reads memory. What follows in the stream may be launched early likewise.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif

  int64_t const index = int64_t{blockIdx.x} * kCtaRows;
  int64_t const tile = index / 128;
  int const first_in_tile = static_cast<int>(index % 128) / (kCover == Cover::kQuads ? kQuad : 1);
  TileRows rows{tile * 128, min(p.m - tile * 128, int64_t{128}), 0, 0};
  if constexpr (kGrouped) {
    if (p.groups.offs != nullptr) {
      rows = find_tile(p.groups, p.m, tile);
    }
  }
  int const thread = static_cast<int>(kWarpRows ? threadIdx.x % 32 : threadIdx.x);
  bool const finds_amax = kAmax == Amax::kRow || (kAmax == Amax::kEither && p.amax_in == nullptr);
  bool const is_staged = kCover == Cover::kQuads && (!kLooped || p.num_words <= kMaxStagedWords);
  int const num_turns = kLooped ? (4 * p.num_words + kTurnBlocks - 1) / kTurnBlocks : 1;

  using AnyCast = typename Cast::template Rebind<Range::kAny>;
  typename Cast::Shared const shared(p.cast, 0);
  typename AnyCast::Shared const any_shared(p.cast, 0);

#pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    int const of_quad = kWarpRows ? static_cast<int>(threadIdx.x / 32) : round;
    int const in_tile = first_in_tile + of_quad * kRowStep;
    bool const is_real = in_tile < rows.count;
    int64_t const row = rows.first + in_tile;
    int const num_blocks = p.num_blocks;

    // One pointer for either result: a block's codes are 8 bytes, its values 32.
    bool const is_decoded = p.decoded != nullptr;
    int64_t const first_block = row * p.num_blocks + thread;
    uint8_t* const target =
        is_decoded ? reinterpret_cast<uint8_t*>(p.decoded) + 32 * first_block : p.codes + 8 * first_block;
    uint8_t* const scales =
        is_staged ? reinterpret_cast<uint8_t*>(staged) + thread / 4 * 16 + of_quad * 4 + thread % 4
                  : p.scales + scale_offset(tile * 128 + in_tile, thread, p.num_words);
    int64_t const scale_step = is_staged ? 16 : 512;  // between four blocks and the next
    if (!is_real) {                                   // zero padding
      for (int block = thread; !is_decoded && block < 4 * p.num_words; block += kThreadsPerRow) {
        scales[(block - thread) / 4 * scale_step] = 0;
      }
      continue;
    }

    // Block i of a turn is block thread + i * kThreadsPerRow, a constant distance from the first.
    Loader const loader(p.input, row, thread);
    Block<Element> blocks[kBlocksPerThread];
    uint32_t amax_bits[kBlocksPerThread];
    auto const load_turn = [&](int turn) {
#pragma unroll
      for (int i = 0; i < kBlocksPerThread; ++i) {
        int const offset = turn * kTurnBlocks + i * kThreadsPerRow;
        if (thread + offset < num_blocks) {
          blocks[i] = loader.load(offset);
        } else {
          blocks[i] = {};
        }
      }
      uint32_t turn_bits = 0;
#pragma unroll
      for (int i = 0; i < kBlocksPerThread; ++i) {
        amax_bits[i] = blocks[i].amax_bits();
        turn_bits = max(turn_bits, amax_bits[i]);
      }
      return turn_bits;
    };

    uint32_t bits = 0;
    // The first turn comes last: it stays in registers.
    for (int turn = kLooped ? num_turns - 1 : 0; turn >= 0; --turn) {
      bits = max(bits, load_turn(turn));
    }
    float norm = 0.0f;
    if constexpr (Loader::kIsNorm) {
      static_assert(!kLooped, "the sum of squares wants the row in registers");
      float sums[kBlocksPerThread];
#pragma unroll
      for (int i = 0; i < kBlocksPerThread; ++i) {
        sums[i] = Loader::sum_of_squares(blocks[i]);
        if (thread + i * kThreadsPerRow < num_blocks) {
          loader.store_sum(i * kThreadsPerRow, blocks[i]);
        }
      }
      float const sum = row_sum<kThreadsPerRow>(sums, round % 2);
      float const mean = __fdiv_rn(sum, static_cast<float>(p.input.k));
      norm = __frcp_rn(__fsqrt_rn(__fadd_rn(mean, p.input.epsilon)));
      bits = 0;
#pragma unroll
      for (int i = 0; i < kBlocksPerThread; ++i) {
        if (thread + i * kThreadsPerRow < num_blocks) {
          blocks[i] = loader.finish(i * kThreadsPerRow, blocks[i], norm);
        }
        amax_bits[i] = blocks[i].amax_bits();
        bits = max(bits, amax_bits[i]);
      }
    }
    auto const load_final = [&](int offset) {
      if constexpr (Loader::kIsNorm) {
        return loader.finish(offset, loader.reload(offset), norm);
      } else {
        return loader.load(offset);
      }
    };
    bool has_nan = bits > Block<Element>::kInfinity;
    float outer_amax = 0.0f;
    if (finds_amax) {
      bits = row_max<kThreadsPerRow>(bits, round % 2);
      has_nan = bits > Block<Element>::kInfinity;
      if (has_nan) {  // in the whole row
        bits = 0;
#pragma unroll 1
        for (int block = thread; block < num_blocks; block += kThreadsPerRow) {
          bits = max(bits, amax_bits_ignoring_nan(load_final(block - thread)));
        }
        bits = row_max<kThreadsPerRow>(bits, 2);
      }
      outer_amax = Block<Element>::from_bits(bits);
    } else {
      outer_amax = p.amax_in[amax_index(p.amax_at, rows, row)];
    }
    if (p.amax != nullptr && thread == 0) {
      p.amax[row] = outer_amax;
    }

    auto const store = [&](int offset, QuantizedBlock const& quantized) {
      if (p.decoded != nullptr) {
        if (thread + offset < num_blocks) {
          uint4* const values = reinterpret_cast<uint4*>(target) + 2 * offset;
          values[0] = decode_eight(quantized.codes.x, quantized.scale);
          values[1] = decode_eight(quantized.codes.y, quantized.scale);
        }
        return;
      }
      if (thread + offset < num_blocks) {
        reinterpret_cast<uint2*>(target)[offset] = quantized.codes;
      }
      if (thread + offset < 4 * p.num_words) {
        scales[offset / 4 * scale_step] = quantized.scale;
      }
    };
    // Blocks that the short route cannot do: all of the row, or single ones of a thread.
    bool redo = has_nan || !is_regular<Cast>(outer_amax);
    if constexpr (Cast::kResolves) {
      redo = __any_sync(0xFFFFFFFFu, redo);
    }
    if (!redo) {
      Cast const cast(p.cast, shared, outer_amax);
      for (int turn = 0; turn < num_turns; ++turn) {
        if (turn > 0) {
          load_turn(turn);
        }
        uint32_t unclear = 0;
#pragma unroll
        for (int i = 0; i < kBlocksPerThread; ++i) {
          int const offset = turn * kTurnBlocks + i * kThreadsPerRow;
          QuantizedBlock quantized;
          bool const is_clear = cast.quantize(blocks[i], Block<Element>::from_bits(amax_bits[i]),
                                              row * p.num_blocks + thread + offset, quantized);
          unclear |= is_clear ? 0u : 1u << i;
          store(offset, quantized);
        }
        if constexpr (Cast::kResolves) {
          // One block after the other, by the whole warp.
          __syncwarp();  // other lanes write over what was stored
          unsigned lanes = __ballot_sync(0xFFFFFFFFu, unclear != 0);
#pragma unroll 1
          while (lanes != 0) {
            int const source = __ffs(static_cast<int>(lanes)) - 1;
            int const i = __ffs(static_cast<int>(__shfl_sync(0xFFFFFFFFu, unclear, source))) - 1;
            int const lane = thread % 32;
            // From the lane's own first block; four neighbours' scales lie side by side.
            int const offset = turn * kTurnBlocks + i * kThreadsPerRow + source - lane;
            int const words = (thread + offset) / 4 - thread / 4;
            cast.resolve(loader.elements(offset), target + int64_t{offset} * (is_decoded ? 32 : 8),
                         scales + scale_step * words + (source % 4 - lane % 4), is_decoded);
            if (lane == source) {
              unclear &= unclear - 1;
            }
            lanes = __ballot_sync(0xFFFFFFFFu, unclear != 0);
          }
        }
      }
    }
    if (redo) {
      // Few rows come here, so that nothing is kept in registers for it.
      AnyCast const cast(p.cast, any_shared, outer_amax);
#pragma unroll 1
      for (int offset = 0; thread + offset < 4 * p.num_words; offset += kThreadsPerRow) {
        QuantizedBlock quantized{};
        if (thread + offset < num_blocks) {
          Block<Element> const block = load_final(offset);
          cast.quantize(without_nan(block), Block<Element>::from_bits(amax_bits_ignoring_nan(block)),
                        row * p.num_blocks + thread + offset, quantized);
        }
        store(offset, quantized);
      }
    }
  }
  if (is_staged && p.decoded == nullptr) {
    __syncthreads();
    uint4* const target =
        reinterpret_cast<uint4*>(p.scales + scale_offset(tile * 128 + first_in_tile, 0, p.num_words));
    for (int word = static_cast<int>(threadIdx.x); word < p.num_words; word += static_cast<int>(blockDim.x)) {
      target[word * 32] = staged[word];
    }
  }
  if constexpr (kGrouped) {
    if (p.groups.offs != nullptr) {
      zero_rows_outside_groups(p, index, kCtaRows);
    }
  }
}

}  // namespace fp4gemm
