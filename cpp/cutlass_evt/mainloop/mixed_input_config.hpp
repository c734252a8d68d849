// The static configuration of the mixed-input kernel, on prepacked NVFP4 weights, what its producer hands to
// its consumers, and the layout of its shared memory. What an architecture has is a parameter: the Machine of
// sm90_nvfp4_config.hpp or sm120_nvfp4_config.hpp.
#pragma once

#include "cute/arch/util.hpp"
#include "cute/numeric/math.hpp"
#include "cutlass/bfloat16.h"
#include "cutlass/float8.h"
#include "cutlass/half.h"
#include "cutlass_evt/epilogue/arguments.hpp"
#include "cutlass_evt/mainloop/nvfp4_fp8_packing.hpp"
#include "cutlass_evt/mainloop/nvfp4_packing.hpp"

namespace cutlass_evt {

/// The coordinate of an output tile: a group, weight rows (columns of D) and tokens (rows of D).
struct MixedInputTileCoord {
  /// The rows of X and D of one group.
  struct Rows {
    int begin, size;
  };

  int group;
  int row_tile;  // index of the cluster's tile along the rows of the weight
  int token;     // first token of the tile, counted from the group's first
  Rows rows;     // of the group
};

/// A work item: a tile, or for stream-K a part of it along k. The producer publishes each one to the
/// consumers through shared memory, and after the last one an item without steps.
struct MixedInputWorkItem {
  MixedInputTileCoord coord;
  int begin, end;       // stages along k
  int worker;           // the CTA's, or its cluster's, number in the schedule
  int num_other_parts;  // of a tile's first part: workers after this one that have the others

  CUTLASS_HOST_DEVICE bool is_last() const { return end == 0; }
};

/// How weights are prepacked for tokens of a type. A chunk of the weights has as many elements along k as 128
/// bytes of a token, so that everything that counts chunks is the same for all types.
template <class Element>
struct MixedInputPacking;
template <>
struct MixedInputPacking<cutlass::half_t> {
  using Type = Nvfp4Packing;
};
template <>
struct MixedInputPacking<cutlass::bfloat16_t> {
  using Type = Nvfp4Packing;
};
template <>
struct MixedInputPacking<cutlass::float_e4m3_t> {
  using Type = Nvfp4Fp8Packing;
};

/// The configuration of a kernel.
///
/// Element      fp16, bf16 or e4m3: the type of the tokens and of the decoded weights
/// RowGroups    warpgroups side by side along the weight rows of a CTA, 64 rows each
/// DepthGroups  warpgroups that share their rows and split the chunks of each stage along k between them
/// Tokens       tokens of a tile
/// ClusterSize  CTAs of a cluster. They lie side by side along the weight rows and have the same tokens: each
///              loads a part of them and multicasts it to all
/// Chunks       chunks along k in a stage, of 64 elements, or of 128 if they are e4m3
/// CtasPerSm    CTAs that share an SM, which bounds the shared memory and the registers of each
/// Machine      what the architecture has: a type with the members of Sm90Nvfp4Machine
/// PartTokens   0, or the sums of the tensor cores are promoted: added to others in fp32 after one or two
///              chunks, so many tokens at a time, whose sums have registers of their own until then. The FP8
///              tensor cores of SM90 keep about 14 bits of a sum; those for fp16 and bf16 need no promotion
template <class Element_, int RowGroups, int DepthGroups, int Tokens, int ClusterSize, int Chunks,
          int CtasPerSm, class Machine, int PartTokens = 0>
struct MixedInputConfig {
  using Element = Element_;
  using Packing = typename MixedInputPacking<Element>::Type;
  static constexpr int kRowGroups = RowGroups;
  static constexpr int kDepthGroups = DepthGroups;
  static constexpr int kTokens = Tokens;
  static constexpr int kCluster = ClusterSize;
  static constexpr bool kHasClusters = Machine::kHasClusters;
  static constexpr int kChunks = Chunks;
  static constexpr int kCtasPerSm = CtasPerSm;

