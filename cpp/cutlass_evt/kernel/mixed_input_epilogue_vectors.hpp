// The vectors of the epilogue, copied to shared memory while the mainloop runs.
#pragma once

#include "cutlass_evt/epilogue/columns.hpp"
#include "cutlass_evt/kernel/mixed_input_schedule.hpp"

namespace cutlass_evt {

/// The vectors of one tile in shared memory: a factor for each token, a factor for each row of the weight
/// (kByColumn: a column of D), and a bias for each row of the weight (kBias). Warpgroups that share rows
/// share one copy; otherwise each warpgroup has its own, for its 64 rows.
///
/// Where Config::kQuantizes, the quantizer has written the factors of the tokens and they stay.
///
/// Config is a MixedInputConfig; Epilogue says where the vectors lie (ColumnsEpilogue).
template <class Config, class Epilogue>
struct MixedInputEpilogueVectors {
  using Shared = MixedInputShared<Config>;
  static constexpr int kByColumn = Config::kTokens;
  static constexpr int kBias = kByColumn + Config::kVectorColumns;
  static constexpr int kThreads = Config::kSharesRows ? Config::kConsumerThreads : 128;

  /// Starts the copies by cp.async, so that no register holds a value during the mainloop. What belongs to
  /// rows and columns beyond the product gets a constant: the epilogue reads it, for elements that it does
  /// not store. The previous tile's vectors must have been read: a barrier among the same threads separates
  /// its epilogue from this call.
  CUTLASS_DEVICE static void fetch(typename Epilogue::Arguments const& args, Shared const& shared,
                                   MixedInputTileCoord const& coord, int first_chunk, int n) {
    int const thread = static_cast<int>(threadIdx.x) % kThreads;
    int const group = static_cast<int>(threadIdx.x) / kThreads;
    float* const vectors = shared.vectors(group);
    int const tokens = coord.rows.size - coord.token;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBias + Config::kVectorColumns; i += kThreads) {
      int const index = thread + i;
      if (!Config::kQuantizes && index < Config::kTokens) {
        int64_t const row = int64_t{coord.rows.begin} + coord.token + index;
        copy(vectors + index, index < tokens ? Epilogue::row_factor_at(args, row) : nullptr, 1.0f);
      }
      bool const is_bias = index >= kBias;
      int const row = index - (is_bias ? kBias : kByColumn);
      int const column = (first_chunk + group) * 64 + row;
      if (index >= kByColumn && row < Config::kVectorColumns) {
        float const* const from = column >= n ? nullptr
                                  : is_bias   ? Epilogue::bias_at(args, coord.group, column)
                                              : Epilogue::by_column_at(args, coord.group, column);
        copy(vectors + index, from, is_bias ? nodes::kNoBias : 1.0f);
      }
    }
  }

  /// Waits for this thread's copies. A barrier must follow before a thread reads what others copied.
  CUTLASS_DEVICE static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
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
