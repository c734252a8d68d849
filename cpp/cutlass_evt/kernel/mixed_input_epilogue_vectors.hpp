// The vectors of the epilogue, copied to shared memory while the mainloop runs.
#pragma once

#include "cutlass_evt/epilogue/finish.hpp"
#include "cutlass_evt/kernel/mixed_input_schedule.hpp"

namespace cutlass_evt {

/// The vectors of one tile in shared memory: kTokens elements of each RowVector, then from kColumnsAt on
/// kVectorColumns elements of each ColumnVector, since the rows of the weight are columns of D. Warpgroups
/// that share rows share one copy; otherwise each warpgroup has its own, for its 64 rows.
///
/// Where Config::kQuantizes, the quantizer has written kAlphaRow, the first, and it stays.
///
/// Config is a MixedInputConfig.
template <class Config>
struct MixedInputEpilogueVectors {
  using Shared = MixedInputShared<Config>;
  static constexpr int kColumnsAt = Config::kTokens * kNumRowVectors;
  static constexpr int kSize = kColumnsAt + Config::kVectorColumns * kNumColumnVectors;
  static constexpr int kThreads = Config::kSharesRows ? Config::kConsumerThreads : 128;

  /// Starts the copies by cp.async, so that no register holds a value during the mainloop. What belongs to
  /// rows and columns beyond the product gets a constant: the epilogue reads it, for elements that it does
  /// not store. The previous tile's vectors must have been read: a barrier among the same threads separates
  /// its epilogue from this call.
  CUTLASS_DEVICE static void fetch(EpilogueArguments const& args, Shared const& shared,
                                   MixedInputTileCoord const& coord, int first_chunk, int n) {
    int const thread = static_cast<int>(threadIdx.x) % kThreads;
    int const group = static_cast<int>(threadIdx.x) / kThreads;
    float* const vectors = shared.vectors(group);
    int const tokens = coord.rows.size - coord.token;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSize; i += kThreads) {
      int const index = thread + i;
      if (index < kColumnsAt && !(Config::kQuantizes && index / Config::kTokens == kAlphaRow)) {
        int const token = index % Config::kTokens;
        int64_t const row = int64_t{coord.rows.begin} + coord.token + token;
        copy_one<RowVector, kNumRowVectors>(args, index / Config::kTokens, 0, row, token < tokens,
                                            vectors + index);
      }
      int const of_columns = index - kColumnsAt;
      if (of_columns >= 0 && index < kSize) {
        int const column = (first_chunk + group) * 64 + of_columns % Config::kVectorColumns;
        copy_one<ColumnVector, kNumColumnVectors>(args, of_columns / Config::kVectorColumns, coord.group,
                                                  column, column < n, vectors + index);
      }
    }
  }

  /// Waits for this thread's copies. A barrier must follow before a thread reads what others copied.
  CUTLASS_DEVICE static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  /// Copies element i of vector number `which` of the `Count` vectors V, or absent(v) where it is not there.
  template <class V, int Count>
  CUTLASS_DEVICE static void copy_one(EpilogueArguments const& args, int which, int group, int64_t i,
                                      bool present, float* to) {
    float const* from = nullptr;
    float otherwise = 0.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < Count; ++v) {  // a selection, since an index would put the arguments into memory
      if (v == which) {
        from = present ? args.vector(V(v)).at(group, i) : nullptr;
        otherwise = absent(V(v));
      }
    }
    copy(to, from, otherwise);
  }

  /// *to = *from, asynchronously; `absent`, at once, where from is null.
  CUTLASS_DEVICE static void copy(float* to, float const* from, float absent) {
    if (from == nullptr) {
      *to = absent;
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(cute::cast_smem_ptr_to_uint(to)),
                   "l"(from)
                   : "memory");
    }
  }
};

}  // namespace cutlass_evt
