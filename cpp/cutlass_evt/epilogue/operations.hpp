// The operations of an epilogue that was written in Python. python/fp4gemm/epilogues/operations.py defines
// them, and the host's code and the device's give the same bits as that.
//
// Each arithmetic operation rounds once to nearest even and is never contracted with another.
#pragma once

#include "cutlass_evt/epilogue/arithmetic.hpp"

#if !defined(__CUDACC_RTC__)
#include <cmath>
#include <limits>
#endif

namespace cutlass_evt::op {

CUTLASS_HOST_DEVICE float infinity() {
#if defined(__CUDA_ARCH__)
  return __int_as_float(0x7F800000);
#else
  return nodes::bits_to_float(0x7F800000u);
#endif
}

CUTLASS_HOST_DEVICE float add(float a, float b) { return nodes::add_rn<float>{}(a, b); }
CUTLASS_HOST_DEVICE float sub(float a, float b) { return nodes::add_rn<float>{}(a, -b); }
CUTLASS_HOST_DEVICE float mul(float a, float b) { return nodes::multiply_rn<float>{}(a, b); }

CUTLASS_HOST_DEVICE float abs(float x) {
#if defined(__CUDA_ARCH__)
  return ::fabsf(x);
#else
  return std::fabs(x);
#endif
}

/// a / b, by a function object that one thread uses for the elements that it has at a time.
///
/// The device's own division branches for each element, so that divisions cannot overlap, and it calls a slow
/// function where a is 0. With kEvery = false the quotient is that of divide_by_normal, and is_rare() says
/// afterwards that the operands of one of the divisions were outside the range where it is right. Then all
/// must be computed again with kEvery = true, which is the device's own division.
template <bool kEvery>
class Division {
 public:
  CUTLASS_HOST_DEVICE float operator()(float a, float b) {
#if defined(__CUDA_ARCH__)
    if constexpr (kEvery) {
      return __fdiv_rn(a, b);
    } else {
      // What depends on b alone is computed once where b is the same for all elements.
      is_rare_ = is_rare_ || !is_near_1(b) || !(a == 0.0f ? b > 0.0f : is_near_1(a));
      return nodes::divide_by_normal(a, b, nodes::reciprocal_of_normal(b));
    }
#else
    return a / b;
#endif
  }
  CUTLASS_HOST_DEVICE bool is_rare() const { return is_rare_; }

 private:
  CUTLASS_HOST_DEVICE static bool is_near_1(float x) { return abs(x) >= 0x1p-60f && abs(x) <= 0x1p60f; }

  bool is_rare_ = false;
};

/// a * b + c, rounded once.
CUTLASS_HOST_DEVICE float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

CUTLASS_HOST_DEVICE float sqrt(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return std::sqrt(x);
#endif
}

CUTLASS_HOST_DEVICE float neg(float x) { return -x; }

CUTLASS_HOST_DEVICE bool lt(float a, float b) { return a < b; }
CUTLASS_HOST_DEVICE bool le(float a, float b) { return a <= b; }
CUTLASS_HOST_DEVICE bool eq(float a, float b) { return a == b; }
CUTLASS_HOST_DEVICE bool logical_and(bool a, bool b) { return a && b; }
CUTLASS_HOST_DEVICE bool logical_or(bool a, bool b) { return a || b; }
CUTLASS_HOST_DEVICE bool logical_not(bool a) { return !a; }
CUTLASS_HOST_DEVICE float where(bool condition, float a, float b) { return condition ? a : b; }

/// The smaller number, NaN if one is NaN, and -0 of -0 and 0.
CUTLASS_HOST_DEVICE float minimum(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a ? a : b != b ? b : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b;
#endif
}

/// The greater number, NaN if one is NaN, and 0 of -0 and 0.
CUTLASS_HOST_DEVICE float maximum(float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a != a ? a : b != b ? b : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b;
#endif
}

/// exp(x) with x clamped to -87..87, by the operations of nodes::times_logistic; NaN stays NaN.
CUTLASS_HOST_DEVICE float exp(float x) {
#if defined(__CUDA_ARCH__)
  // One statement, for the reason that times_logistic gives.
  float y;
  asm("{\n"
      ".reg .f32 t, s, f, p;\n"
      ".reg .b32 n;\n"
      "max.NaN.f32 t, %1, 0fC2AE0000;\n"  // -87
      "min.NaN.f32 t, t, 0f42AE0000;\n"   // 87
      "mul.rn.f32 t, t, 0f3FB8AA3B;\n"    // log2 e
      "add.rn.f32 s, t, 0f4B400000;\n"    // 1.5 * 2^23
      "add.rn.f32 f, s, 0fCB400000;\n"
      "sub.rn.f32 f, t, f;\n"
      "mul.rn.f32 p, f, 0f39218489;\n"
      "add.rn.f32 p, p, 0f3AAEC3FF;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3C1D955B;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3D635847;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3E75FDF0;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3F317218;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3F800000;\n"
      "mov.b32 n, s;\n"
      "shl.b32 n, n, 23;\n"
      "add.s32 n, n, 0x3F800000;\n"
      "mov.b32 s, n;\n"
      "mul.rn.f32 %0, p, s;\n"
      "}"
      : "=f"(y)
      : "f"(x));
  return y;
#else
  float const t = mul(x < -87.0f ? -87.0f : x > 87.0f ? 87.0f : x, 1.44269502f);  // log2 e
  float const shifted = add(t, 12582912.0f);  // the low bits hold the integer next to t
  float const f = sub(t, sub(shifted, 12582912.0f));
  float p = 0.00015403530f;
  p = add(mul(f, p), 0.0013333558f);
  p = add(mul(f, p), 0.0096181291f);
  p = add(mul(f, p), 0.055504109f);
  p = add(mul(f, p), 0.24022651f);
  p = add(mul(f, p), 0.69314718f);
  p = add(mul(f, p), 1.0f);
  return mul(p, nodes::bits_to_float((nodes::float_to_bits(shifted) << 23) + 0x3F800000u));
#endif
}

/// z / (1 + exp(-u)), for the z and u that nodes::times_logistic takes. NaN stays NaN.
CUTLASS_HOST_DEVICE float times_logistic(float z, float u) {
  return nodes::divide_by_normal(z, add(exp(-u), 1.0f));
}

/// condition ? a : b with both computed: the compiler may branch for a plain choice between long expressions.
CUTLASS_HOST_DEVICE float either(bool condition, float a, float b) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{\n"
      ".reg .pred p;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "selp.f32 %0, %1, %2, p;\n"
      "}"
      : "=f"(y)
      : "f"(a), "f"(b), "r"(static_cast<unsigned>(condition)));
  return y;
#else
  return condition ? a : b;
#endif
}

