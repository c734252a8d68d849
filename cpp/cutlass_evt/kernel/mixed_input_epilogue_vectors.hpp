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
    // Unsigned, so that the divisions below are shifts.
    unsigned const thread = threadIdx.x % kThreads;
    int const group = static_cast<int>(threadIdx.x / kThreads);
    float* const vectors = shared.vectors(group);
    int const tokens = coord.rows.size - coord.token;
    CUTLASS_PRAGMA_UNROLL
    for (unsigned i = 0; i < kSize; i += kThreads) {
      unsigned const index = thread + i;
      CUTLASS_PRAGMA_UNROLL
      for (int v = Config::kQuantizes ? kAlphaRow + 1 : 0; v < kNumRowVectors; ++v) {
        unsigned const token = index - v * Config::kTokens;
        if (token < Config::kTokens) {
          bool const present = static_cast<int>(token) < tokens && args.has(RowVector(v));
          int64_t const row = int64_t{coord.rows.begin} + coord.token + token;
          copy(vectors + index, present ? args.per_row[v].at(0, row) : nullptr, absent(RowVector(v)));
        }
      }
      unsigned const of_columns = index - kColumnsAt;
      if (index >= kColumnsAt && index < kSize) {
        int const column = (first_chunk + group) * 64 + static_cast<int>(of_columns % Config::kVectorColumns);
        float const* from = nullptr;
        float otherwise = 0.0f;
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kNumColumnVectors; ++v) {  // a selection: an index would put args into memory
          if (of_columns / Config::kVectorColumns == v) {
            bool const present = column < n && args.has(ColumnVector(v));
            from = present ? args.per_column[v].at(coord.group, column) : nullptr;
            otherwise = absent(ColumnVector(v));
          }
        }
        copy(vectors + index, from, otherwise);
      }
    }
  }

  /// Waits for this thread's copies. A barrier must follow before a thread reads what others copied.
  CUTLASS_DEVICE static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

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

/// What the epilogue reads by row and by column beside these vectors: nothing, unless this is specialized for
/// the Epilogue.
template <class Config, class Epilogue>
struct MixedInputEpilogueInputs {
  /// As MixedInputEpilogueVectors::fetch.
  template <class... Arguments>
  CUTLASS_DEVICE static void fetch(Arguments const&...) {}
  /// Of the staged epilogue: the inputs of the columns that a thread finishes, in two steps, and of a row.
  template <class... Arguments>
  CUTLASS_DEVICE static void begin(Arguments const&...) {}
  template <class... Arguments>
  CUTLASS_DEVICE static void of_columns(Arguments const&...) {}
  template <class... Arguments>
  CUTLASS_DEVICE static void of_row(Arguments const&...) {}
};

}  // namespace cutlass_evt