  static constexpr int kRows = 64 * kRowGroups;             // weight rows of a CTA
  static constexpr int kDepth = Packing::kDepth * kChunks;  // extent of a stage along k
  static constexpr int kChunksPerGroup = kChunks / kDepthGroups;
  static constexpr bool kSharesRows = kDepthGroups > 1;  // several warpgroups have the same rows
  static constexpr bool kUsesWgmma = Machine::kHasWgmma && kTokens > 8;  // otherwise mma.sync
  static constexpr int kWarpsAcross = 4 * kRowGroups;  // consumer warps with different rows, 16 each
  static constexpr int kConsumerGroups = kRowGroups * kDepthGroups;
  static constexpr int kConsumerThreads = 128 * kConsumerGroups;
  static constexpr int kConsumerWarps = kConsumerThreads / 32;
  static constexpr bool kPromotes = PartTokens > 0;
  static constexpr int kPartTokens = kPromotes ? PartTokens : kTokens;
  // Tiles of few tokens have registers for the sums of two chunks: those of one are added while the next one
  // is in the tensor cores. In wider tiles each part is multiplied by two chunks and then added, and the
  // wgmmas of the other warpgroup fill the time.
  static constexpr bool kAlternates = kPromotes && kTokens <= 64;
  // The accumulators of the widest tiles need more registers than an equal share of the register file. The
  // producer is then a whole warpgroup, since setmaxnreg moves the registers of whole warpgroups.
  static constexpr bool kMovesRegisters = kUsesWgmma && (kTokens >= 256 || (kPromotes && !kAlternates));
  static constexpr int kProducerRegisters = sizeof(Element) == 1 ? 40 : 56;
  static constexpr int kConsumerRegisters = sizeof(Element) == 1 ? 232 : 224;
  static constexpr int kThreads = kConsumerThreads + (kMovesRegisters ? 128 : 32);

  // The last tile of a group may hold fewer tokens than kTokens. kLeastTokens is the unit by which fewer are
  // loaded and multiplied. With wgmma these are blocks of 8 for tiles of 32 tokens by 128 rows, and 64 or 128
  // for tiles of 256; the other tiles are always whole, since several loads cost them more than tokens that
  // are not there. With mma.sync a tile is whole or half.
  static constexpr int kLeastTokens = !kUsesWgmma                       ? cute::max(8, kTokens / 2)
                                      : kTokens == 32 && kRowGroups > 1 ? 8
                                      : kTokens < 256                   ? kTokens
                                                                        : 64;
  /// Tokens that a tile loads if `present` of them exist.
  CUTLASS_HOST_DEVICE static constexpr int tokens_for(int present) {
    int tokens = kLeastTokens;
    while (tokens < kTokens && tokens < present) {
      tokens += kTokens <= 32 ? kLeastTokens : tokens;
    }
    return tokens;
  }

  // False: the tokens are fp16 or bf16 in global memory and the ring has a slot for them in every stage.
  // True: see MixedInputQuantizingConfig.
  static constexpr bool kQuantizes = false;

  // Where two workers share a tile along k, the one that sums the parts gets this many stages more than the
  // other: about the time that the other's sums take to arrive.
  static constexpr int kLeadSteps = (kRowGroups == 1 ? 1024 : 512) / kDepth;

  // Dense tiles are numbered so that up to 2048 tokens are multiplied by the same rows at about the same
  // time, which then read the rows from L2. (The tiles of fp16 and bf16 tokens are numbered along the rows.)
  static constexpr int kTogether = sizeof(Element) == 1 && kTokens >= 128 ? 2048 / kTokens : 1;

  // A stage holds the weights, row group after row group, and the tokens: block after block of kLeastTokens
  // tokens, within a block chunk after chunk of k, within a chunk 128 bytes for each token.
  static constexpr int kWeightBytes = kRowGroups * kChunks * Packing::kChunkBytes;
  static constexpr int kTokenChunkBytes = kLeastTokens * 128;
  static constexpr int kTokenBytes = kChunks * kTokens * 128;
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;

  // Five stages of the widest e4m3 tile fit in shared memory only beside a small epilogue.
  static constexpr bool kSavesMemory = sizeof(Element) == 1 && kTokens >= 192;

  // The staged epilogue transposes accumulators through shared memory: 16 rows of a warp by a slice of the
  // tokens at a time. Warpgroups that share rows also add their sums there: then a slice has all tokens of
  // the tile, and each warpgroup finishes its share of them.
  static constexpr int kSliceTokens = kSharesRows                          ? kTokens
                                      : kTokens % 32 == 0 && !kSavesMemory ? cute::min(32, kTokens / 2)
                                                                           : 16;
  static constexpr int kSliceStride = 20;  // floats from one token to the next: 16 rows and padding
  static constexpr int kTokenShare = (kSliceTokens + kDepthGroups - 1) / kDepthGroups;
  // The direct epilogue, of warpgroups that do not share rows, uses the same memory for 16-bit results: 64
  // columns of a slice of the tokens for each warpgroup, in two buffers in turn where there are several
  // slices.
  static constexpr int kDirectTokens = kTokens < 64 || kTokens % 32 != 0    ? 16
                                       : kTokens % 64 == 0 && !kSavesMemory ? 64
                                                                            : 32;
  static constexpr int kDirectBuffers = kTokens > kDirectTokens && !kSavesMemory ? 2 : 1;
  static constexpr int kStagedResultsBytes = kDirectBuffers * kDirectTokens * 128;  // each warpgroup's
  // Behind them lie the epilogue's vectors: one copy for each warpgroup, or one for all that share rows.
  static constexpr int kVectorColumns = kSharesRows ? 64 * kRowGroups : 64;
  static constexpr int kVectorBytes = (kTokens * kNumRowVectors + kVectorColumns * kNumColumnVectors) * 4;
  static constexpr int kDirectBytes = kStagedResultsBytes + kVectorBytes;
  static constexpr int kStagedSumsBytes = kConsumerWarps * kSliceTokens * kSliceStride * 4;
  static constexpr int kSliceBytes = kSharesRows ? kStagedSumsBytes + kVectorBytes
                                                 : cute::max(kStagedSumsBytes, kConsumerGroups* kDirectBytes);

