// A block of 16 input elements in registers: its loading, its amax and its products, for each input type.
#pragma once

#include <cuda/std/type_traits>

#include "quantize/numerics.cuh"

namespace fp4gemm {

/// PRMT with the mode that replicates a byte's sign, which __byte_perm does not offer.
__device__ inline uint32_t permute_signs(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

/// bf16 and fp16: two elements a word.
template <class T>
struct Block {
  static_assert(sizeof(T) == 2, "fp32 has a specialisation");
  static constexpr int kVectors = 2;
  static constexpr uint32_t kInfinity = cuda::std::is_same_v<T, __half> ? 0x7C00u : 0x7F80u;
  uint4 vectors[kVectors];

  __device__ uint32_t const* words() const { return reinterpret_cast<uint32_t const*>(vectors); }
  __device__ uint32_t* words() { return reinterpret_cast<uint32_t*>(vectors); }

  /// The bits of max |x|; they order as the numbers do, NaN above infinity.
  __device__ uint32_t amax_bits() const {
    uint32_t packed = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      packed = __vmaxu2(packed, words()[i] & 0x7FFF7FFFu);
    }
    return max(packed >> 16, packed & 0xFFFFu);
  }

  __device__ static float from_bits(uint32_t bits) {
    if constexpr (cuda::std::is_same_v<T, __half>) {
      return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    } else {
      return __uint_as_float(bits << 16);
    }
  }

  __device__ float element(int i) const {
    return from_bits(i % 2 == 0 ? words()[i / 2] & 0xFFFFu : words()[i / 2] >> 16);
  }

  __device__ uint32_t magnitude_bits(int i) const {
    return (i % 2 == 0 ? words()[i / 2] : words()[i / 2] >> 16) & 0x7FFFu;
  }

  /// Bit 4i+3 set where element 8 * half + i is negative.
  __device__ uint32_t signs(int half) const {
    uint32_t const* w = words() + 4 * half;
    uint32_t const first = permute_signs(w[0], w[1], 0xFBD9);   // signs of elements 0, 2, 1, 3, a byte each
    uint32_t const second = permute_signs(w[2], w[3], 0xFBD9);  // 4, 6, 5, 7
    uint32_t const even = __byte_perm(first, second, 0x5410);
    uint32_t const odd = __byte_perm(first, second, 0x7632);
    return (even & 0x08080808u) | (odd & 0x80808080u);
  }
};

template <>
struct Block<float> {
  static constexpr int kVectors = 4;
  static constexpr uint32_t kInfinity = 0x7F800000u;
  uint4 vectors[kVectors];

  __device__ uint32_t const* words() const { return reinterpret_cast<uint32_t const*>(vectors); }
  __device__ uint32_t* words() { return reinterpret_cast<uint32_t*>(vectors); }

  __device__ uint32_t amax_bits() const {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      bits = max(bits, magnitude_bits(i));
    }
    return bits;
  }

  __device__ static float from_bits(uint32_t bits) { return __uint_as_float(bits); }

  __device__ float element(int i) const { return __uint_as_float(words()[i]); }

  __device__ uint32_t magnitude_bits(int i) const { return words()[i] & 0x7FFFFFFFu; }

  __device__ uint32_t signs(int half) const {
    uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      result |= words()[8 * half + i] >> 31 << (4 * i + 3);
    }
    return result;
  }
};

/// Loads the 16 elements at x, which is 16-byte aligned. The input is read once, so it need not stay in the
/// caches.
template <class T>
__device__ inline Block<T> load_block(T const* x) {
  Block<T> block;
#pragma unroll
  for (int i = 0; i < Block<T>::kVectors; ++i) {
    block.vectors[i] = __ldg(reinterpret_cast<uint4 const*>(x) + i);
  }
  return block;
}

/// The bits of max |x| with NaN ignored. Few inputs hold NaN, so that this stays out of the way of the
/// others.
template <class T>
__device__ __noinline__ uint32_t amax_bits_ignoring_nan(Block<T> block) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    uint32_t const magnitude = block.magnitude_bits(i);
    bits = max(bits, magnitude <= Block<T>::kInfinity ? magnitude : 0u);
  }
  return bits;
}

/// Bit 4i+3 set where element 8 * half + i is not NaN; the other bits are set too.
template <class T>
__device__ __noinline__ uint32_t sign_mask_ignoring_nan(Block<T> block, int half) {
  uint32_t mask = ~0u;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t const magnitude = half == 0 ? block.magnitude_bits(i) : block.magnitude_bits(8 + i);
    mask &= magnitude <= Block<T>::kInfinity ? ~0u : ~(8u << (4 * i));
  }
  return mask;
}

/// The factors that the amax of a row or tensor determines (spec: TransformerEngine >= 2.14, row or tensor
/// amax A).
struct OuterScale {
  float block_factor;  // block scale = e4m3(amax_block * block_factor)
  float decode;        // 1 / S

  __device__ explicit OuterScale(float amax) {
    float encode = fminf(__fdiv_rn(2688.0f, amax), kFloatMax);
    encode = encode == 0.0f ? 1.0f : encode;  // amax is infinite
    block_factor = __fmul_rn(encode, 1.0f / 6.0f);
    decode = __frcp_rn(encode);
  }
};

/// A quantized block: 16 codes and their scale.
struct QuantizedBlock {
  uint2 codes;
  uint8_t scale;
};

/// amax: max |x| of the block, NaN ignored. may_have_nan: false only if no element is NaN.
template <class T>
__device__ inline QuantizedBlock quantize_block(Block<T> const& block, float amax, bool may_have_nan,
                                                OuterScale const& outer) {
  QuantizedBlock result;
  result.scale = float_to_e4m3(fminf(__fmul_rn(amax, outer.block_factor), kFloatMax));
  float const scale = __half2float(e4m3_to_half(result.scale));
  // A scale of zero gives 1 / 0 = infinity, clamped: every nonzero element saturates, as the definition has
  // it.
  float const encode = fminf(__frcp_rn(__fmul_rn(scale, outer.decode)), kFloatMax);
  uint32_t codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t signs = block.signs(half);
    if (may_have_nan) {
      signs &= sign_mask_ignoring_nan(block, half);
    }
    float product[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      product[i] = __fmul_rn(block.element(8 * half + i), encode);
    }
    codes[half] = encode_e2m1(product, signs);
  }
  result.codes = {codes[0], codes[1]};
  return result;
}

}  // namespace fp4gemm
