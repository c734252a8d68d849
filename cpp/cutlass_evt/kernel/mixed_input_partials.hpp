// Stream-K: the exchange of partial sums between the CTAs that share a tile along k, through the workspace.
#pragma once

#include <cstdint>

#include "cutlass/arch/barrier.h"
#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// The partial sums of the CTAs in the workspace. A CTA sends its sums at most once in a launch, and one
/// other CTA receives them. A value in the workspace is valid if the nonce, which is the same for all
/// launches of a process, stands beside it; the receiver clears the nonces that it has read, so that no
/// launch leaves one in memory and the workspace needs no initialisation.
///
/// There are two forms. For tiles of up to 16 tokens the nonce is beside every two sums, in one access of 16
/// bytes, which is atomic: the exchange needs no fence, no flag and no barrier, and is about 0.7 us shorter.
/// For wider tiles, where that would double the traffic, one flag for all sums of a CTA holds the nonce.
///
/// Config is a MixedInputConfig; Accumulators are the sums of one thread.
template <class Config, class Accumulators>
struct MixedInputPartials {
  static constexpr int kSize = Accumulators::kSize;
  static constexpr bool kTagged = kSize <= 8;
  /// Bytes in the workspace for each CTA.
  static constexpr int64_t kBytes = int64_t{kSize} * (kTagged ? 8 : 4) * Config::kConsumerThreads;

  char* sums;       // kBytes for each CTA
  uint64_t* flags;  // one for each CTA
  uint64_t nonce;   // random, so that stale memory does not hold it

  /// Sends the sums of a CTA; every consumer thread must call this.
  CUTLASS_DEVICE void send(int cta, Accumulators& accumulators) const {
    char* const to = of(cta);
    if constexpr (kTagged) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; i += 2) {
        asm volatile(
            "{\n"
            ".reg .b64 sums;\n"
            ".reg .b128 tagged;\n"
            "mov.b64 sums, {%1, %2};\n"
            "mov.b128 tagged, {sums, %3};\n"
            "st.relaxed.gpu.global.b128 [%0], tagged;\n"
            "}" ::"l"(to + i / 2 * kStride),
            "f"(accumulators[i]), "f"(accumulators[i + 1]), "l"(nonce)
            : "memory");
      }
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; i += 4) {
        __stcg(reinterpret_cast<float4*>(to + i / 4 * kStride),
               make_float4(accumulators[i], accumulators[i + 1], accumulators[i + 2], accumulators[i + 3]));
      }
      // The stores of all consumers come before the barrier. The release makes them visible to the thread
      // that acquires the flag.
      barrier();
      if (threadIdx.x == 0) {
        asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flags + cta), "l"(nonce) : "memory");
      }
    }
  }

  /// accumulators += the sums that a CTA sends; every consumer thread must call this.
  CUTLASS_DEVICE void add(int cta, Accumulators& accumulators) const {
    char* const from = of(cta);
    if constexpr (kTagged) {
      float got[kSize];
      bool complete;
      do {
        complete = true;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSize; i += 2) {
          uint64_t tag;
          asm volatile(
              "{\n"
              ".reg .b64 sums;\n"
              ".reg .b128 tagged;\n"
              "ld.relaxed.gpu.global.b128 tagged, [%3];\n"
              "mov.b128 {sums, %2}, tagged;\n"
              "mov.b64 {%0, %1}, sums;\n"
              "}"
              : "=f"(got[i]), "=f"(got[i + 1]), "=l"(tag)
              : "l"(from + i / 2 * kStride)
              : "memory");
          complete = complete && tag == nonce;
        }
      } while (!complete);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; ++i) {
        accumulators[i] += got[i];
        if (i % 2 == 0) {
          clear(reinterpret_cast<uint64_t*>(from + i / 2 * kStride + 8));
        }
      }
    } else {
      if (threadIdx.x == 0) {
        uint64_t value;
        do {
          asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flags + cta) : "memory");
        } while (value != nonce);
        clear(flags + cta);
      }
      // Thread 0 has acquired the flag: the other threads may read the sums after the barrier.
      barrier();
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSize; i += 4) {
        float4 const part = __ldcg(reinterpret_cast<float4 const*>(from + i / 4 * kStride));
        accumulators[i] += part.x;
        accumulators[i + 1] += part.y;
        accumulators[i + 2] += part.z;
        accumulators[i + 3] += part.w;
      }
    }
  }

 private:
  // The sums of a CTA lie in the order of its accumulator registers: 16 bytes of every consumer thread, then
  // the next 16. Accesses bypass L1, which is not coherent among SMs.
  static constexpr int kStride = 16 * Config::kConsumerThreads;

  CUTLASS_DEVICE char* of(int cta) const { return sums + cta * kBytes + threadIdx.x * 16; }

  CUTLASS_DEVICE static void clear(uint64_t* at) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"(uint64_t{0}) : "memory");
  }

  /// A barrier among all consumer threads.
  CUTLASS_DEVICE static void barrier() { cutlass::arch::NamedBarrier::sync(Config::kConsumerThreads, 1u); }
};

}  // namespace cutlass_evt
