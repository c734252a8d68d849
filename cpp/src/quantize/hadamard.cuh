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

/// The transformed block, of which elements are negated first.
///
/// @tparam Out The type that its values are rounded to; float means no rounding.
/// @tparam T The type of the input.
template <class Out, class T>
__device__ inline Block<Out> rotated(Block<T> block, SignMasks const& signs) {
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    block.words[i] ^= signs.words[i];
  }
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
