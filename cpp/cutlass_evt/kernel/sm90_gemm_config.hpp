// The arguments and the static sizes of SM90's GEMM of two operands that its tensor cores read as they are.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass_evt/epilogue/arguments.hpp"

namespace cutlass_evt {

/// The arguments of the kernel. A "matrix" is one of the parts of B that groups have, and a "plane" one of
/// the parts of D: groups that are ragged in m have a matrix each and share the only plane, groups that are
/// ragged in k have a plane each and share the only matrix, and a dense product has one of both.
struct Sm90GemmParams {
  CUtensorMap a;      // (k, m) with boxes of Config::kDepth by the rows of a tile
  CUtensorMap few_a;  // the same with boxes of Config::kFewRows rows
  CUtensorMap b;      // (k, n, matrices) with boxes of Config::kDepth by the columns that a CTA loads
  CUtensorMap d;      // (columns of D, m, planes) with boxes of one slice
  int m, n;           // of the product; m are the rows of A and of a plane
  int columns_of_d;   // n, or n / 2 if the activation is gated
  int num_groups;     // 1 for a dense product
  int const* offs;    // (num_groups) cumulative ends of the groups, on the device; null: dense
  int steps;          // k in steps of Config::kDepth
  int group_steps;    // ragged k: each group begins at a multiple of so many steps
  int row_tiles;      // of a plane, for a whole cluster
  int column_tiles;
  EpilogueArguments epilogue;
};

/// Where a tile of one CTA lies, and which part of k it sums.
struct Sm90GemmTile {
  int group;   // of the vectors
  int matrix;  // of B
  int plane;   // of D
  int row;     // the first of the tile, a row of A and of the plane
  int column;  // the first of the tile, a column of the product
  int end;     // the row behind the last one of the group; at most `row` if the tile has no rows
  int first_step;
  int steps;
};

/// The static sizes. Element is the type of the operands. Tile must have:
///   kRows, kColumns  of a tile of one CTA
///   kCluster         the CTAs of a cluster, which lie side by side along the rows and share a tile of B
///   kCtasPerSm       the CTAs that run on an SM at a time
///   kStages          of the mainloop
///   kSliceRowBytes   of a slice, explained below
///   kSlots           for slices, explained below
template <class Element_, class Tile>
struct Sm90GemmConfig {
  using Element = Element_;
  static constexpr int kRows = Tile::kRows;
  static constexpr int kColumns = Tile::kColumns;
  static constexpr int kRowBytes = 128;  // of an operand in a stage, the width of the swizzle
  static constexpr int kDepth = kRowBytes / static_cast<int>(sizeof(Element));  // of a stage
  static constexpr int kCluster = Tile::kCluster;
  static constexpr int kConsumerGroups = kRows / 64;  // warpgroups
  static constexpr int kConsumerWarps = kConsumerGroups * 4;
  static constexpr int kThreads = (kConsumerGroups + 1) * 128;
  static constexpr int kCtasPerSm = Tile::kCtasPerSm;
  static constexpr int kStages = Tile::kStages;
  // Tiles with so few rows load no more of A: TMA needs longer for rows beyond the end of A than for others.
  // The other rows of the stage hold what was there before, and reach no row of D that exists.
  static constexpr int kFewRows = 16;
  static constexpr int kLoadColumns = kColumns / kCluster;  // of B, that a CTA loads for the whole cluster
  // A warp stores its 16 rows of D in slices of kSliceRowBytes, which go through a ring of slots. Warps share
  // no slot, so that none waits for another.
  static constexpr int kSliceRowBytes = Tile::kSliceRowBytes;
  static constexpr int kSliceBytes = 16 * kSliceRowBytes;
  static constexpr int kSlots = Tile::kSlots;
  // Tiles are ordered in bands of so many rows of tiles, so that those which run at a time need few rows and
  // columns of the operands: with 2048 rows, the part of D that is computed at a time is about square.
  static constexpr int kBandTiles = 2048 / (kRows * kCluster);

  static_assert(kConsumerGroups == 1 || (kConsumerGroups == 2 && kCtasPerSm == 1),
                "sm90_gemm.hpp has the numbers of setmaxnreg for these");
  static_assert(kRows % 32 == 0 && kColumns % 32 == 0, "a warp copies 32 elements of a vector at a time");
  static_assert(kBandTiles > 0, "a band has a row of tiles");

  static_assert(kRows % 64 == 0 && kColumns % 16 == 0 && kColumns <= 256, "no wgmma has these sizes");
  static_assert(kColumns % kCluster == 0 && kLoadColumns % 8 == 0, "CTAs load whole atoms of the swizzle");
  static_assert(kSliceRowBytes == 64 || kSliceRowBytes == 128,
                "the swizzle of a slice is 64 or 128 bytes wide");
  static_assert(kColumns % kSliceRowBytes == 0, "a gated slice has so many columns of the product");

  /// A work item: a tile, and what the consumers need for it. The publisher writes each one to shared memory.
  struct alignas(16) WorkItem {
    // The elements of all vectors for the rows and columns of the tile. Those of absent addends are not
    // written.
    float per_row[kNumRowVectors][kRows];
    float per_column[kNumColumnVectors][kColumns];
    float alpha;
    Sm90GemmTile tile;  // steps < 0: there are no further tiles, and nothing else is written
  };
  static constexpr int kWorkItems = 2;  // one that the consumers read and one that the publisher writes

  struct alignas(1024) Shared {
    Element a[kStages][kRows * kDepth];
    Element b[kStages][kColumns * kDepth];
    char slots[kConsumerWarps][kSlots][kSliceBytes];
    WorkItem items[kWorkItems];
    cutlass::arch::ClusterTransactionBarrier full[kStages];
    cutlass::arch::ClusterBarrier empty[kStages];
    cutlass::arch::ClusterBarrier published[kWorkItems];
    cutlass::arch::ClusterBarrier consumed[kWorkItems];
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;  // to align it
  // An SM has 228 KB, of which each CTA needs 1 KB more than it asks for.
  static_assert(kCtasPerSm * (kSharedBytes + 1024) <= 228 * 1024, "the stages and slots do not fit");
};

}  // namespace cutlass_evt
