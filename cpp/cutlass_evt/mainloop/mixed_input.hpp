// The mixed-input mainloop, on prepacked NVFP4 weights: bulk copies of weights and TMA loads of tokens fill a
// ring of stages in shared memory; consumer warps decode the weights in registers and multiply them on the
// tensor cores.
//
// The product is computed transposed: the rows of a tile are rows of the weight (columns of D), its columns
// are tokens (rows of D). So the operand that must be decoded is the one that comes from registers, and a
// tile may have as few as eight tokens.
//
// Tiles of eight tokens use mma.sync, wider ones wgmma. Both read the decoded weights from the same registers
// and leave the sums in the same registers. With few tokens most of the time goes into decoding. There
// mma.sync is faster, since each warp proceeds on its own; wgmma reads the tokens from shared memory once for
// four warps, but makes the four wait for each other.
#pragma once

#include <cuda.h>

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/bfloat16.h"
#include "cutlass/float8.h"
#include "cutlass/half.h"
#include "cutlass_evt/mainloop/mixed_input_config.hpp"
#include "cutlass_evt/ring.hpp"

namespace cutlass_evt {

/// The encoded weights of one thread in one chunk, and how it decodes them to the registers of four operands.
/// An operand is a thread's part of m64k16 for fp16 and bf16 and of m64k32 for e4m3 (m16k16 and m16k32 for a
/// warp), which is four registers in each case.
///
/// Element is the type of the tokens and of the operand. The members are
///   Constants             what decoding needs beside the weights, the same for the whole mainloop
///   codes_at, scales_at   the offsets of the thread's codes and scales in a chunk
///   load                  loads them from these addresses in shared memory
///   look_up               between load and decode: loads what the table of the decoder has for the scales
///   decode                a = the registers of the k-th operand
template <class Element>
struct MixedInputRaw;

/// fp16: the result is the weight times 2^-7. The bits that pair_bits extracts are the values times 2^-14,
/// and the scales are multiplied by 2^7. So all but the smallest products are normal numbers, which the
/// tensor cores align more precisely than subnormal ones.
template <>
struct MixedInputRaw<cutlass::half_t> {
  using Packing = Nvfp4Packing;
  using Constants = Nvfp4Shifts;

  uint32_t words[4];   // one for each 16 along k
  uint32_t scales[2];  // of rows r and r + 8, each for two blocks of 16 along k

  CUTLASS_DEVICE static uint32_t codes_at(uint32_t thread) { return thread * 16; }
  CUTLASS_DEVICE static uint32_t scales_at(uint32_t thread) { return Packing::kCodeBytes + thread / 4 * 8; }

  CUTLASS_DEVICE void load(uint32_t codes_at, uint32_t scales_at) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(codes_at)
                 : "memory");
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                 : "=r"(scales[0]), "=r"(scales[1])
                 : "r"(scales_at)
                 : "memory");
  }

  CUTLASS_DEVICE void look_up(uint32_t /*table*/) {}

  CUTLASS_DEVICE void decode(int k, Constants const& shifts, uint32_t (&a)[4]) const {
    uint32_t const bits_of_scales = Packing::scale_bits(scales[k / 2], k);
    __half2 const upper = __low2half2(reinterpret_cast<__half2 const&>(bits_of_scales));
    __half2 const lower = __high2half2(reinterpret_cast<__half2 const&>(bits_of_scales));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const bits = Packing::pair_bits(words[k], i, shifts);
      __half2 const product = __hmul2(reinterpret_cast<__half2 const&>(bits), i % 2 == 0 ? upper : lower);
      a[i] = reinterpret_cast<uint32_t const&>(product);
    }
  }
};

/// bf16: the fp16 operand, converted. bf16 has fewer significant bits than fp16, but more than the six of a
/// product. To move the bits of the codes to where bf16 has them needs as many instructions, most of them on
/// the ALU pipe.
template <>
struct MixedInputRaw<cutlass::bfloat16_t> : MixedInputRaw<cutlass::half_t> {
  CUTLASS_DEVICE void decode(int k, Constants const& shifts, uint32_t (&a)[4]) const {
    uint32_t half[4];
    MixedInputRaw<cutlass::half_t>::decode(k, shifts, half);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      float2 const wide = __half22float2(reinterpret_cast<__half2 const&>(half[i]));
      __nv_bfloat162 const narrow = __float22bfloat162_rn(wide);
      a[i] = reinterpret_cast<uint32_t const&>(narrow);
    }
  }
};

