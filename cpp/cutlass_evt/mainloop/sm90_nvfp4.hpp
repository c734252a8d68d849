// The SM90 mainloop on prepacked NVFP4 weights: bulk copies and TMA into a ring of shared memory, decoding in
// registers, tensor cores with the weights as their register operand.
//
// The product is computed transposed: the rows of a tile are weight rows (columns of D), its columns are
// tokens (rows of D). So the operand that must be decoded is the one that comes from registers, and the token
// side of a tile may be narrow.
//
// Tiles of eight tokens use mma.sync, the others wgmma. Both take the decoded weights in the same registers
// and leave the sums in the same ones. With few tokens the time goes into decoding, and mma.sync leaves each
// warp to itself; wgmma, which reads the tokens from shared memory once for four warps, makes these wait for
// each other.
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass/bfloat16.h"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/half.h"
#include "cutlass_evt/mainloop/sm90_nvfp4_config.hpp"

namespace cutlass_evt {

/// One m64k16 register operand from one word of codes and the scales of rows r and r + 8 as scale_bits gives
/// them, times 2^-7: the bits of pair_bits are the values times 2^-14, and the scales bring 2^7. So all but
/// the tiniest products are normal numbers, which the tensor cores align better than subnormal ones.
template <class Element>
struct Nvfp4Decoder;

template <>
struct Nvfp4Decoder<cutlass::half_t> {
  CUTLASS_DEVICE static void decode(uint32_t word, uint32_t scales, Nvfp4Shifts const& shifts,
                                    uint32_t (&a)[4]) {
    __half2 const upper = __low2half2(reinterpret_cast<__half2 const&>(scales));
    __half2 const lower = __high2half2(reinterpret_cast<__half2 const&>(scales));
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const bits = Nvfp4Packing::pair_bits(word, i, shifts);
      __half2 const product = __hmul2(reinterpret_cast<__half2 const&>(bits), i % 2 == 0 ? upper : lower);
      a[i] = reinterpret_cast<uint32_t const&>(product);
    }
  }
};

/// The same for bf16, whose exponent is three bits longer: the bits below the sign move down by three and are
/// the values times 2^-126, the scales bring 2^119.
template <>
struct Nvfp4Decoder<cutlass::bfloat16_t> {
  CUTLASS_DEVICE static void decode(uint32_t word, uint32_t scales, Nvfp4Shifts const& shifts,
                                    uint32_t (&a)[4]) {
    float2 const wide = __half22float2(reinterpret_cast<__half2 const&>(scales));
    constexpr float kUp = 5.192296858534828e33f;  // 2^112
    __nv_bfloat162 const upper = __float2bfloat162_rn(wide.x * kUp);
    __nv_bfloat162 const lower = __float2bfloat162_rn(wide.y * kUp);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {
      uint32_t const half = Nvfp4Packing::pair_bits(word, i, shifts);
      uint32_t const bits = (half & 0x80008000u) | ((half & 0x0E000E00u) >> 3);
      __nv_bfloat162 const product =
          __hmul2(reinterpret_cast<__nv_bfloat162 const&>(bits), i % 2 == 0 ? upper : lower);
      a[i] = reinterpret_cast<uint32_t const&>(product);
    }
  }
};

