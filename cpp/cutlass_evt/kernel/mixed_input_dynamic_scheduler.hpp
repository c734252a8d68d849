// A dynamic tile scheduler: workers fetch the numbers of their tiles from a counter in global memory, which
// balances tiles that take different times.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// The counter from which all workers of a launch fetch tile numbers.
///
/// The counter lies in workspace that is never initialised. Invariant: while it is open, it holds the nonce
/// plus the count of fetches; while it is closed, it holds any other value. CTA 0 opens it, and the thread
/// that fetches the last number closes it, so that no launch leaves it open. A thread that fetches before
/// the counter is open recognises the value as none of the launch's and fetches again.
struct MixedInputDynamicScheduler {
  uint64_t* counter = nullptr;  // null: the launch has no dynamic scheduler
  uint64_t nonce = 0;           // MixedInputParams::nonce

  /// The previous launch may use the same counter and must have ended before this call.
  CUTLASS_DEVICE void open() const { store(nonce); }

  /// Increments the counter and returns its previous value, for resolve().
  CUTLASS_DEVICE uint64_t request() const {
    uint64_t value;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(value) : "l"(counter) : "memory");
    return value;
  }

  /// The tile number that a request stands for: 0 for the first of the launch, then 1, and so on. A request
  /// that came before the counter was open is repeated. The workers of a launch must request exactly
  /// `num_requests` numbers between them.
  CUTLASS_DEVICE int resolve(uint64_t value, int num_requests) const {
    while (value - nonce >= static_cast<uint64_t>(num_requests)) {
      value = request();
    }
    int const number = static_cast<int>(value - nonce);
    if (number == num_requests - 1) {
      store(0);
    }
    return number;
  }

 private:
  // Relaxed: the counter orders no other memory.
  CUTLASS_DEVICE void store(uint64_t value) const {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
  }
};

}  // namespace cutlass_evt