/// e4m3: the result is e4m3(value * scale / 8), from the table of Nvfp4Fp8Packing. A chunk has two blocks of
/// 16 along k in each of the thread's two rows.
template <>
struct MixedInputRaw<cutlass::float_e4m3_t> {
  using Packing = Nvfp4Fp8Packing;
  struct Constants {};

  uint32_t words[2][4];          // of each 64 along k: two words of row r, two of row r + 8
  uint32_t scales;               // all four
  uint32_t magnitudes[2][2][2];  // of each 64 along k and row: the eight bytes of the table's entry

  CUTLASS_DEVICE static uint32_t codes_at(uint32_t thread) { return thread * 16; }
  CUTLASS_DEVICE static uint32_t scales_at(uint32_t thread) { return Packing::kCodeBytes + thread * 4; }

  /// Writes the table; every consumer thread calls this, and a barrier follows. The largest operand is e4m3(6
  /// * 448 / 8) = 336, and the scale with code 127 is NaN.
  CUTLASS_DEVICE static void make_table(uint32_t table) {
    uint32_t const scale = threadIdx.x;
    if (scale < 128) {
      float const s = static_cast<float>(cutlass::float_e4m3_t::bitcast(static_cast<uint8_t>(scale)));
      constexpr float kEighths[8] = {0.0f, 0.0625f, 0.125f, 0.1875f, 0.25f, 0.375f, 0.5f, 0.75f};
      uint32_t bytes[2] = {};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 8; ++i) {
        uint32_t const byte = cutlass::float_e4m3_t(kEighths[i] * s).storage;
        bytes[i / 4] |= byte << (i % 4 * 8);
      }
      asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(table + scale * 8), "r"(bytes[0]), "r"(bytes[1])
                   : "memory");
    }
  }

  CUTLASS_DEVICE void load(uint32_t codes_at, uint32_t scales_at) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      uint32_t (&w)[4] = words[half];
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "r"(codes_at + half * (Packing::kCodeBytes / 2))
                   : "memory");
    }
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(scales_at) : "memory");
  }

  CUTLASS_DEVICE void look_up(uint32_t table) {
    CUTLASS_PRAGMA_UNROLL
    for (int half = 0; half < 2; ++half) {
      CUTLASS_PRAGMA_UNROLL
      for (int row = 0; row < 2; ++row) {
        // The table is at a multiple of its size, and the scale is in the word eight times, in bits 9..3.
        uint32_t const at = (scales >> (Packing::scale_shift(half, row) - 3) & 0x3F8u) | table;
        uint32_t (&entry)[2] = magnitudes[half][row];
        asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(entry[0]), "=r"(entry[1])
                     : "r"(at)
                     : "memory");
      }
    }
  }

  /// Operands 0 and 1 are of the first 64 along k, from the first and the second word of each row.
  CUTLASS_DEVICE void decode(int k, Constants const&, uint32_t (&a)[4]) const {
    CUTLASS_PRAGMA_UNROLL
    for (int row = 0; row < 2; ++row) {
      uint32_t const word = words[k / 2][2 * row + k % 2];
      uint32_t const(&entry)[2] = magnitudes[k / 2][row];
      uint32_t const selectors = word & 0x77777777u;
      a[row] = __byte_perm(entry[0], entry[1], selectors) | (word & 0x80808080u);
      a[2 + row] = __byte_perm(entry[0], entry[1], selectors >> 16) | (word << 4 & 0x80808080u);
    }
  }
};

/// What the mainloop multiplies: stages begin .. end - 1 along k of one tile, weight rows from chunk
/// `first_chunk` on with tokens from row `token` of X on.
struct TileWork {
  uint8_t const* weights;  // the matrix
  int first_chunk;         // in chunks of 64 rows
  int token;
  int tokens;  // tokens that are loaded, see Config::tokens_for; as many or a few more are multiplied
  int begin, end;
};

/// The sizes of the operands in chunks, and the form of the tokens' tensor map.
struct MixedInputOperands {
  int row_chunks;
  int depth_chunks;
  /// True if k has whole chunks of `depth`: the tensor map then has the shape (depth, tokens, k / depth), and
  /// one load fetches all chunks of a stage. Otherwise its shape is (k, tokens, 1) and each chunk is a load
  /// of its own, whose elements beyond k are filled with zeros.
  bool whole_chunks;
};

