// The arguments and the static sizes of SM90's kernel of groups that are ragged in k, and where its groups
// lie.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cute/numeric/math.hpp"
#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"
#include "cutlass/fast_math.h"
#include "cutlass/half.h"
#include "cutlass_evt/epilogue/arguments.hpp"
#include "cutlass_evt/load_after_wait.hpp"

namespace cutlass_evt {

/// The arguments of the kernel.
struct Sm90RaggedKParams {
  CUtensorMap a;  // (k, m) with boxes of 64 by the rows of a tile
  CUtensorMap b;  // (k, n) with boxes of 64 by the columns that a CTA loads
  CUtensorMap d;  // (n, m, num_groups) with boxes of one slice
  int m, n;
  int num_groups;
  int const* offs;                 // (num_groups) cumulative ends of the groups, on the device
  int64_t room;                    // k in steps of 64
  int tiles;                       // of all groups, for a whole cluster
  cutlass::FastDivmod row_tiles;   // of a group, for a whole cluster
  cutlass::FastDivmod tiles_each;  // tiles of a group, for a whole cluster
  EpilogueArguments epilogue;      // the activation is not gated; C is (num_groups * m, n)
};

/// Where a tile of one CTA lies.
struct Sm90RaggedKTile {
  int group;
  int row, column;  // the first of the tile
};

/// The static sizes. Op is an epilogue such as RowCol; Rows and Columns are those of a tile of one CTA;
/// Cluster are the CTAs of a cluster, which lie side by side along the rows and share a tile of B.
template <class Op_, int Rows, int Columns, int Cluster>
struct Sm90RaggedKConfig {
  using Op = Op_;
  using Out = typename Op::ElementOutput;
  using Element = cutlass::half_t;
  static constexpr int kRows = Rows;
  static constexpr int kColumns = Columns;
  static constexpr int kDepth = 64;  // of a stage: 128 bytes, the width of the swizzle
  static constexpr int kCluster = Cluster;
  static constexpr int kConsumerGroups = Rows / 64;  // warpgroups
  static constexpr int kThreads = (kConsumerGroups + 1) * 128;
  static constexpr int kCtasPerSm = kConsumerGroups == 1 ? 2 : 1;
  static constexpr int kStages = 3;
  // A warp stores its 16 rows of D in slices of 128 bytes, which go through a ring of slots. Warps share no
  // slot, so that none waits for another.
  static constexpr int kSliceColumns = 128 / static_cast<int>(sizeof(Out));
  static constexpr int kSlices = kColumns / kSliceColumns;
  static constexpr int kSliceBytes = 16 * 128;
  static constexpr int kSlots = kCtasPerSm == 1 ? 4 : 3;
  static constexpr int kLoadColumns = kColumns / kCluster;  // of B, that a CTA loads for the whole cluster
  static constexpr int kStageBytes = (kRows + kColumns) * kDepth * static_cast<int>(sizeof(Element));

  /// A work item: a tile, and what the consumers need for it. The publisher writes each one to shared memory.
  struct alignas(16) WorkItem {
    // The elements of the vectors for its rows and columns. Addends that the call lacks are not written.
    float per_row[kNumRowVectors][kRows];
    float per_column[kNumColumnVectors][kColumns];
    float alpha;
    Sm90RaggedKTile tile;
    int steps;  // of k
  };
  static constexpr int kWorkItems = 2;  // one that the consumers read and one that the publisher writes

  struct alignas(1024) Shared {
    Element a[kStages][kRows * kDepth];
    Element b[kStages][kColumns * kDepth];
    char slots[kConsumerGroups * 4][kSlots][kSliceBytes];
    WorkItem items[kWorkItems];
    cutlass::arch::ClusterTransactionBarrier full[kStages];
    cutlass::arch::ClusterBarrier empty[kStages];
    cutlass::arch::ClusterBarrier published[kWorkItems];
    cutlass::arch::ClusterBarrier consumed[kWorkItems];
  };
  static constexpr int kSharedBytes = static_cast<int>(sizeof(Shared)) + 1024;  // to align it
};

/// Finds the columns of the groups of A and B, which begin at multiples of 64. A warp has one object: each of
/// its lanes keeps the size of another group, and all lanes call part() together, for groups in ascending
/// order.
class Sm90RaggedKGroups {
 public:
  struct Part {
    int begin, steps;  // of k, in steps of 64
  };

  CUTLASS_DEVICE Sm90RaggedKGroups(int const* offs, int num_groups, int64_t room)
      : offs_(offs), num_groups_(num_groups), room_(room), first_(0), before_(0) {
    load();
  }

  /// The part of a group. Ends that are out of order or out of range are an error of the caller that is not
  /// reported: a group for which there is no room is empty, so that every access stays within the operands.
  CUTLASS_DEVICE Part part(int group) {
    while (group >= first_ + 32) {
      before_ += __shfl_sync(0xFFFFFFFFu, up_to_, 31);
      first_ += 32;
      load();
    }
    int const steps = __shfl_sync(0xFFFFFFFFu, steps_, group - first_);
    int64_t const end = before_ + __shfl_sync(0xFFFFFFFFu, up_to_, group - first_);
    return end > room_ ? Part{0, 0} : Part{static_cast<int>(end) - steps, steps};
  }

 private:
  /// Loads the sizes of the 32 groups from first_ on, one by each lane.
  CUTLASS_DEVICE void load() {
    int const lane = static_cast<int>(threadIdx.x % 32);
    int const group = first_ + lane;
    int const begin = group > 0 && group < num_groups_ ? cute::max(load_after_wait(offs_ + group - 1), 0) : 0;
    int const end = group < num_groups_ ? cute::max(load_after_wait(offs_ + group), 0) : 0;
    int const size = cute::max(end - begin, 0);
    steps_ = size / 64 + (size % 64 != 0 ? 1 : 0);
    up_to_ = steps_;
    CUTLASS_PRAGMA_UNROLL
    for (int distance = 1; distance < 32; distance *= 2) {
      int const other = __shfl_up_sync(0xFFFFFFFFu, up_to_, distance);
      up_to_ += lane >= distance ? other : 0;
    }
  }

  int const* offs_;
  int num_groups_;
  int64_t room_;    // in steps
  int first_;       // the group of lane 0
  int64_t before_;  // steps of all groups before it
  int steps_;       // of this lane's group
  int up_to_;       // of the groups from first_ to this lane's
};

}  // namespace cutlass_evt
