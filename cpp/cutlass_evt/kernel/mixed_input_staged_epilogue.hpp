// The general epilogue: sums go through shared memory, a slice of the tokens at a time. Afterwards a thread
// holds neighbouring columns of a row of D, and the sums of warpgroups that share rows have been added.
#pragma once

#include "cutlass_evt/mainloop/mixed_input_multiply.hpp"

namespace cutlass_evt {

/// A barrier among all consumer threads, named barrier 1. It orders their accesses to shared memory.
template <class Config>
CUTLASS_DEVICE void consumer_barrier() {
  cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, 1u);
}

/// Stages the accumulators of one tile through shared memory. Config is a MixedInputConfig; Accumulators are
/// the sums of one thread in the register layout of an m64 wgmma or an m16n8 mma.sync.
template <class Config, class Accumulators>
struct MixedInputStagedEpilogue {
  using Shared = MixedInputShared<Config>;
  static constexpr int kColumns = 8;  // columns of D that a thread finishes at a time

  /// The elements that a thread finishes: kColumns neighbouring columns of one row of D in each slice.
  struct Slot {
    int warp;     // its warp among the Config::kWarpsAcross warps with different rows
    int token;    // row of D within a slice
    int column;   // first column of D, counted from the CTA's first
    bool active;  // false: the slice has no element for this thread
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
  // Tokens of a slice that a thread finishes; they are 16 apart.
  static constexpr int kRounds = (Config::kTokenShare + 15) / 16;

  /// Calls take(token, sums, fetched) for the elements of this thread's slot in every slice: kRounds tokens
  /// at a time, of which `token` is the first. fetched[i] is what fetch(token + 16 i) returned; where there
  /// are several slices, fetch is called one slice ahead, to hide the latency of a load.
  template <class Fetch, class Take>
  CUTLASS_DEVICE static void for_each_slot(Shared const& shared, Accumulators& accumulators, Slot const& s,
                                           Fetch const& fetch, Take const& take) {
    // Registers cannot be indexed at run time: a loop that is not unrolled must select among all of them. The
    // loop over slices is unrolled by kInner as a compromise between code size and stores that are predicated
    // off.
    constexpr int kInner = kSlices % 4 == 0 ? 4 : kSlices;
    constexpr int kOuter = kSlices / kInner;
    constexpr int kBlocks = Config::kSliceTokens / 8;  // blocks of 8 tokens in a slice
    int const lane = static_cast<int>(threadIdx.x % 32);
    float* const mine =
        shared.slice(static_cast<int>(threadIdx.x / 32)) + lane % 4 * 2 * Config::kSliceStride + lane / 4;
    using Fetched = decltype(fetch(0));
    auto const fetch_slice = [&](Fetched(&to)[kRounds], int slice) {
      CUTLASS_PRAGMA_UNROLL
      for (int round = 0; round < kRounds; ++round) {
        to[round] = fetch(slice * Config::kSliceTokens + s.token + round * 16);
      }
    };
    Fetched ahead[kRounds];
    if (kSlices > 1) {
      fetch_slice(ahead, 0);
    }
    CUTLASS_PRAGMA_NO_UNROLL
    for (int outer = 0; outer < kOuter; ++outer) {
      CUTLASS_PRAGMA_UNROLL
      for (int inner = 0; inner < kInner; ++inner) {
        int const slice = outer * kInner + inner;
        Fetched fetched[kRounds];
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
        // The slice is complete in shared memory.
        sync_slice();
        if (s.active) {
          if (kSlices == 1) {
            fetch_slice(fetched, 0);
          }
          float sums[kRounds][kColumns];
          CUTLASS_PRAGMA_UNROLL
          for (int round = 0; round < kRounds; ++round) {
            sum_over_warps(shared, s, s.token + round * 16, sums[round]);
          }
          take(slice * Config::kSliceTokens + s.token, sums, fetched);
        }
        // The slice has been read and may be overwritten.
        sync_slice();
      }
    }
  }

  /// A barrier among the warps that write and read the same slice: all consumers where warpgroups share rows,
  /// otherwise the warp itself.
  CUTLASS_DEVICE static void sync_slice() {
    if constexpr (Config::kDepthGroups > 1) {
      consumer_barrier<Config>();
    } else {
      __syncwarp();
    }
  }

  /// sums = the kColumns elements of one token, added over the warps that share the rows in a fixed order.
  CUTLASS_DEVICE static void sum_over_warps(Shared const& shared, Slot const& s, int token,
                                            float (&sums)[kColumns]) {
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