/// The producer's loads and what all consumers share. Config is a MixedInputConfig.
///
/// Each stage has two mbarriers. full: its phase completes when the bytes that the producer announced have
/// arrived; a consumer that has waited for it sees them. empty: its phase completes when every consumer warp
/// of every CTA of the cluster has arrived; the producer may then overwrite the stage, in all those CTAs as
/// far as it multicasts.
template <class Config>
struct MixedInputMainloop {
  using Shared = MixedInputShared<Config>;
  using Position = RingPosition<Config::kStages>;
  using Element = typename Config::Element;
  using Packing = typename Config::Packing;
  using Raw = MixedInputRaw<Element>;

  // ---- the producer: one thread ----

  // The CTAs of a cluster divide the tokens of a stage by chunks along k or, where a stage has one chunk, by
  // tokens.
  static constexpr bool kSharesChunks = Config::kCluster == 1 || Config::kChunks > 1;
  static constexpr int kLoadChunks = kSharesChunks ? Config::kChunks / Config::kCluster : 1;
  // Tokens of one load: this CTA's part of kLeastTokens. Wider tiles need several loads.
  static constexpr int kLoadTokens =
      kSharesChunks ? Config::kLeastTokens : Config::kLeastTokens / Config::kCluster;

  /// The producer's loads for one work item.
  class Loader {
   public:
    CUTLASS_DEVICE Loader(MixedInputOperands const& p, CUtensorMap const* map, Shared const& shared,
                          TileWork const& work, int rank)
        : map_(map),
          shared_(shared),
          rank_(rank),
          depth_chunks_(p.depth_chunks),
          whole_chunks_(p.whole_chunks),
          groups_(cute::max(0, cute::min(int{Config::kRowGroups}, p.row_chunks - work.first_chunk))),
          token_(work.token + (kSharesChunks ? 0 : rank * kLoadTokens)),
          tokens_(work.tokens),
          row_stride_(int64_t{p.depth_chunks} * Packing::kChunkBytes),
          weights_(work.weights + work.first_chunk * row_stride_) {}

