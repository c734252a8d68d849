// Encoding and decoding of floating-point formats of any width up to 32 bits.
#include "numeric.hpp"

#include <algorithm>
#include <climits>
#include <cmath>

namespace ptxemu {

namespace {

/// A format without its sign bit. `largest`, `infinity` and `nan` are codes; formats without infinity name
/// the largest finite value there.
struct Format {
  int exponent_bits, mantissa_bits, bias;
  u32 largest, infinity, nan;
};

constexpr Format kE2m1 = {2, 1, 1, 7, 7, 7};
constexpr Format kE4m3 = {4, 3, 7, 0x7E, 0x7E, 0x7F};
constexpr Format kE5m2 = {5, 2, 15, 0x7B, 0x7C, 0x7F};
constexpr Format kF16 = {5, 10, 15, 0x7BFF, 0x7C00, 0x7FFF};
constexpr Format kBf16 = {8, 7, 127, 0x7F7F, 0x7F80, 0x7FFF};
constexpr Format kF32 = {8, 23, 127, 0x7F7FFFFF, 0x7F800000, 0x7FFFFFFF};

/// Codes of positive values are in the order of the values, so a carry out of the mantissa increments the
/// exponent.
u32 encode(Format const& format, double x, Rounding rounding, bool satfinite) {
  if (std::isnan(x)) {
    return format.nan;
  }
  u32 const sign = static_cast<u32>(std::signbit(x)) << (format.exponent_bits + format.mantissa_bits);
  double const magnitude = std::fabs(x);
  if (std::isinf(x)) {
    return sign | (satfinite ? format.largest : format.infinity);
  }
  if (magnitude == 0) {
    return sign;
  }
  if (rounding == Rounding::kUp || rounding == Rounding::kDown) {
    rounding = (rounding == Rounding::kUp) == (sign == 0) ? Rounding::kUp : Rounding::kZero;
  }
  int const exponent = std::max(std::ilogb(magnitude), 1 - format.bias);
  double const steps = round_to_integer(std::ldexp(magnitude, format.mantissa_bits - exponent), rounding);
  u64 const first_normal = 1ull << format.mantissa_bits;
  u64 const code = static_cast<u64>(steps) - first_normal +
                   (static_cast<u64>(exponent + format.bias) << format.mantissa_bits);
  // The exponent of a subnormal value was raised to that of the smallest normal value; `steps` is then less
  // than `first_normal`, which makes the exponent field 0.
  if (code > format.largest) {
    return sign | (satfinite || rounding == Rounding::kZero ? format.largest : format.infinity);
  }
  return sign | static_cast<u32>(code);
}

float decode(Format const& format, u32 code) {
  u32 const exponent = code >> format.mantissa_bits & ((1u << format.exponent_bits) - 1);
  u32 const mantissa = code & ((1u << format.mantissa_bits) - 1);
  float const magnitude =
      exponent == 0 ? std::ldexp(static_cast<float>(mantissa), 1 - format.bias - format.mantissa_bits)
                    : std::ldexp(static_cast<float>(mantissa + (1u << format.mantissa_bits)),
                                 static_cast<int>(exponent) - format.bias - format.mantissa_bits);
  return code >> (format.exponent_bits + format.mantissa_bits) & 1 ? -magnitude : magnitude;
}

}  // namespace

double round_to_integer(double x, Rounding rounding) {
  switch (rounding) {
    case Rounding::kNearest: return std::nearbyint(x);
    case Rounding::kZero: return std::trunc(x);
    case Rounding::kDown: return std::floor(x);
    default: return std::ceil(x);
  }
}

float decode_e2m1(u32 code) { return decode(kE2m1, code & 15); }

float decode_e4m3(u32 code) { return (code & 0x7F) == 0x7F ? NAN : decode(kE4m3, code & 0xFF); }

float decode_e5m2(u32 code) {
  u32 const magnitude = code & 0x7F;
  if (magnitude >= 0x7C) {
    return magnitude > 0x7C ? NAN : (code & 0x80 ? -INFINITY : INFINITY);
  }
  return decode(kE5m2, code & 0xFF);
}

float decode_e8m0(u32 code) {
  return (code & 0xFF) == 0xFF ? NAN : std::ldexp(1.0f, static_cast<int>(code & 0xFF) - 127);
}

float decode_f16(u32 code) {
  u32 const magnitude = code & 0x7FFF;
  if (magnitude >= 0x7C00) {
    return magnitude > 0x7C00 ? NAN : (code & 0x8000 ? -INFINITY : INFINITY);
  }
  return decode(kF16, code & 0xFFFF);
}

u32 encode_e2m1(double x, Rounding rounding) { return encode(kE2m1, x, rounding, true); }

u32 encode_e4m3(double x, Rounding rounding) { return encode(kE4m3, x, rounding, true); }

u32 encode_e5m2(double x, Rounding rounding) { return encode(kE5m2, x, rounding, true); }

u32 encode_e8m0(double x, Rounding rounding) {
  if (std::isnan(x)) {
    return 0xFF;
  }
  double const magnitude = std::fabs(x);
  if (magnitude == 0) {
    return 0;
  }
  if (std::isinf(magnitude)) {
    return 0xFE;
  }
  int const exponent = std::ilogb(magnitude);
  bool const exact = std::ldexp(1.0, exponent) == magnitude;
  int const code = exponent + 127 + (rounding == Rounding::kUp && !exact ? 1 : 0);
  return static_cast<u32>(std::clamp(code, 0, 0xFE));
}

u32 encode_f16(double x, Rounding rounding, bool satfinite) { return encode(kF16, x, rounding, satfinite); }

u32 encode_bf16(double x, Rounding rounding, bool satfinite) { return encode(kBf16, x, rounding, satfinite); }

float round_to_float(double x, Rounding rounding) {
  return rounding == Rounding::kNearest ? static_cast<float>(x) : as_float(encode(kF32, x, rounding, false));
}

Summand summand(float x, int least) {
  if (x == 0) {
    return {0, least, least};
  }
  int const exponent = std::max(std::ilogb(x), least);
  return {static_cast<i64>(std::ldexp(x, 23 - exponent)), exponent - 23, exponent};
}

Summand operator*(Summand const& a, Summand const& b) {
  return {a.units * b.units, a.unit_exponent + b.unit_exponent, a.exponent + b.exponent};
}

float truncated_sum(Summand const* summands, int count, int fraction_bits) {
  int largest = INT_MIN;
  for (int i = 0; i < count; ++i) {
    largest = std::max(largest, summands[i].units == 0 ? -126 : summands[i].exponent);
  }
  i64 sum = 0;
  for (int i = 0; i < count; ++i) {
    Summand const& s = summands[i];
    int const shift = s.unit_exponent - (largest - fraction_bits);
    if (shift >= 0) {
      sum += s.units << shift;
    } else if (shift > -63) {
      sum += s.units < 0 ? -(-s.units >> -shift) : s.units >> -shift;  // towards zero
    }
  }
  double const exact = std::ldexp(static_cast<double>(sum), largest - fraction_bits);
  float const rounded = static_cast<float>(exact);
  bool const away = std::fabs(static_cast<double>(rounded)) > std::fabs(exact);
  return away && std::fabs(exact) < 0x1p128 ? std::nextafter(rounded, 0.0f) : rounded;
}

}  // namespace ptxemu
