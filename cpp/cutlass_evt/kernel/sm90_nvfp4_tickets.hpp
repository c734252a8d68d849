// Tiles that take different times go to whoever can fetch one: workers draw their numbers from a counter.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// A counter in the workspace, which needs no initialisation. An open counter holds the nonce plus how many
/// numbers have been drawn; a closed one may hold any other value. CTA 0 opens the counter, and the thread
/// that draws the last number closes it. So no launch leaves the counter open, and a thread that draws before
/// it is open recognises that and draws again.
struct Sm90Nvfp4Tickets {
  uint64_t* counter = nullptr;  // null: nothing is drawn
  uint64_t nonce = 0;           // Sm90Nvfp4Params::nonce

  /// Must follow the end of the previous launch, which may have drawn from the same counter.
  CUTLASS_DEVICE void open() const { store(nonce); }

  CUTLASS_DEVICE uint64_t draw() const {
    uint64_t drawn;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(drawn) : "l"(counter) : "memory");
    return drawn;
  }

  /// 0 for who drew first, and so on; what draw() gave is drawn again until the counter is open. All workers
  /// together draw `numbers` of them.
  CUTLASS_DEVICE int number(uint64_t drawn, int numbers) const {
    while (drawn - nonce >= static_cast<uint64_t>(numbers)) {
      drawn = draw();
    }
    int const found = static_cast<int>(drawn - nonce);
    if (found == numbers - 1) {
      store(0);
    }
    return found;
  }

 private:
  CUTLASS_DEVICE void store(uint64_t value) const {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(counter), "l"(value) : "memory");
  }
};

}  // namespace cutlass_evt