/// The place in the ring; phases flip each time round.
template <int Stages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance() {
    if (++stage == Stages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

/// Steps [begin, end) of k, in stages, of one tile: rows from those of chunk `first_chunk` of the weight,
/// tokens from `token` of X.
struct TileWork {
  uint8_t const* weights;
  int first_chunk;  // of 64 rows
  int token;
  int tokens;  // that are loaded, see Config::tokens_for; as many or a few more are multiplied
  int begin, end;
};

/// The sizes of what the mainloop reads, in chunks of 64.
struct Sm90Nvfp4Operands {
  int row_chunks;
  int depth_chunks;
  /// The map of X is of (64, tokens, chunks of k), so that one load brings a stage's tokens. Otherwise k is
  /// no multiple of 64, the map is of (k, tokens, 1), and each chunk is a load: beyond the end of a row there
  /// must be zeros.
  bool whole_chunks;
};

template <class Config>
struct Sm90Nvfp4Mainloop {
  using Shared = Sm90Nvfp4Shared<Config>;
  using Position = RingPosition<Config::kStages>;
  using Element = typename Config::Element;

  // ---- the producer: one thread ----

  // The CTAs of a cluster share out a stage's tokens by chunks of k, or, where a stage is one, by tokens.
  static constexpr bool kSharesChunks = Config::kCluster == 1 || Config::kChunks > 1;
  static constexpr int kLoadChunks = kSharesChunks ? Config::kChunks / Config::kCluster : 1;
  // Of one load: as much of the smallest tile as is this CTA's. Of several the CTAs take turns.
  static constexpr int kLoadTokens =
      kSharesChunks ? Config::kLeastTokens : Config::kLeastTokens / Config::kCluster;

  /// What the producer keeps of a tile. The smem addresses are of shared memory's own window.
  class Loader {
   public:
    CUTLASS_DEVICE Loader(Sm90Nvfp4Operands const& p, CUtensorMap const* map, Shared const& shared,
                          TileWork const& work, int rank)
        : map_(map),
          shared_(shared),
          rank_(rank),
          depth_chunks_(p.depth_chunks),
          whole_chunks_(p.whole_chunks),
          groups_(cute::max(0, cute::min(int{Config::kRowGroups}, p.row_chunks - work.first_chunk))),
          token_(work.token + (kSharesChunks ? 0 : rank * kLoadTokens)),
          tokens_(work.tokens),
          row_stride_(int64_t{p.depth_chunks} * Nvfp4Packing::kChunkBytes),
          weights_(work.weights + work.first_chunk * row_stride_) {}

    /// Arms the stage's barrier for everything that it will get, and fetches the weights.
    CUTLASS_DEVICE void weights(int stage, int step) const {
      int const chunks = cute::min(int{Config::kChunks}, depth_chunks_ - step * Config::kChunks);
      int const weight_bytes = chunks * Nvfp4Packing::kChunkBytes;
      int const token_bytes = (whole_chunks_ ? int{Config::kChunks} : chunks) * tokens_ * 128;
      uint32_t const full = shared_.full_at(stage);
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(full),
                   "r"(groups_ * weight_bytes + token_bytes)
                   : "memory");
      uint8_t const* from = weights_ + int64_t{step} * (Config::kChunks * Nvfp4Packing::kChunkBytes);
      uint32_t to = shared_.weights_at(stage);
      CUTLASS_PRAGMA_UNROLL
      for (int g = 0; g < Config::kRowGroups; ++g) {
        if (g < groups_) {
          copy(to, from, weight_bytes, full);
        }
        to += Config::kChunks * Nvfp4Packing::kChunkBytes;
        from += row_stride_;
      }
    }

    /// Fetches this CTA's part of the tokens, for every CTA of the cluster.
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
               (first + c) * Nvfp4Packing::kDepth, token_ + t, 0, stage);
        }
      }
    }

   private:
    CUTLASS_DEVICE void copy(uint32_t to, uint8_t const* from, int bytes, uint32_t full) const {
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
          "l"(from), "r"(bytes), "r"(full)
          : "memory");
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
      } else {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, "
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
    int groups_;          // chunks of rows that the weight has here
    int token_;           // first that this CTA loads
    int tokens_;          // of the tile
    int64_t row_stride_;  // bytes
    uint8_t const* weights_;
  };

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

  CUTLASS_DEVICE static void wait_empty(Shared const& shared, Position const& at) {
    wait(shared.empty_at(at.stage), at.phase ^ 1);
  }

  // ---- the consumers ----

  CUTLASS_DEVICE static void wait_full(Shared const& shared, Position const& at) {
    wait(shared.full_at(at.stage), at.phase);
  }

  /// This warp has read the stage. Every lane calls it.
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

  /// A thread's share of a chunk as it lies in shared memory.
  struct Raw {
    uint32_t words[4];
    uint32_t scales[2];  // of rows r and r + 8, for two blocks of 16 of k each

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

    /// The register operand of 16 of k.
    CUTLASS_DEVICE void decode(int k, Nvfp4Shifts const& shifts, uint32_t (&a)[4]) const {
      Nvfp4Decoder<Element>::decode(words[k], Nvfp4Packing::scale_bits(scales[k / 2], k), shifts, a);
    }
  };

  /// Where this thread finds its share of the first chunk of a stage.
  struct Share {
    uint32_t codes_at, scales_at;

    CUTLASS_DEVICE Share(Shared const& shared, int first_chunk) {
      uint32_t const thread = threadIdx.x % 128;
      uint32_t const chunk_at =
          shared.weights_at(0) + static_cast<uint32_t>(first_chunk * Nvfp4Packing::kChunkBytes);
      codes_at = chunk_at + thread * 16;
      scales_at = chunk_at + Nvfp4Packing::kCodeBytes + thread / 4 * 8;
    }

    CUTLASS_DEVICE void load(Raw& raw, int stage, int chunk) const {
      uint32_t const offset =
          static_cast<uint32_t>(stage * Config::kWeightBytes + chunk * Nvfp4Packing::kChunkBytes);
      raw.load(codes_at + offset, scales_at + offset);
    }
  };

  /// Chunks from the first of a warpgroup in step `step` to the end of k. Below kChunksPerGroup in the last
  /// step alone, where it may be negative. (Not clamped: ptxas 13.0 takes the predicate of the clamp for its
  /// opposite when the result is compared with the upper bound.)
  CUTLASS_DEVICE static int chunks_left(Sm90Nvfp4Operands const& p, int step, int depth_group) {
    return p.depth_chunks - step * Config::kChunks - depth_group * Config::kChunksPerGroup;
  }
};

}  // namespace cutlass_evt
