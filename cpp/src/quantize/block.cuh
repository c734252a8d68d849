// A block of 16 input elements in the registers of one thread: loading, amax and encoding, for each input
// type.
#pragma once

#include <cuda/std/type_traits>

#include "cutlass_evt/load_after_wait.hpp"
#include "quantize/numerics.cuh"

namespace fp4gemm {

using cutlass_evt::load_after_wait;

/// PRMT. A selector with bit 3 set replicates the sign of a byte, which __byte_perm does not offer.
__device__ inline uint32_t permute_signs(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

/// A block of T, which is __nv_bfloat16 or __half: two elements in each word. float has a specialisation
/// below.
template <class T>
struct Block {
  static_assert(sizeof(T) == 2, "fp32 has a specialisation");
  static constexpr int kWords = 8;
  /// The bits of infinity, as amax_bits has them: larger bits are a NaN.
  static constexpr uint32_t kInfinity = cuda::std::is_same_v<T, __half> ? 0x7C00u : 0x7F80u;

  uint32_t words[kWords];

  /// The bits of max |x|. Bits compare as the numbers do, and a NaN is above infinity.
  __device__ uint32_t amax_bits() const {
    uint32_t packed = __vmaxu2(words[0] & 0x7FFF7FFFu, words[1] & 0x7FFF7FFFu);
#pragma unroll
    for (int i = 2; i < kWords; i += 2) {
      packed = __vimax3_u16x2(packed, words[i] & 0x7FFF7FFFu, words[i + 1] & 0x7FFF7FFFu);
    }
    return max(packed >> 16, packed & 0xFFFFu);
  }

  /// The number whose bits amax_bits or magnitude_bits returned.
  __device__ static float from_bits(uint32_t bits) {
    if constexpr (cuda::std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    } else {
      return __uint_as_float(bits << 16);
    }
  }

  __device__ uint32_t magnitude_bits(int i) const {
    uint32_t const pair = words[i / 2] & 0x7FFF7FFFu;
    return i % 2 == 0 ? pair & 0xFFFFu : pair >> 16;
  }

  __device__ float element(int i) const {
    uint32_t const pair = words[i / 2];
    if constexpr (cuda::std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(i % 2 == 0 ? pair : pair >> 16)));
    } else {
      return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xFFFF0000u);
    }
  }

  __device__ void set_infinite(int i) {
    uint32_t const mask = i % 2 == 0 ? 0xFFFFu : 0xFFFF0000u;
    words[i / 2] = (words[i / 2] & ~mask) | (kInfinity * 0x00010001u & mask);
  }

  /// Bit 4i+3 set where element 8 * half + i is negative.
  __device__ uint32_t signs(int half) const {
    uint32_t const* w = words + 4 * half;
    uint32_t const first = permute_signs(w[0], w[1], 0xFBD9);   // signs of elements 0, 2, 1, 3, a byte each
    uint32_t const second = permute_signs(w[2], w[3], 0xFBD9);  // 4, 6, 5, 7
    uint32_t const even = __byte_perm(first, second, 0x5410);
    uint32_t const odd = __byte_perm(first, second, 0x7632);
    return (even & 0x08080808u) | (odd & 0x80808080u);
  }
};

template <>
struct Block<float> {
  static constexpr int kWords = 16;
  static constexpr uint32_t kInfinity = 0x7F800000u;

  uint32_t words[kWords];

  __device__ uint32_t amax_bits() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kWords; i += 2) {
      bits = __vimax3_u32(bits, words[i] & 0x7FFFFFFFu, words[i + 1] & 0x7FFFFFFFu);
    }
    return bits;
  }

  __device__ static float from_bits(uint32_t bits) { return __uint_as_float(bits); }

  __device__ uint32_t magnitude_bits(int i) const { return words[i] & 0x7FFFFFFFu; }

  __device__ float element(int i) const { return __uint_as_float(words[i]); }

  __device__ void set_infinite(int i) { words[i] = kInfinity; }

  __device__ uint32_t signs(int half) const {
    uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      result |= words[8 * half + i] >> 31 << (4 * i + 3);
    }
    return result;
  }
};

/// Two numbers, each rounded to T, in one word: `low` is in the low half.
template <class T>
__device__ inline uint32_t pack_pair(float low, float high) {
  if constexpr (cuda::std::is_same_v<T, __half>) {
    __half2 const pair = __floats2half2_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  } else {
    __nv_bfloat162 const pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<uint32_t const&>(pair);
  }
}