  // The table of MixedInputGroups: one entry for each group or run of groups and one for the total, then a
  // sum for each warp.
  static constexpr int kMaxTable = 1024;
  static constexpr int kTableBytes = (kMaxTable + 1 + 32) * 4;

  static constexpr int kSharedLimit =
      kCtasPerSm == 1 ? Machine::kSharedPerCta : Machine::kSharedPerSm / kCtasPerSm - 1024;
  // 1024: mbarriers and work items
  static constexpr int kFixedBytes = kSliceBytes + kTableBytes + 1024 + Packing::kTableBytes;
  // No more stages than have room for their mbarriers, and for their work items and two more.
  static constexpr int kItemBytes = 8 + static_cast<int>(sizeof(MixedInputWorkItem));
  static constexpr int kStages = cute::min((kSharedLimit - kFixedBytes - 1024) / kStageBytes,
                                           (1024 - 2 * kItemBytes) / (16 + kItemBytes));
  // Stages whose weights are requested before the tokens may be read. No more than 36 KB: the copies of an SM
  // are served in order, and tokens behind a longer queue would arrive late.
  static constexpr int kPrefetchStages = cute::min(kStages, cute::max(2, 36864 / kWeightBytes));
  // Work items in flight: one in the epilogue, one in every stage at most, and one that the producer writes.
  static constexpr int kWorkItems = kStages + 2;
  static constexpr int kSharedBytes = kStages * kStageBytes + kFixedBytes + 1024;  // 1024: alignment

  static_assert(kChunks % kDepthGroups == 0,
                "warpgroups that share rows have the same number of chunks of a stage");
  static_assert(!kUsesWgmma || kChunksPerGroup == 1 || kChunksPerGroup % 2 == 0,
                "the loop over chunks is unrolled by two");
  static_assert(sizeof(Element) == 2 || kUsesWgmma, "mma.sync of SM90 converts e4m3 to fp16");
  static_assert(!kPromotes || kChunksPerGroup == 1,
                "ptxas serialises the wgmmas of the promoted loop over the chunks of a stage");
  static_assert(!kSharesRows || kTokens <= 64,
                "warpgroups that share rows add the sums of all tokens of the tile at once");
  static_assert(kSharesRows || (kTokens >= 32 && kTokens % kDirectTokens == 0),
                "warpgroups that do not share rows need 32 tokens or more, in whole slices");
  static_assert(kHasClusters || kCluster == 1, "the architecture has no clusters");
  static_assert(kTokens % (8 * kCluster) == 0, "a CTA of a cluster loads whole swizzle atoms of tokens");
  static_assert(!kUsesWgmma || kLeastTokens == 8 || kLeastTokens == kTokens || kChunks == 1,
                "wgmma reads blocks of 8 tokens, or all tokens of one chunk");
  static_assert(kStages >= 3, "too few stages fit in shared memory");
  static_assert(kStages * 16 + kWorkItems * (8 + sizeof(MixedInputWorkItem)) <= 1024,
                "mbarriers and work items do not fit in their 1024 bytes");
};

/// The configuration of the kernel that quantizes the tokens itself, for products of one tile of tokens. The
/// memory that the stages of Config have for tokens holds the decoded tokens of all of k instead: token after
/// token, each as chunks of 64 along k, 128 bytes in the order of the 128-byte swizzle for row `token`. The
/// producer loads weights alone.
template <class Config>
struct MixedInputQuantizingConfig : Config {
  static_assert(!Config::kUsesWgmma && Config::kCluster == 1, "the consumers must be those of mma.sync");
  static constexpr bool kQuantizes = true;
  // Up to 36 KB, even where this is one stage: the consumers request the tokens as soon as the previous
  // kernel has ended, and whatever was requested before delays them.
  static constexpr int kPrefetchStages = cute::max(1, 36864 / Config::kWeightBytes);
  static constexpr int kMostTokenBytes = Config::kStages * Config::kTokenBytes;  // of all tokens

