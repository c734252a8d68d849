// The small floating-point formats: exact decoding, and encoding from double with one rounding (PTX ISA,
// "Alternate Floating-Point Data Formats").
#pragma once

#include "ptx.hpp"

namespace ptxemu {

float decode_e2m1(u32 code);
float decode_e4m3(u32 code);
float decode_e5m2(u32 code);
float decode_e8m0(u32 code);
float decode_f16(u32 code);
/// ue4m3, the type of the scale factors of products, has 7 bits. The tensor cores ignore bit 7 of the byte.
inline float decode_ue4m3(u32 code) { return decode_e4m3(code & 0x7F); }
inline float decode_bf16(u32 code) { return as_float(code << 16); }

/// The formats of 4 and 8 bits saturate: values beyond the largest finite value become that value.
/// `satfinite` asks for the same of the 16-bit formats, which otherwise overflow to infinity.
u32 encode_e2m1(double x, Rounding rounding = Rounding::kNearest);
u32 encode_e4m3(double x, Rounding rounding = Rounding::kNearest);
u32 encode_e5m2(double x, Rounding rounding = Rounding::kNearest);
u32 encode_e8m0(double x, Rounding rounding);
u32 encode_f16(double x, Rounding rounding = Rounding::kNearest, bool satfinite = false);
u32 encode_bf16(double x, Rounding rounding = Rounding::kNearest, bool satfinite = false);
float round_to_float(double x, Rounding rounding = Rounding::kNearest);

/// A summand of a fused sum: units * 2^unit_exponent, which is aligned by `exponent`.
struct Summand {
  i64 units;
  int unit_exponent, exponent;
};
/// `x` as a summand that is aligned by its exponent, of which the least is `least`, that of subnormal
/// numbers. Exact for finite numbers of up to 24 significant bits.
Summand summand(float x, int least);
/// The product of two summands.
Summand operator*(Summand const& a, Summand const& b);
/// The fused sum of MMA-Sim's model of the tensor cores (Xie et al., "MMA-Sim: Bit-Accurate Reference Model
/// of Tensor Cores and Matrix Cores", arXiv 2511.10909): each summand is truncated to `fraction_bits` below
/// the largest exponent, and their sum to fp32. A zero has the exponent -126.
float truncated_sum(Summand const* summands, int count, int fraction_bits);
constexpr u32 kTensorCoreNan = 0x7FFFFFFF;

/// Rounds to an integer in the given direction; kNearest rounds ties to even.
double round_to_integer(double x, Rounding rounding);

/// .ftz: a subnormal number becomes a zero of the same sign.
inline float flush_denormal(float x) {
  u32 const bits = as_bits(x);
  return (bits & 0x7F800000u) == 0 ? as_float(bits & 0x80000000u) : x;
}

}  // namespace ptxemu
