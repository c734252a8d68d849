// The epilogue that serves everything: sums go through shared memory, a slice of the tokens at a time, so
// that a thread comes to hold neighbouring columns of a row of D, and warps that share rows add up.
#pragma once

#include "cutlass_evt/mainloop/sm90_nvfp4_multiply.hpp"

namespace cutlass_evt {

/// Among all consumers.
template <class Config>
CUTLASS_DEVICE void consumer_barrier() {
  cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, 1u);
}

template <class Config, class Accumulators>
struct Sm90Nvfp4Slices {
  using Shared = Sm90Nvfp4Shared<Config>;
  static constexpr int kColumns = 8;  // of D, that a thread of the epilogue holds

  /// What a thread of the epilogue holds: kColumns neighbouring columns of one row of D.
  struct Slot {
    int warp;    // of the warps that share rows
    int token;   // within a slice
    int column;  // within the CTA's rows of the weight
    bool active;
  };

  CUTLASS_DEVICE static Slot slot() {
    int const lane = static_cast<int>(threadIdx.x % 32);
    int const warp = static_cast<int>(threadIdx.x / 32) % Config::kWarpsAcross;
    int const depth_group = static_cast<int>(threadIdx.x / 32) / Config::kWarpsAcross;
    Slot s;
    s.warp = warp;
    s.token = depth_group * Config::kTokenShare + lane / 2;
    s.column = warp * 16 + lane % 2 * kColumns;
    s.active = lane / 2 < Config::kTokenShare && s.token < Config::kSliceTokens;
    return s;
  }

  static constexpr int kSlices = Config::kTokens / Config::kSliceTokens;
  // Tokens of a slice that a thread comes to, 16 apart.
  static constexpr int kRounds = (Config::kTokenShare + 15) / 16;

  /// take(token, sums, fetched) for the tokens of each slice that this thread's slot comes to, kRounds of
  /// them at a time, the first being `token`; fetched is what fetch(token) gave, where there is more than one
  /// slice a slice earlier.
  template <class Fetch, class Take>
  CUTLASS_DEVICE static void for_each_slot(Shared const& shared, Accumulators& accumulators, Slot const& s,
                                           Fetch const& fetch, Take const& take) {
    // Registers cannot be indexed. The loop over slices is partly unrolled, as a compromise between its size
    // and stores that are skipped.
    constexpr int kInner = kSlices > 4 ? 4 : kSlices;
    constexpr int kOuter = kSlices / kInner;
    constexpr int kBlocks = Config::kSliceTokens / 8;  // of 8 tokens, in a slice
    int const lane = static_cast<int>(threadIdx.x % 32);
    float* const mine =
        shared.slice(static_cast<int>(threadIdx.x / 32)) + lane % 4 * 2 * Config::kSliceStride + lane / 4;
    auto const fetch_slice = [&](float (&to)[kRounds], int slice) {
      CUTLASS_PRAGMA_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        to[round] = fetch(slice * Config::kSliceTokens + s.token + round * 16);
      }
    };
    float ahead[kRounds];
    if (kSlices > 1) {
      fetch_slice(ahead, 0);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int outer = 0; outer < kOuter; ++outer) {
      CUTLASS_PRAGMA_UNROLL
      for (int inner = 0; inner < kInner; ++inner) {
        int const slice = outer * kInner + inner;
        float fetched[kRounds];
        if (kSlices > 1) {
          CUTLASS_PRAGMA_UNROLL
          for (int round = 0; round < kRounds; ++round) {
            fetched[round] = ahead[round];
          }
          fetch_slice(ahead, slice + 1);
        }
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kOuter; ++i) {
          if (i == outer) {
            CUTLASS_PRAGMA_UNROLL
            for (int block = 0; block < kBlocks; ++block) {
              CUTLASS_PRAGMA_UNROLL
              for (int v = 0; v < 4; ++v) {
                mine[(block * 8 + v % 2) * Config::kSliceStride + v / 2 * 8] =
                    accumulators[((i * kInner + inner) * kBlocks + block) * 4 + v];
              }
            }
          }
        }
        sync_slice();
        if (s.active) {
          if (kSlices == 1) {
            fetch_slice(fetched, 0);
          }
          float sums[kRounds][kColumns];
          CUTLASS_PRAGMA_UNROLL
          for (int round = 0; round < kRounds; ++round) {
            add_up(shared, s, s.token + round * 16, sums[round]);
          }
          take(slice * Config::kSliceTokens + s.token, sums, fetched);
        }
        sync_slice();
      }
    }
  }

  /// Among the warps that write and read the same slices.
  CUTLASS_DEVICE static void sync_slice() {
    if constexpr (Config::kDepthGroups > 1) {
      consumer_barrier<Config>();
    } else {
      __syncwarp();
    }
  }

  /// The sums of one token over the warps that share its rows.
  CUTLASS_DEVICE static void add_up(Shared const& shared, Slot const& s, int token, float (&sums)[kColumns]) {
    CUTLASS_PRAGMA_UNROLL
    for (int d = 0; d < Config::kDepthGroups; ++d) {
      float const* const from =
          shared.slice(s.warp + d * Config::kWarpsAcross) + token * Config::kSliceStride + s.column % 16;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; i += 4) {
        float4 const four = *reinterpret_cast<float4 const*>(from + i);
        float const values[4] = {four.x, four.y, four.z, four.w};
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < 4; ++j) {
          sums[i + j] = d == 0 ? values[j] : sums[i + j] + values[j];
        }
      }
    }
  }
};

}  // namespace cutlass_evt