CUTLASS_HOST_DEVICE float tanh(float x) {
  float const a = abs(x);
  float const s = mul(x, x);
  float p = -0.00571702421f;
  p = add(mul(s, p), 0.0206505675f);
  p = add(mul(s, p), -0.0537434928f);
  p = add(mul(s, p), 0.133314908f);
  p = add(mul(s, p), -0.333332837f);
  float const small = add(mul(mul(x, s), p), x);
  float const large = sub(1.0f, nodes::divide_by_normal(2.0f, add(exp(add(a, a)), 1.0f)));
  return either(a < 0.625f, small, x < 0.0f ? -large : large);
}

CUTLASS_HOST_DEVICE float erf(float x) {
  float const a = abs(x);
  float const s = mul(x, x);
  float p = 7.85384909e-05f;
  p = add(mul(s, p), -0.000801018963f);
  p = add(mul(s, p), 0.00518832728f);
  p = add(mul(s, p), -0.026853811f);
  p = add(mul(s, p), 0.112835854f);
  p = add(mul(s, p), -0.37612626f);
  p = add(mul(s, p), 0.128379166f);
  float const small = add(mul(x, p), x);
  float const t = a > 4.0f ? 4.0f : a;
  float q = -0.000210184589f;
  q = add(mul(t, q), 0.00318313716f);
  q = add(mul(t, q), -0.0227861479f);
  q = add(mul(t, q), 0.105096765f);
  q = add(mul(t, q), 0.635846317f);
  q = add(mul(t, q), 1.12847555f);
  float const large = sub(1.0f, exp(-mul(t, q)));
  return either(a < 1.0f, small, x < 0.0f ? -large : large);
}

#if !defined(__CUDACC_RTC__)
namespace detail {

/// The number that is nearest to x among those with kBits bits after the leading one and with exponents from
/// kLeastExponent on; below that, the multiples of the least positive one. Ties go to the even one.
template <int kBits, int kLeastExponent>
inline float nearest(float x) {
  if (!(std::fabs(x) < std::numeric_limits<float>::infinity()) || x == 0.0f) {
    return x;
  }
  int const exponent = std::ilogb(x);
  int const unit = (exponent > kLeastExponent ? exponent : kLeastExponent) - kBits;
  return std::copysign(std::ldexp(std::nearbyint(std::ldexp(x, -unit)), unit), x);
}

}  // namespace detail
#endif

/// The bfloat16 number that is nearest to x.
CUTLASS_HOST_DEVICE float cast_bf16(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{\n"
      ".reg .b16 h, z;\n"
      "cvt.rn.bf16.f32 h, %1;\n"
      "mov.b16 z, 0;\n"
      "mov.b32 %0, {z, h};\n"
      "}"
      : "=f"(y)
      : "f"(x));
  return y;
#else
  return detail::nearest<7, -126>(x);
#endif
}

/// The float16 number that is nearest to x, infinity beyond the largest one.
CUTLASS_HOST_DEVICE float cast_fp16(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{\n"
      ".reg .b16 h;\n"
      "cvt.rn.f16.f32 h, %1;\n"
      "cvt.f32.f16 %0, h;\n"
      "}"
      : "=f"(y)
      : "f"(x));
  return y;
#else
  float const y = detail::nearest<10, -14>(x);
  return std::fabs(y) > 65504.0f ? std::copysign(infinity(), x) : y;
#endif
}

/// The e4m3 number that is nearest to x, at most 448 in magnitude.
CUTLASS_HOST_DEVICE float cast_e4m3(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("{\n"
      ".reg .b16 e, h, g;\n"
      ".reg .b32 b;\n"
      "cvt.rn.satfinite.e4m3x2.f32 e, 0f00000000, %1;\n"
      "cvt.rn.f16x2.e4m3x2 b, e;\n"
      "mov.b32 {h, g}, b;\n"
      "cvt.f32.f16 %0, h;\n"
      "}"
      : "=f"(y)
      : "f"(x));
  return y;
#else
  float const y = detail::nearest<3, -6>(x);
  return std::fabs(y) > 448.0f ? std::copysign(448.0f, x) : y;
#endif
}

}  // namespace cutlass_evt::op
