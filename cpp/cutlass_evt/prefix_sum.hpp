// A prefix sum over the threads of a CTA.
#pragma once

#include <cstdint>

#include "cute/numeric/math.hpp"
#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// a + b.
struct PlainAdd {
  template <class T>
  CUTLASS_DEVICE T operator()(T a, T b) const {
    return a + b;
  }
};

/// min(a + b, most) for numbers from 0 to most, which never overflows. The sum of many numbers is that of
/// PlainAdd, or `most` where that is larger, in whichever order they are added.
struct SaturatingAdd {
  int most;

  CUTLASS_DEVICE int operator()(int a, int b) const {
    uint32_t const sum = static_cast<uint32_t>(a) + static_cast<uint32_t>(b);
    return static_cast<int>(cute::min(sum, static_cast<uint32_t>(most)));
  }
};

/// Returns the sum of `value` over the threads of the CTA up to and including this one, and sets *total to
/// the sum over all of them.
///
/// kThreads is the size of the CTA, a multiple of 32; every thread must call the function. T is the type of
/// the numbers and Add how two of them are added. warp_sums is shared memory, one entry for each warp.
template <int kThreads, class T, class Add>
CUTLASS_DEVICE T inclusive_sum(T value, T* warp_sums, T* total, Add const& add) {
  static_assert(kThreads % 32 == 0, "a prefix sum needs whole warps");
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  T up_to = value;
  CUTLASS_PRAGMA_UNROLL
  for (int step = 1; step < 32; step *= 2) {
    T const other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
    up_to = add(up_to, lane >= step ? other : 0);
  }
  if (lane == 31) {
    warp_sums[warp] = up_to;
  }
  // Afterwards every thread sees the sums of all warps.
  __syncthreads();
  T before = 0;
  T all = 0;
  for (int i = 0; i < kThreads / 32; ++i) {
    before = add(before, i < warp ? warp_sums[i] : 0);
    all = add(all, warp_sums[i]);
  }
  // Afterwards no thread reads warp_sums, so that the next call may overwrite it.
  __syncthreads();
  *total = all;
  return add(before, up_to);
}

}  // namespace cutlass_evt
