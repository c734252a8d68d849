// Tiles that take different times go to whoever can fetch one: workers draw their numbers from a counter.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// A counter in the workspace, which needs no initialisation: closed, it may hold anything but what an open
/// one holds. The first CTA of a launch that draws opens it, and whoever draws the last number closes it. So
/// no launch leaves it open, and whoever draws too early sees that and draws again.
struct Sm90Nvfp4Tickets {
  uint64_t* counter = nullptr;  // null: nothing is drawn

  // What an open one holds, plus how many numbers have been drawn.
  static constexpr uint64_t kOpen = 0xD1B54A32D192ED03ull;

  /// Only once the launch before this one has ended, which may have drawn from the same counter.
  CUTLASS_DEVICE void open() const { store(kOpen); }

  CUTLASS_DEVICE uint64_t draw() const {
    uint64_t drawn;
    asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], 1;" : "=l"(drawn) : "l"(counter) : "memory");
    return drawn;
  }

  /// 0 for who drew first, and so on; what draw() gave is drawn again until the counter is open. All workers
  /// together draw `numbers` of them.
  CUTLASS_DEVICE int number(uint64_t drawn, int numbers) const {
    while (drawn - kOpen >= static_cast<uint64_t>(numbers)) {
      drawn = draw();
    }
    int const found = static_cast<int>(drawn - kOpen);
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
