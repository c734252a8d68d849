// The quantization of the tokens of a decode step inside the GEMM: every CTA quantizes all of them while its
// first weights are on their way.
#pragma once

#include "cutlass/fast_math.h"
#include "cutlass_evt/kernel/mixed_input.hpp"
#include "quantize/cast.cuh"

namespace fp4gemm::sm90 {

/// The quantizer of MixedInputKernel. It has the bits of quantize_rows with TeCast, an amax for each row, and
/// decoded results. The amaxes become the factors of the tokens.
struct TokenQuantizer {
  static constexpr int kTurnElements = 32 * kBlock;  // of a row: what a warp quantizes in a turn
  static constexpr int kTurns = 4;  // that a warp has at most; it loads the elements of all of them at once

  /// Whether the turns of Config's warps suffice for this many elements in up to 8 rows.
  template <class Config>
  static constexpr bool suffices(int elements) {
    return elements / kTurnElements + Config::kTokens <= kTurns * Config::kConsumerWarps;
  }

  struct Arguments {
    void const* x;  // (m, k) bf16 or fp16, rows 16-byte aligned
    int64_t row_stride;
    bool is_bf16;
    int m;
    int num_blocks;                 // of 16 elements in a row
    int depth_chunks;               // of 64 elements; those beyond k become zeros
    cutlass::FastDivmod row_turns;  // turns of a warp in a row, see kTurns
  };

  static Arguments arguments(void const* x, int64_t row_stride, bool is_bf16, int64_t m, int64_t k) {
    return {x,
            row_stride,
            is_bf16,
            static_cast<int>(m),
            static_cast<int>(k / kBlock),
            static_cast<int>(ceil_div(k, kPrepackedChunk)),
            cutlass::FastDivmod(static_cast<int>(ceil_div(k, int64_t{kTurnElements})))};
  }

  /// The elements that a thread loads: a block in each turn of its warp.
  struct Elements {
    uint4 first[kTurns], second[kTurns];
  };

  /// Clears the amaxes. All consumers of the CTA call this; a barrier follows.
  template <class Config>
  __device__ static void prepare(cutlass_evt::MixedInputShared<Config> const& shared) {
    if (threadIdx.x < Config::kTokens) {
      row_amax(shared)[threadIdx.x] = 0;
    }
  }

  /// Requests the elements. All consumers of the CTA call this, after griddepcontrol.wait.
  template <class Config>
  __device__ static void load(Arguments const& args, Elements& elements) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      Place const place = place_of<Config>(args, i);
      elements.first[i] = elements.second[i] = {};
      if (place.row < args.m && place.block < args.num_blocks) {
        auto const* const from = reinterpret_cast<uint4 const*>(
            static_cast<uint16_t const*>(args.x) + place.row * args.row_stride + place.block * kBlock);
        elements.first[i] = load_after_wait(from);
        elements.second[i] = load_after_wait(from + 1);
      }
    }
  }

  /// Writes the decoded tokens, as far as is_needed(chunk of 64 along k), and their amaxes. All consumers
  /// call this after the barrier that follows prepare().
  template <class Config, class IsNeeded>
  __device__ static void quantize(Arguments const& args, cutlass_evt::MixedInputShared<Config> const& shared,
                                  Elements const& elements, IsNeeded const& is_needed) {
    if (args.is_bf16) {
      quantize<Config, __nv_bfloat16>(args, shared, elements, is_needed);
    } else {
      quantize<Config, __half>(args, shared, elements, is_needed);
    }
  }

 private:
  /// A block of 16 elements of a row, which may lie beyond the last row or behind the last block of the row.
  struct Place {
    int row, block;
  };

  template <class Config>
  __device__ static Place place_of(Arguments const& args, int turn) {
    int const warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    Place place;
    args.row_turns(place.row, place.block, warp + turn * Config::kConsumerWarps);
    place.block = place.block * 32 + static_cast<int>(threadIdx.x % 32);
    return place;
  }

  /// The bits of the amax of each token: in the memory of the table of groups, which a dense product has not.
  template <class Config>
  __device__ static uint32_t* row_amax(cutlass_evt::MixedInputShared<Config> const& shared) {
    return reinterpret_cast<uint32_t*>(shared.table());
  }

  /// Where the decoded values of a block will be: two pieces of 16 bytes, whose order the swizzle may
  /// exchange. Until then the block's elements are there.
  struct Slot {
    uint4* first;
    uint4* second;

    __device__ Slot(char* tokens, int depth_chunks, Place const& place) {
      char* const chunk = tokens + (place.row * depth_chunks + place.block / 4) * 128;
      int const piece = place.block % 4 * 2;
      first = reinterpret_cast<uint4*>(chunk + (piece ^ place.row) * 16);
      second = reinterpret_cast<uint4*>(chunk + ((piece + 1) ^ place.row) * 16);
    }

    template <class T>
    __device__ Block<T> load() const {
      return block_of<T>(*first, *second);
    }
  };

  template <class T>
  __device__ static Block<T> block_of(uint4 const& a, uint4 const& b) {
    return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
  }

  /// Rows with a NaN or an extreme amax are rare. What they need comes behind the loops for other rows, which
  /// note it as a bit for each turn: the fewer instructions a launch reads, the earlier it starts.
  template <class Config, class T, class IsNeeded>
  __device__ static void quantize(Arguments const& args, cutlass_evt::MixedInputShared<Config> const& shared,
                                  Elements const& elements, IsNeeded const& is_needed) {
    int const blocks_to_write = 4 * args.depth_chunks;
    uint32_t with_nan = 0;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      Place const place = place_of<Config>(args, i);
      if (place.row < args.m) {
        uint32_t bits = block_of<T>(elements.first[i], elements.second[i]).amax_bits();
        if (bits > Block<T>::kInfinity) {
          with_nan |= 1u << i;
          bits = 0;
        }
        bits = __reduce_max_sync(0xFFFFFFFFu, bits);
        if (threadIdx.x % 32 == 0) {
          atomicMax(row_amax(shared) + place.row, bits);
        }
        if (place.block < blocks_to_write) {
          Slot const slot(shared.base, args.depth_chunks, place);
          *slot.first = elements.first[i];
          *slot.second = elements.second[i];
        }
      }
    }
