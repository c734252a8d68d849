// Four over six: each block uses the scale that maps its largest magnitude to 6, or the one that maps it to 4
// if that gives the smaller error.
#pragma once

#include "quantize/cast.cuh"

namespace fp4gemm {

/// With b = (a / 6) * S the candidates are s6 = e4m3(min(b, 448)) and s4 = e4m3(min(b * 1.5, 448)). Elements
/// are computed as in TeCast, and s4 is used if E4 < E6. The error of a candidate is summed over the block in
/// order,
///
///     E = sum |v - x|  or  sum (v - x)^2  with  v = ((q * s) * A) / (6 B)       (exact error)
///                                         or   (v - x) = (q * s) - x * S        (fast error),
///
/// where each operation is rounded once. Approximate errors decide all but a few blocks in ten thousand.
/// Blocks whose errors are too close, and those with subnormal or clamped scales, are computed as defined.
///
/// @tparam kRange kRegular compares approximate errors and leaves the blocks that they do not decide to
///     resolve(); kAny computes all blocks as defined.
template <Range kRange>
class FourOverSixCast {
 public:
  template <Range kOther>
  using Rebind = FourOverSixCast<kOther>;

  static constexpr float kLeastAmax = 0x1p-30f;  // no square of an error underflows
  static constexpr bool kResolves = kRange == Range::kRegular;

  struct Shared {
    __device__ Shared(CastOptions const&, int /*draw*/) {}
  };

  __device__ FourOverSixCast(CastOptions const& options, Shared const&, float outer_amax)
      : outer_amax_(outer_amax),
        divisor_(6.0f * options.e4m3_max),
        mean_square_(options.mean_square),
        fast_error_(options.fast_error) {
    outer_ = OuterScale::of<kRange>(outer_amax, options.e4m3_max);
  }

  template <class T>
  __device__ bool quantize(Block<T> const& block, float amax, int64_t /*index*/,
                           QuantizedBlock& result) const {
    if constexpr (kRange == Range::kRegular) {
      return mean_square_ ? quantize_approximately<true>(block, amax, result)
                          : quantize_approximately<false>(block, amax, result);
    } else {
      Candidates const both = candidates(amax);
      QuantizedBlock four;
      QuantizedBlock six;
      float const error_4 = exact_candidate(block, both.scale_4, four);
      float const error_6 = exact_candidate(block, both.scale_6, six);
      result = error_4 < error_6 ? four : six;
      return true;
    }
  }

  struct Candidates {
    uint8_t scale_4;
    uint8_t scale_6;
  };

  __device__ Candidates candidates(float amax) const {
    float const base = __fmul_rn(__fdiv_rn(amax, 6.0f), outer_.encode);
    return {float_to_e4m3(fminf(__fmul_rn(base, 1.5f), 448.0f)), float_to_e4m3(fminf(base, 448.0f))};
  }

  /// Quantizes with one scale and returns the error, as defined.
  template <class T>
  __device__ float exact_candidate(Block<T> const& block, uint8_t scale_bits, QuantizedBlock& result) const {
    result.scale = scale_bits;
    float const factor = te_factor<Range::kAny>(scale_bits, outer_);
    result.codes = {encode_half(block, 0, factor), encode_half(block, 1, factor)};
    float const scale = e4m3_to_float(scale_bits);
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      uint32_t const code = (i < 8 ? result.codes.x : result.codes.y) >> (4 * (i % 8));
      float const q = __half2float(__low2half(decode_e2m1_pair(code & 15u)));
      error = __fadd_rn(error, error_term(q, scale, block.element(i)));
    }
    return error;
  }

  /// Quantizes one block as defined, with a whole warp, and stores the better candidate. Lanes 0 to 15
  /// compute the candidate for 4 and lanes 16 to 31 that for 6, one element each. All lanes must pass the
  /// same arguments: x is the block, and is_decoded means that its 16 values are stored at `target` as fp16,
  /// instead of codes there and a scale at `scale_target`.
  template <class T>
  __device__ void resolve(T const* x, void* target, uint8_t* scale_target, bool is_decoded) const {
    int const lane = static_cast<int>(threadIdx.x % 32);
    int const i = lane % kBlock;
    float const element = static_cast<float>(x[i]);
    float const amax = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(fabsf(element))));
    Candidates const both = candidates(amax);
    uint8_t const scale = lane < kBlock ? both.scale_4 : both.scale_6;
    uint32_t const magnitude = e2m1_bits(element, te_factor<Range::kAny>(scale, outer_)) - kE2m1StartBits;
    // Shifted to the top of the mantissa, the bits of e2m1 are a denormal fp32: the value times 2^-126.
    float const q = copysignf(__uint_as_float(magnitude << 22) * 0x1p126f, element);
    float const term = error_term(q, e4m3_to_float(scale), element);
    float error = 0.0f;
