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

/// The block with element r negated where bit r of `signs` is set.
template <class T>
__device__ inline Block<T> negated(Block<T> block, uint32_t signs) {
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    if constexpr (sizeof(T) == 4) {
      block.words[i] ^= signs << (31 - i) & 0x80000000u;
    } else {
      block.words[i] ^= (signs << (15 - 2 * i) & 0x8000u) | (signs << (30 - 2 * i) & 0x80000000u);
    }
  }
  return block;
}

/// The transformed block.
///
/// @tparam Out The type that its values are rounded to; float means no rounding.
/// @tparam T The type of the input.
template <class Out, class T>
__device__ inline Block<Out> rotated(Block<T> block, uint32_t signs) {
  block = negated(block, signs);
  float x[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    x[i] = block.element(i);
  }
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

}  // namespace fp4gemm
