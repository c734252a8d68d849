// Single fp32 operations whose rounding is fixed: to nearest even, never contracted with their neighbours.
#pragma once

#include <cstdint>
#include <cstring>

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