/// The products of two pairs of T, each rounded once to T.
template <class T>
__device__ inline uint32_t multiply_pair(uint32_t a, uint32_t b) {
  if constexpr (cuda::std::is_same_v<T, __half>) {
    __half2 const product =
        __hmul2_rn(reinterpret_cast<__half2 const&>(a), reinterpret_cast<__half2 const&>(b));
    return reinterpret_cast<uint32_t const&>(product);
  } else {
    __nv_bfloat162 const product =
        __hmul2_rn(reinterpret_cast<__nv_bfloat162 const&>(a), reinterpret_cast<__nv_bfloat162 const&>(b));
    return reinterpret_cast<uint32_t const&>(product);
  }
}

/// Loads the 16 elements at x, which must be 16-byte aligned.
template <class T>
__device__ inline Block<T> load_block(T const* x) {
  Block<T> block;
#pragma unroll
  for (int i = 0; i < Block<T>::kWords / 4; ++i) {
    uint4 const vector = load_after_wait(reinterpret_cast<uint4 const*>(x) + i);
    block.words[4 * i] = vector.x;
    block.words[4 * i + 1] = vector.y;
    block.words[4 * i + 2] = vector.z;
    block.words[4 * i + 3] = vector.w;
  }
  return block;
}

/// The bits of max |x|, NaN ignored, for blocks that hold one; block_amax_bits is faster for others.
template <class T>
__device__ inline uint32_t amax_bits_ignoring_nan(Block<T> const& block) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    uint32_t const magnitude = block.magnitude_bits(i);
    bits = max(bits, magnitude <= Block<T>::kInfinity ? magnitude : 0u);
  }
  return bits;
}

/// The bits of max |x|, NaN ignored.
template <class T>
__device__ inline uint32_t block_amax_bits(Block<T> const& block) {
  uint32_t const bits = block.amax_bits();
  return bits <= Block<T>::kInfinity ? bits : amax_bits_ignoring_nan(block);
}

/// The block with every NaN replaced by positive infinity, which has the code that is wanted for NaN, 7.
template <class T>
__device__ inline Block<T> without_nan(Block<T> block) {
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    if (block.magnitude_bits(i) > Block<T>::kInfinity) {
      block.set_infinite(i);
    }
  }
  return block;
}

/// The codes of elements 8 * half to 8 * half + 7, with that of element 8 * half + i in nibble i. A code is
/// e2m1(element * factor), rounded to nearest even and saturating. No element may be NaN.
template <class T>
__device__ inline uint32_t encode_half(Block<T> const& block, int half, float factor) {
#if FP4GEMM_HAS_CVT_E2M1
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    p[i] = __fmul_rn(block.element(8 * half + i), factor);
  }
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
      : "f"(p[0]), "f"(p[1]), "f"(p[2]), "f"(p[3]), "f"(p[4]), "f"(p[5]), "f"(p[6]), "f"(p[7]));
  return codes;
#else
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    bits[i] = e2m1_bits(block.element(8 * half + i), factor);
  }
  return pack_codes(bits, kE2m1StartBits) + block.signs(half);
#endif
}

/// The same with stochastic rounding. Byte i of (low, high) is the random number of element 8 * half + i.
///
/// @tparam kScaleFactor Whether factor * 2^-14 is a normal number, or a factor so small that every code is
///     zero. If not, the products are multiplied by 2^-14 in its place.
template <bool kScaleFactor, class T>
__device__ inline uint32_t encode_half_stochastic(Block<T> const& block, int half, float factor, uint32_t low,
                                                  uint32_t high) {
  float p[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float const x = block.element(8 * half + i);
    p[i] = kScaleFactor ? __fmul_rn(x, factor * kStochasticFactor)
                        : __fmul_rn(__fmul_rn(x, factor), kStochasticFactor);
  }
  return pack_stochastic(
      stochastic_sums(p[0], p[2], low & 0x00FF00FFu), stochastic_sums(p[1], p[3], low >> 8 & 0x00FF00FFu),
      stochastic_sums(p[4], p[6], high & 0x00FF00FFu), stochastic_sums(p[5], p[7], high >> 8 & 0x00FF00FFu));
}

}  // namespace fp4gemm
