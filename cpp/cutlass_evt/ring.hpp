// Positions in rings of slots, such as the stages of a mainloop, that are guarded by mbarriers.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// A position in a ring of Slots slots. phase is the parity of the mbarrier phase to wait for; it flips with
/// every round.
template <int Slots>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;

  CUTLASS_DEVICE void advance() {
    if (++stage == Slots) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace cutlass_evt
