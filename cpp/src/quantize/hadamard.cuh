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

/// A rotation in fp32 whose signs depend on the seed, that of FP4GEMM_ENCODE_EDEN. All others are named by
/// the type that their values are rounded to.
struct DrawnSigns {};

/// The type of rotated values; float means no rounding.
template <class Rotation>
using RotatedTo = cuda::std::conditional_t<cuda::std::is_same_v<Rotation, DrawnSigns>, float, Rotation>;

/// The masks of a rotation: those of the parameters, which the object refers to.
template <class Rotation>
class Signs {
 public:
  __device__ Signs(SignMasks const& masks, int64_t const* /*rng_state*/) : masks_(masks) {}

  /// The mask of word i of a block of T.
  template <class T>
  __device__ uint32_t word(int i) const {
    return masks_.words[i];
  }

 private:
  SignMasks const& masks_;
};

/// Those masks, changed by the 16 highest bits of seed * 0x9E3779B97F4A7C15.
template <>
class Signs<DrawnSigns> {
 public:
  __device__ Signs(SignMasks const& masks, int64_t const* rng_state)
      : masks_(masks),
        drawn_(static_cast<uint32_t>(
            static_cast<uint64_t>(load_after_wait(rng_state)) * 0x9E3779B97F4A7C15ull >> 48)) {}

  template <class T>
  __device__ uint32_t word(int i) const {
    if constexpr (sizeof(T) == 4) {
      return masks_.words[i] ^ (drawn_ << (31 - i) & 0x80000000u);
    } else {
      return masks_.words[i] ^ (drawn_ << (15 - 2 * i) & 0x8000u) ^ (drawn_ << (30 - 2 * i) & 0x80000000u);
    }
  }

 private:
  SignMasks const& masks_;
  uint32_t drawn_;
};

/// The transformed block, of which elements are negated first.
///
/// @tparam Rotation The type that its values are rounded to, or DrawnSigns.
/// @tparam T The type of the input.
template <class Rotation, class T>
__device__ inline Block<RotatedTo<Rotation>> rotated(Block<T> block, Signs<Rotation> const& signs) {
  using Out = RotatedTo<Rotation>;
#pragma unroll
  for (int i = 0; i < Block<T>::kWords; ++i) {
    block.words[i] ^= signs.template word<T>(i);
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
