// The NVFP4 number formats on the device: e2m1, e4m3, and the swizzled layout of the block scales.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "cutlass_evt/scale_layout.hpp"
#include "quantize/e4m3_software.hpp"
#include "quantize/sizes.hpp"

namespace fp4gemm {

constexpr float kFloatMax = 3.40282346638528859812e+38f;

using cutlass_evt::scale_offset;

// The scales of a word of these rows, which are 32 apart in a tile, are 16 consecutive bytes.
constexpr int kQuad = 4;
// A kernel that writes the scales of a quad collects them in shared memory. Those of longer rows do not fit
// there, and are written to global memory directly.
constexpr int kMaxStagedWords = 2048;

/// e4m3(x), rounded to nearest even and saturating; NaN gives 0x7F.
__device__ inline uint8_t float_to_e4m3(float x) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
#else
  return e4m3_software::from_float(x);
#endif
}

__device__ inline __half e4m3_to_half(uint8_t x) {
#if __CUDA_ARCH__ >= 890
  return __half(__nv_cvt_fp8_to_halfraw(x, __NV_E4M3));
#else
  return __hmul(__ushort_as_half(e4m3_software::to_half_over_256(x)), __ushort_as_half(0x5C00));  // 256
#endif
}

#if defined(__CUDA_ARCH_SPECIFIC__) && __CUDA_ARCH_SPECIFIC__ >= 1000 || \
    defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define FP4GEMM_HAS_CVT_E2M1 1
#else
#define FP4GEMM_HAS_CVT_E2M1 0
#endif

/// a * b + c, rounded once and clamped to [0, 1]. NaN gives 0.
__device__ inline float saturated_fma(float a, float b, float c) {
  float result;
  asm("fma.rn.sat.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
  return result;
}

// Rounding to e2m1 with FMA instructions. Neighbouring floats differ by 1/2 just below 2^23 and by 1 above
// it, as e2m1 values do below and above 2. The sum 2^23 - 2 + min(p, 4) is therefore rounded as e2m1 rounds p
// up to 4, ties to the neighbour with even bits, and its bits count the codes. The step from 4 to 6 is
// included by adding half of the excess of p over 4.

constexpr float kE2m1Start = 8388606.0f;  // 2^23 - 2
constexpr uint32_t kE2m1StartBits = 0x4B000000u - 4;

/// A magnitude p as the two parts of that sum. NaN counts as zero.
struct E2m1Parts {
  float up_to_4;  // min(p, 4) / 4
  float above_4;  // (min(max(p, 4), 6) - 4) / 2

  __device__ explicit E2m1Parts(float p)
      : up_to_4(saturated_fma(p, 0.25f, 0.0f)), above_4(saturated_fma(p, 0.5f, -2.0f)) {}
};

/// kE2m1StartBits plus the e2m1 code of |x * factor|, rounded to nearest even and saturating. Of p, (p + 4) /
/// 2 and 5 the first is the least up to 4, the second up to 6, and rounding keeps the order. Bits of positive
/// floats compare as the numbers do.
__device__ inline uint32_t e2m1_bits(float x, float factor) {
  float const p = __fmul_rn(fabsf(x), factor);
  uint32_t const up_to_4 = __float_as_uint(__fadd_rn(p, kE2m1Start));
  uint32_t const above_4 = __float_as_uint(__fmaf_rn(p, 0.5f, kE2m1Start + 2.0f));
  return __vimin3_u32(up_to_4, above_4, kE2m1StartBits + 7);
}

// Stochastic rounding to e2m1. The numbers of e2m1 have the exponents 0, for which they are subnormal as well
// as normal, 1 and 2, and one bit of mantissa. Divided by 2^14 they are the fp16 numbers of the exponents -14
// (subnormal as well as normal), -13 and -12 with nine more bits of mantissa. The fp16 bits of p * 2^-14,
// rounded toward zero, are therefore 512 * code + floor(512 f), where code is that of the neighbour of p that
// is nearer to zero, and f in [0, 1) is the position of p between its two neighbours.

constexpr float kStochasticFactor = 0x1p-14f;

/// The sums of two elements, a half of a word each: the code of element * factor * 2^14, rounded
/// stochastically and saturating, in bits 9 to 11 and its sign in bit 15. `low` and `high` are the products
/// of elements and factors. An element is rounded away from zero if floor(256 f) + random >= 256, where
/// `random` has a number from 0 to 255 for each of them. The magnitude of a sum is below 4096, since that of
/// 6 is 3584.
__device__ inline uint32_t stochastic_sums(float low, float high, uint32_t random) {
  uint32_t bits;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  constexpr uint32_t kSix = 0x0E000E00u;  // 6 * 2^-14 in each half
#if __CUDA_ARCH__ >= 860
  asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(bits) : "r"(kSix));  // the sign of each half stays
#else
  bits = __vminu2(bits & 0x7FFF7FFFu, kSix) | (bits & 0x80008000u);
#endif
  return bits + 2 * random;
}

/// Eight codes in one word, nibble i that of element i, from the sums of elements 0 and 2, 1 and 3, 4 and 6,
/// and 5 and 7.
__device__ inline uint32_t pack_stochastic(uint32_t of_02, uint32_t of_13, uint32_t of_46, uint32_t of_57) {
  uint32_t const even =
      __byte_perm(of_02, of_46, 0x7531);  // a byte each: the sign, three zeros, the code, one bit
  uint32_t const odd = __byte_perm(of_13, of_57, 0x7531);
  uint32_t const low = (even >> 1 & 0x07070707u) | (even >> 4 & ~0x07070707u);
  uint32_t const high = (odd << 3 & 0x70707070u) | (odd & ~0x70707070u);
  return (low & 0x0F0F0F0Fu) | (high & 0xF0F0F0F0u);
}

/// Eight codes in one word: nibble i is bits[i] - start.
__device__ inline uint32_t pack_codes(uint32_t const (&bits)[8], uint32_t start) {
  uint32_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pair[i] = bits[2 * i + 1] * 16 + bits[2 * i];
  }
  uint32_t const low = pair[1] * 256 + pair[0];
  uint32_t const high = pair[3] * 256 + pair[2];
  return high * 65536 + low - start * 0x11111111u;
}

/// The two codes in the low byte of `codes` as fp16, times 2^-14. The bits of e2m1 are moved to the sign, the
/// low exponent bits and the high mantissa bit of fp16.
__device__ inline __half2 e2m1_pair_unscaled(uint32_t codes) {
  uint32_t const low = (codes & 0x8u) << 12 | (codes & 0x7u) << 9;
  uint32_t const high = (codes & 0x80u) << 24 | (codes & 0x70u) << 21;
  uint32_t const bits = low | high;
  return reinterpret_cast<__half2 const&>(bits);
}

/// The two codes in the low byte of `codes` as fp16, exactly.
__device__ inline __half2 decode_e2m1_pair(uint32_t codes) {
  return __hmul2(e2m1_pair_unscaled(codes), __float2half2_rn(16384.0f));
}

/// Eight codes times their block scale as fp16, exactly.
__device__ inline uint4 decode_eight(uint32_t codes, uint8_t scale_bits) {
  __half2 const scale = __half2half2(e4m3_to_half(scale_bits));
  uint4 result;
  __half2* const pairs = reinterpret_cast<__half2*>(&result);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __hmul2(decode_e2m1_pair(codes >> (8 * i)), scale);
  }
  return result;
}

}  // namespace fp4gemm
