// Conversions of e4m3 for devices without instructions for them, those before 8.9. Plain C++, so that a host
// test compares them with CUDA's.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define FP4GEMM_HOST_DEVICE __host__ __device__
#else
#define FP4GEMM_HOST_DEVICE
#endif

namespace fp4gemm::e4m3_software {

FP4GEMM_HOST_DEVICE inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

FP4GEMM_HOST_DEVICE inline float from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

/// e4m3(x), rounded to nearest even and saturating; NaN gives 0x7F.
///
/// Let 2^e be the power of two of |x|, but at least 2^-6. Neighbouring floats from 2^(e + 20) on differ by
/// 2^(e - 3), as e4m3 numbers near x do. The sum 2^(e + 20) + |x| is therefore rounded as e4m3 rounds |x|,
/// and its last bits count the steps of 2^(e - 3) up to |x|, of which there are 8 for each exponent above
/// 2^-6.
FP4GEMM_HOST_DEVICE inline uint8_t from_float(float x) {
  constexpr uint32_t kLeastNormal = (127u - 6u) << 23;  // the bits of 2^-6
  constexpr uint32_t kMost = 0x43E00000u;               // the bits of 448
  uint32_t const bits = bits_of(x);
  uint32_t const magnitude = bits & 0x7FFFFFFFu;
  uint32_t const clamped = magnitude < kMost ? magnitude : kMost;
  uint32_t const power = clamped & 0x7F800000u;
  uint32_t const exponent = power > kLeastNormal ? power : kLeastNormal;
  uint32_t const start = exponent + (20u << 23);
  uint32_t const steps = bits_of(from_bits(start) + from_bits(clamped)) - start;
  uint32_t const code = ((exponent - kLeastNormal) >> 20) + steps;
  return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x7Fu : code | (bits >> 24 & 0x80u));
}

/// The bits of x / 256 as fp16, which has four bits of exponent more than e4m3 needs.
FP4GEMM_HOST_DEVICE inline uint16_t to_half_over_256(uint8_t x) {
  uint32_t const magnitude = x & 0x7Fu;
  uint32_t const bits = magnitude == 0x7Fu ? 0x7FFFu : magnitude << 7 | (x & 0x80u) << 8;
  return static_cast<uint16_t>(bits);
}

}  // namespace fp4gemm::e4m3_software
