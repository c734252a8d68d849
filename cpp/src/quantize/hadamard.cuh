// The 16-point random Hadamard transform of a block.
#pragma once

#include "quantize/block.cuh"

namespace fp4gemm {

/// x becomes x H16 / 4, by fp32 butterflies of stride 1, 2, 4 and 8.
__device__ inline void rotate(float (&x)[kBlock]) {
#pragma unroll
  for (int stride = 1; stride < kBlock; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      if ((i & stride) == 0) {
        float const a = x[i];
        float const b = x[i + stride];
        x[i] = __fadd_rn(a, b);
        x[i + stride] = __fsub_rn(a, b);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = __fmul_rn(x[i], 0.25f);
  }
}

/// The bits that negate elements of a block, for each of its words. Kernels have them in their parameters,
/// since an instruction can read a mask in constant memory, but needs others before it to make one from
/// `signs`.
struct SignMasks {
  uint32_t words[kBlock];
};

/// The masks that negate element r of a block where bit r of `signs` is set.
inline SignMasks sign_masks(uint32_t signs, fp4gemm_dtype_t dtype) {
  SignMasks masks{};
  for (int r = 0; r < kBlock; ++r) {
    uint32_t const sign = signs >> r & 1u;
    if (dtype == FP4GEMM_FP32) {
      masks.words[r] = sign << 31;
    } else {
      masks.words[r / 2] |= sign << (r % 2 == 0 ? 15 : 31);
    }
  }
  return masks;
}

/// The elements of a block of T with these words, of which some are negated first.
template <class T>
__device__ inline void unpack_signed(uint32_t const* words, SignMasks const& signs, float (&x)[kBlock]) {
  Block<T> block;
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    block.words[i] = words[i] ^ signs.words[i];
  }
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = block.element(i);
  }
}

/// unpack_signed for bf16 or fp16, whichever dtype is. All threads take the same branch. The conversion alone
/// depends on the type, so that one kernel serves both.
__device__ inline void unpack_signed_half(uint32_t const* words, fp4gemm_dtype_t dtype,
                                          SignMasks const& signs, float (&x)[kBlock]) {
  if (dtype == FP4GEMM_FP16) {
    unpack_signed<__half>(words, signs, x);
  } else {
    unpack_signed<__nv_bfloat16>(words, signs, x);
  }
}

/// The transform of x, whose elements are lost.
///
/// @tparam Out The type that its values are rounded to; float means no rounding.
template <class Out>
__device__ inline Block<Out> rotated(float (&x)[kBlock]) {
  rotate(x);
  Block<Out> result;
#pragma unroll
  for (int i = 0; i < Block<Out>::kWords; ++i) {
    if constexpr (sizeof(Out) == 4) {
      result.words[i] = __float_as_uint(x[i]);
    } else {
      result.words[i] = pack_pair<Out>(x[2 * i], x[2 * i + 1]);
    }
  }
  return result;
}

/// Rounds the elements of a block to bf16.
__device__ inline void round_to_bf16(Block<float>& block) {
#pragma unroll
  for (int i = 0; i < kBlock; i += 2) {
    uint32_t const pair = pack_pair<__nv_bfloat16>(block.element(i), block.element(i + 1));
    block.words[i] = pair << 16;
    block.words[i + 1] = pair & 0xFFFF0000u;
  }
}

}  // namespace fp4gemm
