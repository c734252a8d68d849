// The NVFP4 number formats on the device: e2m1, e4m3 and the swizzled place of a block scale.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace fp4gemm {

constexpr float kFloatMax = 3.40282346638528859812e+38f;
constexpr int kBlock = 16;  // elements that share an e4m3 scale

/// Byte offset of the scale of (row, block) in the 128x4 swizzled layout; num_words is the padded number of
/// blocks / 4.
__host__ __device__ inline int64_t scale_offset(int64_t row, int block, int num_words) {
  int const in_tile = static_cast<int>(row % 128);
  return (row / 128 * num_words + block / 4) * 512 + in_tile % 32 * 16 + in_tile / 32 * 4 + block % 4;
}

__device__ inline uint8_t float_to_e4m3(float x) {
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
}

__device__ inline __half e4m3_to_half(uint8_t x) { return __half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3)); }

#if defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1000 || \
    defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define FP4GEMM_HAS_CVT_E2M1 1
#else
#define FP4GEMM_HAS_CVT_E2M1 0
#endif

/// e2m1 codes of 8 numbers, element i in nibble i; to nearest even, saturating, NaN to 7. `signs` has bit
/// 4i+3 set where x[i] is negative and not NaN; the instruction finds that out itself.
__device__ inline uint32_t encode_e2m1(float const (&x)[8], uint32_t signs) {
#if FP4GEMM_HAS_CVT_E2M1
  uint32_t codes;
  asm("{\n"
      ".reg .b8 b0, b1, b2, b3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b0, %2, %1;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b1, %4, %3;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b2, %6, %5;\n"
      "cvt.rn.satfinite.e2m1x2.f32 b3, %8, %7;\n"
      "mov.b32 %0, {b0, b1, b2, b3};\n"
      "}"
      : "=r"(codes)
      : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
  return codes;
#else
  // The step of the grid at c is 2^(e-1), with e = 0, 1, 2 for c below 2, below 4 and the rest. Adding
  // 2^(e+22) rounds c to that step and leaves c / step in the low mantissa bits; the additional 2^e of the
  // multiplier 2^22 + 1 adds 2 there. With the exponent field shifted to bit 1 (254 + 2e) the low byte of the
  // sum is c / step + 2e modulo 256, which is the code.
  uint32_t code[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float const c = fminf(fabsf(x[i]), 6.0f);
    uint32_t const power = __float_as_uint(fmaxf(c, 1.0f)) & 0x7F800000u;  // 2^e
    float const rounded = __fmaf_rn(__uint_as_float(power), 4194305.0f, c);
    code[i] = __float_as_uint(rounded) + (power >> 22);
  }
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = code[2 * i + 1] * 16 + code[2 * i];  // only the low byte counts
  }
  uint32_t const low = __byte_perm(pair[0], pair[1], 0x0040);
  uint32_t const high = __byte_perm(pair[2], pair[3], 0x0040);
  return __byte_perm(low, high, 0x5410) | signs;
#endif
}

/// Two codes (the low byte of `codes`) as fp16, times 2^-14: the bits of e2m1 stand where fp16 has its sign,
/// its low exponent bits and its high mantissa bit.
__device__ inline __half2 e2m1_pair_unscaled(uint32_t codes) {
  uint32_t const low = (codes & 0x8u) << 12 | (codes & 0x7u) << 9;
  uint32_t const high = (codes & 0x80u) << 24 | (codes & 0x70u) << 21;
  uint32_t const bits = low | high;
  return reinterpret_cast<__half2 const&>(bits);
}

/// Two codes (the low byte of `codes`) as fp16; exact.
__device__ inline __half2 decode_e2m1_pair(uint32_t codes) {
  return __hmul2(e2m1_pair_unscaled(codes), __float2half2_rn(16384.0f));
}

}  // namespace fp4gemm