    /// Announces all bytes of the stage, weights and tokens, to its full mbarrier, and requests the weights.
    /// Tokens that other CTAs of the cluster multicast here are among these bytes.
    CUTLASS_DEVICE void weights(int stage, int step) const {
      int const chunks = cute::min(int{Config::kChunks}, depth_chunks_ - step * Config::kChunks);
      int const weight_bytes = chunks * Packing::kChunkBytes;
      int const token_bytes =
          Config::kQuantizes ? 0 : (whole_chunks_ ? int{Config::kChunks} : chunks) * tokens_ * 128;
      uint32_t const full = shared_.full_at(stage);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                   "r"(groups_ * weight_bytes + token_bytes)
                   : "memory");
      uint8_t const* from = weights_ + int64_t{step} * (Config::kChunks * Packing::kChunkBytes);
      uint32_t to = shared_.weights_at(stage);
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < Config::kRowGroups; ++g) {
        if (g < groups_) {
          copy(to, from, weight_bytes, full);
        }
        to += Config::kChunks * Packing::kChunkBytes;
        from += row_stride_;
      }
    }

    /// Requests this CTA's part of the tokens, for every CTA of the cluster.
    CUTLASS_DEVICE void tokens(int stage, int step) const {
      int const first = step * Config::kChunks + (kSharesChunks ? rank_ * kLoadChunks : 0);
      uint32_t const to =
          shared_.tokens_at(stage) +
          static_cast<uint32_t>(rank_ *
                                (kSharesChunks ? kLoadChunks * Config::kTokenChunkBytes : kLoadTokens * 128));
      if (whole_chunks_) {
        CUTLASS_PRAGMA_UNROLL
        for (int t = 0; t < Config::kTokens; t += Config::kLeastTokens) {
          if (t < tokens_) {
            load(to + static_cast<uint32_t>(t * Config::kChunks * 128), 0, token_ + t, first, stage);
          }
        }
        return;
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (int c = 0; c < kLoadChunks && first + c < depth_chunks_; ++c) {
        CUTLASS_PRAGMA_NO_UNROLL
        for (int t = 0; t < tokens_; t += Config::kLeastTokens) {
          load(to + static_cast<uint32_t>(c * Config::kTokenChunkBytes + t * Config::kChunks * 128),
               (first + c) * Packing::kDepth, token_ + t, 0, stage);
        }
      }
    }

   private:
    // Where there are no clusters, the destination is named as this CTA's (shared::cta). For 12.x ptxas puts
    // a call of a routine beside each copy to shared::cluster, for destinations in another CTA.

    CUTLASS_DEVICE void copy(uint32_t to, uint8_t const* from, int bytes, uint32_t full) const {
      if constexpr (Config::kHasClusters) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                to),
            "l"(from), "r"(bytes), "r"(full)
            : "memory");
      } else {
        asm volatile(
            "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
            "l"(from), "r"(bytes), "r"(full)
            : "memory");
      }
    }

    CUTLASS_DEVICE void load(uint32_t to, int x, int y, int z, int stage) const {
      uint32_t const full = shared_.full_at(stage);
      if constexpr (Config::kCluster > 1) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
            "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
            "l"(map_), "r"(x), "r"(y), "r"(z), "r"(full),
            "h"(static_cast<uint16_t>((1 << Config::kCluster) - 1))
            : "memory");
      } else if constexpr (Config::kHasClusters) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
            "%4}], [%5];" ::"r"(to),
            "l"(map_), "r"(x), "r"(y), "r"(z), "r"(full)
            : "memory");
      } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
            "%4}], [%5];" ::"r"(to),
            "l"(map_), "r"(x), "r"(y), "r"(z), "r"(full)
            : "memory");
      }
    }

    CUtensorMap const* map_;
    Shared const& shared_;
    int rank_;
    int depth_chunks_;
    bool whole_chunks_;
    int groups_;          // row groups of this CTA that begin within the weight
    int token_;           // first row of X that this CTA loads
    int tokens_;          // tokens of the tile
    int64_t row_stride_;  // bytes
    uint8_t const* weights_;
  };

  /// Waits for a phase of an mbarrier. try_wait acquires: what happened before the phase completed is visible
  /// afterwards.
  CUTLASS_DEVICE static void wait(uint32_t barrier, uint32_t phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" ::"r"(barrier),
        "r"(phase)
        : "memory");
  }

  // The first round finds the stages empty: waiting for the parity before the first phase returns at once.
  CUTLASS_DEVICE static void wait_empty(Shared const& shared, Position const& at) {
    wait(shared.empty_at(at.stage), at.phase ^ 1);
  }

  // ---- the consumers ----

  CUTLASS_DEVICE static void wait_full(Shared const& shared, Position const& at) {
    wait(shared.full_at(at.stage), at.phase);
  }

  /// Arrives on the empty mbarrier of the stage, in every CTA of the cluster, on behalf of this warp; every
  /// lane must call it. One lane arrives for all, so all lanes must have read the stage before any lane gets
  /// here: the mma.sync loop calls __syncwarp() first. The wgmma loop need not: every value that a lane
  /// loaded went into a wgmma, and wgmma.wait_group.sync, at which all lanes meet, returns after these
  /// wgmmas.
  CUTLASS_DEVICE static void release(Shared const& shared, int stage) {
    uint32_t const lane = threadIdx.x % 32;
    if constexpr (Config::kCluster > 1) {
      if (lane < Config::kCluster) {
        asm volatile(
            "{\n"
            ".reg .b32 remote;\n"
            "mapa.shared::cluster.u32 remote, %0, %1;\n"
            "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
            "}" ::"r"(shared.empty_at(stage)),
            "r"(lane)
            : "memory");
      }
    } else if (lane == 0) {
      asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared.empty_at(stage)) : "memory");
    }
  }

  /// The addresses of this thread's codes and scales in the first chunk of a stage.
  struct Share {
    uint32_t codes_at, scales_at;

    CUTLASS_DEVICE Share(Shared const& shared, int first_chunk) {
      uint32_t const thread = threadIdx.x % 128;
      uint32_t const chunk_at =
          shared.weights_at(0) + static_cast<uint32_t>(first_chunk * Packing::kChunkBytes);
      codes_at = chunk_at + Raw::codes_at(thread);
      scales_at = chunk_at + Raw::scales_at(thread);
    }

    CUTLASS_DEVICE void load(Raw& raw, int stage, int chunk) const {
      uint32_t const offset =
          static_cast<uint32_t>(stage * Config::kWeightBytes + chunk * Packing::kChunkBytes);
      raw.load(codes_at + offset, scales_at + offset);
    }
  };

  /// The chunks from the first one of a warpgroup in stage `step` to the end of k. Only in the last stage can
  /// this be less than kChunksPerGroup, and even negative. The result is not clamped to 0: ptxas 13.0 inverts
  /// the predicate of the clamp when the result is compared with the upper bound.
  CUTLASS_DEVICE static int chunks_left(MixedInputOperands const& p, int step, int depth_group) {
    return p.depth_chunks - step * Config::kChunks - depth_group * Config::kChunksPerGroup;
  }
};

}  // namespace cutlass_evt