#pragma unroll 1
    for (int i = 0; with_nan >> i != 0; ++i) {
      if ((with_nan >> i & 1) != 0) {
        Place const place = place_of_lane<Config>(args, i);
        Slot const slot(shared.base, args.depth_chunks, place);
        atomicMax(row_amax(shared) + place.row, amax_bits_ignoring_nan(slot.load<T>()));
      }
    }
    cutlass_evt::consumer_barrier<Config>();  // the amaxes are complete
    uint32_t irregular = 0;
#pragma unroll 1
    for (int i = 0; i < kTurns; ++i) {
      Place const place = place_of<Config>(args, i);
      if (place.row >= args.m) {
        break;
      }
      float const amax = Block<T>::from_bits(row_amax(shared)[place.row]);
      if (place.block == 0) {
        shared.vectors(0)[place.row] = amax;
      }
      if (place.block < blocks_to_write && is_needed(place.block / 4)) {
        Slot const slot(shared.base, args.depth_chunks, place);
        if ((with_nan >> i & 1) == 0 && is_regular<TeCast<Range::kRegular>>(amax)) {
          cast_regular(slot.load<T>(), amax, slot);
        } else {
          irregular |= 1u << i;
        }
      }
    }
#pragma unroll 1
    for (int i = 0; irregular >> i != 0; ++i) {
      if ((irregular >> i & 1) != 0) {
        Place const place = place_of_lane<Config>(args, i);
        Slot const slot(shared.base, args.depth_chunks, place);
        cast_any(slot.load<T>(), Block<T>::from_bits(row_amax(shared)[place.row]), slot);
      }
    }
    cutlass_evt::consumer_barrier<Config>();  // all tokens are in shared memory
  }

  /// place_of for lanes that have diverged.
  template <class Config>
  __device__ static Place place_of_lane(Arguments const& args, int turn) {
    Place place;
    args.row_turns(place.row, place.block,
                   static_cast<int>(threadIdx.x / 32) + turn * Config::kConsumerWarps);
    place.block = place.block * 32 + static_cast<int>(threadIdx.x % 32);
    return place;
  }

  /// What encode_half and decode_eight make of a block of a regular row, in fewer instructions: codes move
  /// from the sums of e2m1_bits to where fp16 has them, and are the values times 2^-14 there.
  template <class T>
  __device__ static void cast_regular(Block<T> const& block, float row_amax, Slot const& slot) {
    constexpr uint32_t kStart = kE2m1StartBits * ((1u << 25) + (1u << 9));
    TeScales<Range::kRegular> const scales(row_amax);
    uint8_t const scale = scales.block_scale(Block<T>::from_bits(block.amax_bits()));
    float const factor = te_factor<Range::kRegular>(scale, scales.outer);
    __half2 const up = __half2half2(__hmul(e4m3_to_half(scale), __float2half(128.0f)));
    uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      uint32_t const low = e2m1_bits(block.element(2 * i), factor);
      uint32_t const high = e2m1_bits(block.element(2 * i + 1), factor);
      uint32_t const bits = (high * (1u << 25) + (low * (1u << 9) - kStart)) | (block.words[i] & 0x80008000u);
      __half2 const value =
          __hmul2(__hmul2(reinterpret_cast<__half2 const&>(bits), up), __float2half2_rn(128.0f));
      words[i] = reinterpret_cast<uint32_t const&>(value);
    }
    *slot.first = {words[0], words[1], words[2], words[3]};
    *slot.second = {words[4], words[5], words[6], words[7]};
  }

  /// The same for any block.
  template <class T>
  __device__ static void cast_any(Block<T> const& block, float row_amax, Slot const& slot) {
    using Cast = TeCast<Range::kAny>;
    CastOptions const options;
    typename Cast::Shared const none(options, 0);
    QuantizedBlock result;
    Cast(options, none, row_amax)
        .quantize(without_nan(block), Block<T>::from_bits(amax_bits_ignoring_nan(block)), 0, result);
    *slot.first = decode_eight(result.codes.x, result.scale);
    *slot.second = decode_eight(result.codes.y, result.scale);
  }
};

}  // namespace fp4gemm::sm90
