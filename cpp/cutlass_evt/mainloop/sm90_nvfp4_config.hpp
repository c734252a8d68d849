// What a kernel on prepacked NVFP4 weights is made of on SM90, and how its shared memory is laid out.
#pragma once

#include "cute/arch/util.hpp"
#include "cute/numeric/math.hpp"
#include "cutlass_evt/mainloop/nvfp4_packing.hpp"

namespace cutlass_evt {

/// Where a tile lies.
struct Sm90Nvfp4Place {
  /// Rows of X of one group.
  struct Rows {
    int begin, size;
  };

  int group;
  int row_tile;  // of the cluster
  int token;     // first of the tile, within the group
  Rows rows;
};

/// What the producer tells the consumers about a tile or a part of it along k; after the last: one of no
/// steps.
struct Sm90Nvfp4Task {
  Sm90Nvfp4Place place;
  int begin, end;  // steps of k
  int worker;
  int others;  // workers after this one that have the tile's further parts

  CUTLASS_HOST_DEVICE bool is_none() const { return end == 0; }
};

/// What a kernel is made of.
///
/// kRowGroups: chunks of 64 rows in a CTA, each a warpgroup's. kDepthGroups: warpgroups that share rows and
/// take turns along k. kTokens: of the tile. kCluster: CTAs along the rows that load each other's tokens by
/// multicast. kChunks: of 64 of k, in a stage. kCtasPerSm: sets how much shared memory and how many registers
/// a CTA may use.
template <class Element_, int RowGroups, int DepthGroups, int Tokens, int ClusterSize, int Chunks,
          int CtasPerSm>
struct Sm90Nvfp4Config {
  using Element = Element_;  // of the tokens, and of the decoded weights
  static constexpr int kRowGroups = RowGroups;
  static constexpr int kDepthGroups = DepthGroups;
  static constexpr int kTokens = Tokens;
  static constexpr int kCluster = ClusterSize;
  static constexpr int kChunks = Chunks;
  static constexpr int kCtasPerSm = CtasPerSm;

  static constexpr int kRows = 64 * kRowGroups;  // of a CTA
  static constexpr int kDepth = 64 * kChunks;    // of a stage
  static constexpr int kChunksPerGroup = kChunks / kDepthGroups;
  static constexpr bool kSharesRows = kDepthGroups > 1;  // among warpgroups
  static constexpr bool kUsesWgmma = kTokens > 8;        // else mma.sync
  static constexpr int kWarpsAcross = 4 * kRowGroups;    // side by side along the rows
  static constexpr int kConsumerGroups = kRowGroups * kDepthGroups;
  static constexpr int kConsumerThreads = 128 * kConsumerGroups;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  // The accumulators of the widest tiles need more registers than an equal share: a whole producer warpgroup
  // then gives its own away.
  static constexpr bool kMovesRegisters = kTokens >= 256;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);

  // The last of a group's tiles may be smaller: fewer tokens are loaded and multiplied. Of 32 these are
  // blocks of 8, of 256 they are 64 or 128. Tiles of 128, and of 32 with 64 rows, lose more by several
  // loads than by tokens that are not there.
  static constexpr int kLeastTokens = kTokens == 32 && kRowGroups > 1 ? 8 : kTokens < 256 ? kTokens : 64;
  CUTLASS_HOST_DEVICE static constexpr int tokens_for(int present) {
    int tokens = kLeastTokens;
    while (tokens < kTokens && tokens < present) {
      tokens += kTokens <= 32 ? kLeastTokens : tokens;
    }
    return tokens;
  }

  // Of two workers that share a tile along k, the one that adds up has so much more of it: about as long as
  // the other's sums take to arrive.
  static constexpr int kLeadSteps = (kRowGroups == 1 ? 1024 : 512) / kDepth;

  static constexpr int kWeightBytes = kRowGroups * kChunks * Nvfp4Packing::kChunkBytes;  // of a stage
  // Block after block of kLeastTokens tokens, and of a block chunk after chunk of k.
  static constexpr int kTokenChunkBytes = kLeastTokens * 128;
  static constexpr int kTokenBytes = kChunks * kTokens * 128;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;

  // The epilogue turns accumulators round through shared memory: a warp holds 16 rows, a slice of the tokens
  // at a time. Warpgroups that share rows add up there, all tokens at once, and share these out.
  static constexpr int kSliceTokens = kSharesRows ? kTokens : cute::min(32, kTokens / 2);
  static constexpr int kSliceStride = 20;  // floats from one token to the next: 16 rows and a pad
  static constexpr int kTokenShare = (kSliceTokens + kDepthGroups - 1) / kDepthGroups;
  // Where they do not, the usual epilogue stages 16-bit results there instead, 64 columns a warpgroup, where
  // there is more than one slice in one of two places in turn; and the rows' and columns' terms.
  static constexpr int kDirectTokens = kTokens < 64 ? 16 : 64;
  static constexpr int kDirectBuffers = kTokens > kDirectTokens ? 2 : 1;
  static constexpr int kStagedBytes = kDirectBuffers * kDirectTokens * 128;  // of a warpgroup
  // ... who each have the terms to themselves; warpgroups that share rows all have the same.
  static constexpr int kTermColumns = kSharesRows ? 64 * kRowGroups : 64;
  static constexpr int kTermBytes = (kTokens + 2 * kTermColumns) * 4;
  static constexpr int kDirectBytes = kStagedBytes + kTermBytes;
  static constexpr int kSlicesBytes = kConsumerWarps * kSliceTokens * kSliceStride * 4;
  static constexpr int kSliceBytes =
      kSharesRows ? kSlicesBytes + kTermBytes : cute::max(kSlicesBytes, kConsumerGroups* kDirectBytes);

