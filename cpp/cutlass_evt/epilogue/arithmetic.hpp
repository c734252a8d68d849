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

/// 1 / b for 2^-126 < |b| < 2^126, as divide_by_normal takes it: by one step of Newton's method.
CUTLASS_HOST_DEVICE float reciprocal_of_normal(float b) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("{\n"
      ".reg .f32 n, t;\n"
      "neg.f32 n, %1;\n"
      "rcp.approx.ftz.f32 %0, %1;\n"
      "fma.rn.f32 t, n, %0, 0f3F800000;\n"
      "fma.rn.f32 %0, t, %0, %0;\n"
      "}"
      : "=&f"(r)
      : "f"(b));
  return r;
#else
  return 1.0f / b;
#endif
}

/// fl(a / b) with r = reciprocal_of_normal(b), where b > 0 and 2^-100 <= |a| and 2^-126 <= |a / b|, or b is a
/// power of two, or a is 0, infinite or NaN. Elsewhere a number below 2^-126 may be rounded twice; for b < 0
/// the quotient of 0 has the wrong sign.
///
/// The device's own division branches for each element, so that the divisions of a thread cannot overlap, and
/// it calls a slower function where a is 0. This has the same operations without the branch: two corrections
/// of a r by the remainder, which fma has exactly (Markstein, "Computation of elementary functions on the IBM
/// RISC System/6000 processor", 1990). Each remainder is computed with the opposite sign, so that the
/// quotient of -0 is -0.
CUTLASS_HOST_DEVICE float divide_by_normal(float a, float b, float r) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{\n"
      ".reg .f32 n, t, s;\n"
      ".reg .pred infinite;\n"
      "neg.f32 n, %1;\n"
      "mul.rn.f32 s, %1, %3;\n"
      "fma.rn.f32 t, %2, s, n;\n"
      "neg.f32 t, t;\n"
      "fma.rn.f32 s, t, %3, s;\n"
      "fma.rn.f32 t, %2, s, n;\n"
      "neg.f32 t, t;\n"
      "fma.rn.f32 s, t, %3, s;\n"
      "abs.f32 t, %1;\n"
      "setp.eq.f32 infinite, t, 0f7F800000;\n"  // the remainder is NaN
      "selp.f32 %0, %1, s, infinite;\n"
      "}"
      : "=f"(y)
      : "f"(a), "f"(b), "f"(r));
  return y;
#else
  (void)r;
  return a / b;
#endif
}
CUTLASS_HOST_DEVICE float divide_by_normal(float a, float b) {
  return divide_by_normal(a, b, reciprocal_of_normal(b));
}

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
