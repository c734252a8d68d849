// Single fp32 operations whose rounding is fixed: to nearest even, never contracted with their neighbours.
#pragma once

#include <cstdint>
#include <cstring>

#include "cutlass/array.h"
#include "cutlass/cutlass.h"

namespace cutlass_evt::nodes {

/// fl(a * b). cutlass::multiplies may be contracted with an addition that follows it; this may not.
template <class T>
struct multiply_rn;

/// fl(a + b), never contracted with a product.
template <class T>
struct add_rn;

template <>
struct multiply_rn<float> {
  CUTLASS_HOST_DEVICE float operator()(float a, float b) const {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
  }
};

template <>
struct add_rn<float> {
  CUTLASS_HOST_DEVICE float operator()(float a, float b) const {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
  }
};

/// A scalar functor applied to each element of two arrays.
template <class Op, int N>
struct Elementwise {
  using Array = cutlass::Array<float, N>;
  CUTLASS_HOST_DEVICE Array operator()(Array const& a, Array const& b) const {
    Array result;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < N; ++i) {
      result[i] = Op{}(a[i], b[i]);
    }
    return result;
  }
};

template <int N>
struct multiply_rn<cutlass::Array<float, N>> : Elementwise<multiply_rn<float>, N> {};

template <int N>
struct add_rn<cutlass::Array<float, N>> : Elementwise<add_rn<float>, N> {};

inline uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

}  // namespace cutlass_evt::nodes