  static constexpr int kMaxTable = 1024;  // groups, or runs of groups, whose first tiles are in shared memory
  static constexpr int kTableBytes = (kMaxTable + 1 + 32) * 4;

  static constexpr int kSharedLimit = kCtasPerSm == 1 ? 232448 : 233472 / kCtasPerSm - 1024;
  static constexpr int kFixedBytes = kSliceBytes + kTableBytes + 1024;  // 1024: barriers, tasks
  static constexpr int kStages = (kSharedLimit - kFixedBytes - 1024) / kStageBytes;
  // Weights that are fetched before the tokens may be: a multiprocessor's copies queue up, so that tokens
  // behind more of them come late.
  static constexpr int kAheadStages = cute::min(kStages, cute::max(2, 36864 / kWeightBytes));
  // One in the epilogue, one in every stage, and the producer may be writing another.
  static constexpr int kTasks = kStages + 2;
  static constexpr int kSharedBytes = kStages * kStageBytes + kFixedBytes + 1024;  // 1024: alignment

  static_assert(kChunks % kDepthGroups == 0, "every warpgroup along k takes as many chunks of a stage");
  static_assert(!kUsesWgmma || kChunksPerGroup == 1 || kChunksPerGroup % 2 == 0, "chunks are taken in pairs");
  static_assert(!kSharesRows || kTokens <= 32, "warpgroups that share rows add up all tokens at once");
  static_assert(kSharesRows || (kTokens >= 32 && kTokens % kDirectTokens == 0),
                "warpgroups with rows of their own have 32 tokens or more, in whole slices");
  static_assert(kTokens % (8 * kCluster) == 0, "a CTA of a cluster loads whole swizzle atoms of tokens");
  static_assert(kLeastTokens == 8 || kLeastTokens == kTokens || kChunks == 1,
                "wgmma takes tokens in blocks of 8 or all of a chunk, one after the other");
  static_assert(kStages >= 3, "too few stages fit in shared memory");
  static_assert(kStages * 16 + kTasks * (8 + sizeof(Sm90Nvfp4Task)) <= 1024,
                "barriers and tasks need more room");
};

/// Shared memory, by offsets from a 1024-byte boundary.
template <class Config>
struct Sm90Nvfp4Shared {
  char* base;
  uint32_t address;  // of base

  CUTLASS_DEVICE explicit Sm90Nvfp4Shared(char* dynamic)
      : base(dynamic + (1024 - cute::cast_smem_ptr_to_uint(dynamic) % 1024) % 1024),
        address(cute::cast_smem_ptr_to_uint(base)) {
    asm volatile("" : "+r"(address));  // or it would be found anew in every turn of the mainloop
  }

  CUTLASS_DEVICE uint32_t tokens_at(int stage) const {
    return address + static_cast<uint32_t>(stage * Config::kTokenBytes);
  }
  CUTLASS_DEVICE uint32_t weights_at(int stage) const {
    return address +
           static_cast<uint32_t>(Config::kStages * Config::kTokenBytes + stage * Config::kWeightBytes);
  }
  CUTLASS_DEVICE uint32_t full_at(int stage) const {
    return address + static_cast<uint32_t>(Config::kStages * Config::kStageBytes + stage * 8);
  }
  CUTLASS_DEVICE uint32_t empty_at(int stage) const { return full_at(Config::kStages + stage); }

  CUTLASS_DEVICE char* rest() const { return base + Config::kStages * Config::kStageBytes; }
  CUTLASS_DEVICE uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(rest()) + stage; }
  CUTLASS_DEVICE uint64_t* empty(int stage) const { return full(Config::kStages + stage); }
  /// Tasks have a ring of their own, whose slots are free when the ring of stages lets the producer on.
  CUTLASS_DEVICE uint64_t* told(int slot) const { return full(2 * Config::kStages + slot); }
  CUTLASS_DEVICE uint32_t told_at(int slot) const { return full_at(2 * Config::kStages + slot); }
  CUTLASS_DEVICE Sm90Nvfp4Task* task(int slot) const {
    return reinterpret_cast<Sm90Nvfp4Task*>(told(Config::kTasks)) + slot;
  }
  /// Of one consumer warp.
  CUTLASS_DEVICE float* slice(int warp) const {
    return reinterpret_cast<float*>(rest() + 1024) + warp * Config::kSliceTokens * Config::kSliceStride;
  }
  /// Of one warpgroup: what the usual epilogue stages.
  CUTLASS_DEVICE uint32_t staged_at(int group) const {
    return address +
           static_cast<uint32_t>(Config::kStages * Config::kStageBytes + 1024 + group * Config::kDirectBytes);
  }
  /// Of one warpgroup or, where they share rows, of all: the terms, one of each row of D and two of each
  /// column.
  CUTLASS_DEVICE float* terms(int group) const {
    return reinterpret_cast<float*>(
        rest() + 1024 +
        (Config::kSharesRows ? Config::kSlicesBytes : group * Config::kDirectBytes + Config::kStagedBytes));
  }
  CUTLASS_DEVICE int* table() const { return reinterpret_cast<int*>(rest() + 1024 + Config::kSliceBytes); }
};

}  // namespace cutlass_evt
