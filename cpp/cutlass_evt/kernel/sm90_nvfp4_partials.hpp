// Stream-K: the exchange of partial sums between the CTAs that share a tile along k, through the workspace.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// The partial sums of the CTAs and the flags that say that they are complete.
///
/// A raised flag holds the nonce of the launch; any other value means that it is clear. The thread that waits
/// for a flag clears it, so that no launch leaves one raised and the workspace needs no initialisation.
///
/// Config is a Sm90Nvfp4Config; Accumulators are the sums of one thread.
template <class Config, class Accumulators>
struct Sm90Nvfp4Partials {
  /// fp32 numbers in the workspace for each CTA.
  static constexpr int64_t kFloats = int64_t{Accumulators::kSize} * Config::kConsumerThreads;

  /// Raises a flag. The release makes the CTA's partial sums visible to the thread that acquires the flag: a
  /// __threadfence() of every thread and a barrier must come between their stores and this call.
  CUTLASS_DEVICE static void signal(uint64_t* flag, uint64_t nonce) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(nonce) : "memory");
  }

  /// Waits until a flag is raised and clears it. The acquire orders this thread's later reads of the sums; a
  /// barrier must follow before other threads read them.
  CUTLASS_DEVICE static void wait_and_clear(uint64_t* flag, uint64_t nonce) {
    uint64_t value;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    } while (value != nonce);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(uint64_t{0}) : "memory");
  }

  // The sums of a CTA lie in the order of its accumulator registers: four registers of every consumer thread,
  // then the next four. Accesses bypass L1 (.cg), which is not coherent among SMs.

  CUTLASS_DEVICE static void store(float* partials, int cta, Accumulators& accumulators) {
    float4* const to = of(partials, cta);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kSize; i += 4) {
      __stcg(to + i / 4 * Config::kConsumerThreads,
             make_float4(accumulators[i], accumulators[i + 1], accumulators[i + 2], accumulators[i + 3]));
    }
  }

  /// accumulators += the partial sums of a CTA.
  CUTLASS_DEVICE static void add(float* partials, int cta, Accumulators& accumulators) {
    float4 const* const from = of(partials, cta);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kSize; i += 4) {
      float4 const part = __ldcg(from + i / 4 * Config::kConsumerThreads);
      accumulators[i] += part.x;
      accumulators[i + 1] += part.y;
      accumulators[i + 2] += part.z;
      accumulators[i + 3] += part.w;
    }
  }

 private:
  /// The first four sums of this thread.
  CUTLASS_DEVICE static float4* of(float* partials, int cta) {
    return reinterpret_cast<float4*>(partials + cta * kFloats) + threadIdx.x;
  }
};

}  // namespace cutlass_evt