  CUTLASS_HOST_DEVICE static constexpr int tokens_for(int present) { return present; }
  /// Bytes of one token.
  CUTLASS_HOST_DEVICE static constexpr int token_stride(int depth_chunks) { return depth_chunks * 128; }
};

/// The dynamic shared memory of a CTA, by offsets from a 1024-byte boundary, the period of the 128-byte
/// swizzle. In this order: the decoder's table, the tokens of all stages, the weights of all stages, 1024
/// bytes of mbarriers and work items, the epilogue's memory, and the table of groups. Config is a
/// MixedInputConfig.
///
/// Functions that end in _at return addresses in the shared window, for inline PTX; the others pointers.
template <class Config>
struct MixedInputShared {
  static constexpr int kStagesAt = Config::Packing::kTableBytes;
  static constexpr int kRestAt = kStagesAt + Config::kStages * Config::kStageBytes;

  char* base;
  uint32_t address;  // of base

  CUTLASS_DEVICE explicit MixedInputShared(char* dynamic)
      : base(dynamic + (1024 - cute::cast_smem_ptr_to_uint(dynamic) % 1024) % 1024),
        address(cute::cast_smem_ptr_to_uint(base)) {
    // Hides how the address was computed, or the compiler would compute it again in every turn of the
    // mainloop.
    asm volatile("" : "+r"(address));
  }

  /// The table of the decoder, if it has one: at a multiple of 1024, its greatest size.
  CUTLASS_DEVICE uint32_t decoder_at() const { return address; }

  CUTLASS_DEVICE char* tokens() const { return base + kStagesAt; }  // of the first stage
  CUTLASS_DEVICE uint32_t tokens_at(int stage) const {
    return address + static_cast<uint32_t>(kStagesAt + stage * Config::kTokenBytes);
  }
  CUTLASS_DEVICE uint32_t weights_at(int stage) const {
    return address + static_cast<uint32_t>(kStagesAt + Config::kStages * Config::kTokenBytes +
                                           stage * Config::kWeightBytes);
  }
  // full: the stage has been filled. empty: it has been read by all consumers of the cluster.
  CUTLASS_DEVICE uint32_t full_at(int stage) const {
    return address + static_cast<uint32_t>(kRestAt + stage * 8);
  }
  CUTLASS_DEVICE uint32_t empty_at(int stage) const { return full_at(Config::kStages + stage); }

  CUTLASS_DEVICE char* rest() const { return base + kRestAt; }
  CUTLASS_DEVICE uint64_t* full(int stage) const { return reinterpret_cast<uint64_t*>(rest()) + stage; }
  CUTLASS_DEVICE uint64_t* empty(int stage) const { return full(Config::kStages + stage); }
  // Work items have a ring of their own. It needs no mbarrier for free slots: before the producer reuses a
  // slot, the ring of stages has made it wait for the consumers of the item in it.
  CUTLASS_DEVICE uint64_t* published(int slot) const { return full(2 * Config::kStages + slot); }
  CUTLASS_DEVICE uint32_t published_at(int slot) const { return full_at(2 * Config::kStages + slot); }
  CUTLASS_DEVICE MixedInputWorkItem* work_item(int slot) const {
    return reinterpret_cast<MixedInputWorkItem*>(published(Config::kWorkItems)) + slot;
  }
  /// A warp's slice of sums in the staged epilogue.
  CUTLASS_DEVICE float* slice(int warp) const {
    return reinterpret_cast<float*>(rest() + 1024) + warp * Config::kSliceTokens * Config::kSliceStride;
  }
  /// A warpgroup's results in the direct epilogue.
  CUTLASS_DEVICE uint32_t staged_at(int group) const {
    return address + static_cast<uint32_t>(kRestAt + 1024 + group * Config::kDirectBytes);
  }
  /// The epilogue's vectors of a warpgroup or, where warpgroups share rows, of all; see
  /// MixedInputEpilogueVectors.
  CUTLASS_DEVICE float* vectors(int group) const {
    return reinterpret_cast<float*>(rest() + 1024 +
                                    (Config::kSharesRows
                                         ? Config::kStagedSumsBytes
                                         : group * Config::kDirectBytes + Config::kStagedResultsBytes));
  }
  CUTLASS_DEVICE int* table() const { return reinterpret_cast<int*>(rest() + 1024 + Config::kSliceBytes); }
};

}  // namespace cutlass_evt
