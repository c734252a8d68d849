// What the epilogue multiplies and adds, fetched before the mainloop.
#pragma once

#include "cutlass_evt/kernel/sm90_nvfp4_schedule.hpp"

namespace cutlass_evt {

/// A tile's terms in shared memory: one of each token, then a factor of each row of the weight, then a bias.
/// Where warpgroups do not share rows, they are there once for each, of its 64.
template <class Config, class Epilogue>
struct Sm90Nvfp4Terms {
  using Shared = Sm90Nvfp4Shared<Config>;
  static constexpr int kByColumn = Config::kTokens;
  static constexpr int kBias = kByColumn + Config::kTermColumns;
  static constexpr int kThreads = Config::kSharesRows ? Config::kConsumerThreads : 128;

  /// Asks for them, by copies to shared memory, so that no register waits; see wait().
  CUTLASS_DEVICE static void fetch(typename Epilogue::Arguments const& args, Shared const& shared,
                                   Sm90Nvfp4Place const& place, int first_chunk, int n) {
    int const thread = static_cast<int>(threadIdx.x) % kThreads;
    int const group = static_cast<int>(threadIdx.x) / kThreads;
    float* const terms = shared.terms(group);
    int const tokens = cute::min(place.rows.size - place.token, int{Config::kTokens});
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kBias + Config::kTermColumns; i += kThreads) {
      int const term = thread + i;
      if (term < tokens) {
        copy(terms + term, Epilogue::row_factor_at(args, int64_t{place.rows.begin} + place.token + term),
             1.0f);
      }
      bool const is_bias = term >= kBias;
      int const row = term - (is_bias ? kBias : kByColumn);
      int const column = (first_chunk + group) * 64 + row;
      if (term >= kByColumn && row < Config::kTermColumns && column < n) {
        copy(terms + term,
             is_bias ? Epilogue::bias_at(args, place.group, column)
                     : Epilogue::by_column_at(args, place.group, column),
             is_bias ? nodes::kNoBias : 1.0f);
      }
    }
  }

  /// Those that this thread asked for are there.
  CUTLASS_DEVICE static void wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

 private:
  /// *to = *from, in time; `absent` where from is null.
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