#pragma unroll
    for (int j = 0; j < kBlock; ++j) {
      error = __fadd_rn(error, __shfl_sync(0xFFFFFFFFu, term, (lane & 16) + j));
    }
    float const error_4 = __shfl_sync(0xFFFFFFFFu, error, 0);
    float const error_6 = __shfl_sync(0xFFFFFFFFu, error, 16);
    bool const is_chosen = (lane < kBlock) == (error_4 < error_6);
    if (is_decoded) {
      if (is_chosen) {
        static_cast<__half*>(target)[i] = __float2half_rn(__fmul_rn(q, e4m3_to_float(scale)));
      }
      return;
    }
    uint32_t word = (magnitude | (__float_as_uint(element) >> 31 << 3)) << (4 * (i % 8));
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      word |= __shfl_xor_sync(0xFFFFFFFFu, word, step);
    }
    if (is_chosen && i % 8 == 0) {
      static_cast<uint32_t*>(target)[i / 8] = word;
    }
    if (is_chosen && i == 0) {
      *scale_target = scale;
    }
  }

 private:
  /// @tparam kMeanSquare The value of mean_square_, a constant in the loop over the elements.
  template <bool kMeanSquare, class T>
  __device__ bool quantize_approximately(Block<T> const& block, float amax, QuantizedBlock& result) const {
    // a / 6, by one correction of the product with the reciprocal. It is rounded correctly unless a is so
    // small that the scale is zero.
    float const product = __fmul_rn(amax, 1.0f / 6.0f);
    float const sixth = __fmaf_rn(__fmaf_rn(-6.0f, product, amax), 1.0f / 6.0f, product);
    float const base = __fmul_rn(sixth, outer_.encode);
    uint8_t const scale_bits_4 = float_to_e4m3(__fmul_rn(base, 1.5f));
    uint8_t const scale_bits_6 = float_to_e4m3(base);
    float const scale_4 = e4m3_to_float(scale_bits_4);
    float const scale_6 = e4m3_to_float(scale_bits_6);
    float const factor_4 = bounded_reciprocal(__fmul_rn(scale_4, outer_.decode));
    float const factor_6 = bounded_reciprocal(__fmul_rn(scale_6, outer_.decode));

    // The errors |q - p| in units of the candidate's scale. For the candidate 4, p is below 4.5, so that q
    // needs no step from 4 to 6.
    float error_4 = 0.0f;
    float error_6 = 0.0f;
    uint32_t codes_4[2];
    uint32_t codes_6[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t bits_4[8];
      uint32_t bits_6[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float const x = block.element(8 * half + i);
        float const p_4 = __fmul_rn(fabsf(x), 0.25f * factor_4);
        float const sum_4 = __fmaf_rn(p_4, 4.0f, kE2m1Start);
        float const difference_4 = __fmaf_rn(p_4, -4.0f, __fsub_rn(sum_4, kE2m1Start));
        bits_4[i] = __float_as_uint(sum_4);

        float const p_6 = __fmul_rn(fabsf(x), factor_6);
        E2m1Parts const parts_6(p_6);
        float const low = __fmaf_rn(parts_6.up_to_4, 4.0f, kE2m1Start);
        float const sum_6 = __fadd_rn(low, parts_6.above_4);
        float const q_6 = __fsub_rn(__fmaf_rn(sum_6, 2.0f, -low), kE2m1Start);
        float const difference_6 = __fsub_rn(q_6, p_6);
        bits_6[i] = __float_as_uint(sum_6);

        if constexpr (kMeanSquare) {
          error_4 = __fmaf_rn(difference_4, difference_4, error_4);
          error_6 = __fmaf_rn(difference_6, difference_6, error_6);
        } else {
          error_4 = __fadd_rn(error_4, fabsf(difference_4));
          error_6 = __fadd_rn(error_6, fabsf(difference_6));
        }
      }
      codes_4[half] = pack_codes(bits_4, kE2m1StartBits);
      codes_6[half] = pack_codes(bits_6, kE2m1StartBits);
    }
    float const unit = kMeanSquare ? scale_4 * scale_4 : scale_4;
    float const unit_6 = kMeanSquare ? scale_6 * scale_6 : scale_6;
    float const gain = error_6 * unit_6 - error_4 * unit;
    bool const take_4 = gain > 0.0f;
    result.scale = take_4 ? scale_bits_4 : scale_bits_6;
    result.codes.x = (take_4 ? codes_4[0] : codes_6[0]) | block.signs(0);
    result.codes.y = (take_4 ? codes_4[1] : codes_6[1]) | block.signs(1);
    // Each error is within 2^-14 units of the exact one: it has 16 terms, each of them after a few roundings
    // of numbers below 7, and 16 roundings of a sum below 16. Scales are normal numbers from 2^-6 on, and a
    // scale of 448 may have been clamped.
    bool const is_clear = fabsf(gain) > 0x1p-11f * unit;
    bool const is_normal = scale_bits_6 >= 0x08 && scale_bits_4 < 0x7E;
    if (amax == 0.0f) {
      result = {{block.signs(0), block.signs(1)}, 0};
      return true;
    }
    return is_clear && is_normal;
  }

  __device__ float error_term(float q, float scale, float x) const {
    float const scaled = __fmul_rn(q, scale);
    float const difference = fast_error_ ? __fsub_rn(scaled, __fmul_rn(x, outer_.encode))
                                         : __fsub_rn(__fdiv_rn(__fmul_rn(scaled, outer_amax_), divisor_), x);
    return mean_square_ ? __fmul_rn(difference, difference) : fabsf(difference);
  }

  OuterScale outer_;
  float outer_amax_;
  float divisor_;  // 6 B
  bool mean_square_;
  bool fast_error_;
};

}  // namespace fp4gemm
