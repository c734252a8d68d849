// The casts of the NVFP4 family: how a block becomes codes and a scale, given the amax of its row or tensor.
#pragma once

#include "fp4gemm/fp4gemm.h"
#include "quantize/block.cuh"
#include "quantize/philox.cuh"

namespace fp4gemm {

/// The options of a cast. They are the same for all blocks of a launch.
struct CastOptions {
  bool te_per_token = false;           // e = S / s, the encode form of TransformerEngine's per-token proposal
  bool is_eden = false;                // scales are corrected and rounded stochastically
  int64_t const* rng_state = nullptr;  // {seed, offset} in device memory; null: codes are rounded to nearest
  float e4m3_max = 448.0f;             // the bound B of the block scales, 448 or 256
  bool mean_square = false;  // four over six: errors are compared by their squares, not absolute values
  bool fast_error = false;   // four over six: errors are computed in the scaled domain
};

/// The options of a cast, from the arguments of a call.
inline CastOptions cast_options(fp4gemm_quantize_args_t const& args) {
  CastOptions options;
  options.te_per_token = args.encode == FP4GEMM_ENCODE_TE_PER_TOKEN;
  options.is_eden = args.encode == FP4GEMM_ENCODE_EDEN;
  options.rng_state = args.rng_state;
  options.e4m3_max = static_cast<float>(args.e4m3_max);
  options.mean_square = args.four_over_six == FP4GEMM_FOUR_OVER_SIX_MSE;
  options.fast_error = args.fast_error != 0;
  return options;
}

/// The amaxes and elements for which a computation gives the defined bits.
enum class Range {
  kRegular,  // finite elements and amaxes for which is_regular holds: short sequences without branches
  kAny,      // all
};

/// Whether no step of the Cast comes near overflow or underflow with this amax. False for zero, infinity and
/// NaN.
template <class Cast>
__device__ bool is_regular(float amax) {
  return amax > Cast::kLeastAmax && amax < 0x1p60f;
}

/// 1 / x rounded to nearest even, for x in [2^-100, 2^100], where one Newton step suffices.
__device__ inline float bounded_reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return __fmaf_rn(y, __fmaf_rn(-x, y, 1.0f), y);
}

/// a / b rounded to nearest even, for b in [2^-60, 2^60] and a near 2^11.
__device__ inline float bounded_quotient(float a, float b) {
  float const inverse = bounded_reciprocal(b);
  float quotient = __fmul_rn(a, inverse);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    quotient = __fmaf_rn(__fmaf_rn(-b, quotient, a), inverse, quotient);
  }
  return quotient;
}

/// The encode scale S = min(6 B / A, FLT_MAX) of a row or tensor with amax A, where B is the bound of the
/// block scales, and the decode scale 1 / S. S is 1 where the quotient is 0, that is, where A is infinite.
struct OuterScale {
  float encode;
  float decode;

  template <Range kRange>
  __device__ static OuterScale of(float amax, float e4m3_max) {
    if constexpr (kRange == Range::kRegular) {
      float const encode = bounded_quotient(6.0f * e4m3_max, amax);
      return {encode, bounded_reciprocal(encode)};
    } else {
      float const encode = fminf(__fdiv_rn(6.0f * e4m3_max, amax), kFloatMax);
      return encode == 0.0f ? OuterScale{1.0f, 1.0f} : OuterScale{encode, __frcp_rn(encode)};
    }
  }
};

/// A quantized block: 16 codes and their scale.
struct QuantizedBlock {
  uint2 codes;
  uint8_t scale;
};

__device__ inline float e4m3_to_float(uint8_t x) { return __half2float(e4m3_to_half(x)); }

/// The factor of the elements, min(1 / (scale * (1/S)), FLT_MAX). For a scale of zero it is FLT_MAX, so that
/// every nonzero element saturates, as TransformerEngine defines it.
template <Range kRange>
__device__ inline float te_factor(uint8_t scale, OuterScale const& outer) {
  float const product = __fmul_rn(e4m3_to_float(scale), outer.decode);
  if constexpr (kRange == Range::kRegular) {
    return scale == 0 ? kFloatMax : bounded_reciprocal(product);
  } else {
    return fminf(__frcp_rn(product), kFloatMax);
  }
}

/// TransformerEngine's scales for one row or tensor.
template <Range kRange>
struct TeScales {
  OuterScale outer;
  float block_factor;  // S * (1/6)

  __device__ explicit TeScales(float outer_amax) {
    outer = OuterScale::of<kRange>(outer_amax, 448.0f);
    block_factor = __fmul_rn(outer.encode, 1.0f / 6.0f);
  }

  /// The scale of a block whose amax is `amax`.
  __device__ uint8_t block_scale(float amax) const { return float_to_e4m3(__fmul_rn(amax, block_factor)); }
};

/// TransformerEngine >= 2.14: s = e4m3(a * (S * (1/6))), e = min(1 / (s * (1/S)), FLT_MAX).
///
/// Every cast has the interface of this class. A cast is constructed for the amax of a row or tensor, and
/// quantize() converts blocks without NaN whose largest magnitude is `amax`. `index` is the number of the
/// block in the result, which selects its random numbers. quantize() returns false if the block needs more
/// than this range of amaxes offers: then resolve(), where kResolves, or the cast for Range::kAny must redo
/// it.
///
/// @tparam kRange What blocks and amaxes the cast is used for.
template <Range kRange>
class TeCast {
 public:
  /// The same cast for another range.
  template <Range kOther>
  using Rebind = TeCast<kOther>;

  /// Amaxes above this are regular.
  static constexpr float kLeastAmax = 0x1p-60f;

  /// Whether quantize may leave single blocks of a regular row to resolve().
  static constexpr bool kResolves = false;

  /// What the blocks of all rows share. A whole warp constructs it, once. `draw` is 0 for blocks along k and
  /// 1 for blocks along m, whose random numbers differ.
  struct Shared {
    __device__ Shared(CastOptions const&, int /*draw*/) {}
  };

  __device__ TeCast(CastOptions const&, Shared const&, float outer_amax) : scales_(outer_amax) {}

  template <class T>
  __device__ bool quantize(Block<T> const& block, float amax, int64_t /*index*/,
                           QuantizedBlock& result) const {
    result.scale = scales_.block_scale(amax);
    float const factor = te_factor<kRange>(result.scale, scales_.outer);
    result.codes = {encode_half(block, 0, factor), encode_half(block, 1, factor)};
    return true;
  }

 private:
  TeScales<kRange> scales_;
};

/// TeCast with two options: TransformerEngine's per-token factor e = S / s (0 where s is 0), and stochastic
/// rounding.
template <Range kRange>
class VariantCast {
 public:
  template <Range kOther>
  using Rebind = VariantCast<kOther>;

  static constexpr float kLeastAmax = 0x1p-60f;
  static constexpr bool kResolves = false;

  struct Shared {
    Philox philox;

    __device__ Shared(CastOptions const& options, int draw) {
      if (options.rng_state != nullptr) {
        auto const seed = static_cast<uint64_t>(load_after_wait(options.rng_state));
        auto const offset =
            static_cast<uint64_t>(load_after_wait(options.rng_state + 1)) + static_cast<uint64_t>(draw);
        philox = {uniform(seed), uniform(offset)};
      }
    }

   private:
    /// x, which is the same in all lanes, in uniform registers. The round keys are then computed once for the
    /// warp.
    __device__ static uint64_t uniform(uint64_t x) {
      uint64_t const high = __reduce_max_sync(0xFFFFFFFFu, static_cast<uint32_t>(x >> 32));
      return high << 32 | __reduce_max_sync(0xFFFFFFFFu, static_cast<uint32_t>(x));
    }
  };

  __device__ VariantCast(CastOptions const& options, Shared const& shared, float outer_amax)
      : scales_(outer_amax),
        te_per_token_(options.te_per_token),
        is_stochastic_(options.rng_state != nullptr),
        philox_(shared.philox) {}

  template <class T>
  __device__ bool quantize(Block<T> const& block, float amax, int64_t index, QuantizedBlock& result) const {
    result.scale = scales_.block_scale(amax);
    float const factor =
        te_per_token_ ? per_token_factor(result.scale) : te_factor<kRange>(result.scale, scales_.outer);
    if (is_stochastic_) {
      uint4 const random = philox_.draw(static_cast<uint64_t>(index));
      constexpr bool kScaleFactor = kRange == Range::kRegular;
      result.codes = {encode_half_stochastic<kScaleFactor>(block, 0, factor, random.x, random.y),
                      encode_half_stochastic<kScaleFactor>(block, 1, factor, random.z, random.w)};
    } else {
      result.codes = {encode_half(block, 0, factor), encode_half(block, 1, factor)};
    }
    return true;
  }

 private:
  __device__ float per_token_factor(uint8_t scale_bits) const {
    float const scale = e4m3_to_float(scale_bits);
    float const factor = kRange == Range::kRegular ? bounded_quotient(scales_.outer.encode, scale)
                                                   : fminf(__fdiv_rn(scales_.outer.encode, scale), kFloatMax);
    // In place of 0 the least positive number: it makes nothing of any number, and keeps infinity, which
    // stands for NaN here.
    return scale_bits == 0 ? 0x1p-149f : factor;
  }

  TeScales<kRange> scales_;
  bool te_per_token_;
  bool is_stochastic_;
  Philox philox_;
};

/// The sum of the first 2 * kHalf terms, folded by halves. The loop has constant bounds, so that the terms
/// stay in registers.
template <int kHalf = kBlock / 2>
__device__ inline float folded_sum(float (&terms)[kBlock]) {
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    terms[i] = __fadd_rn(terms[i], terms[i + kHalf]);
  }
  if constexpr (kHalf > 1) {
    return folded_sum<kHalf / 2>(terms);
  } else {
    return terms[0];
  }
}

/// e4m3(x), rounded stochastically, for x in [0, 448]; the low 20 bits of `random` are used. x * 2^-120 has
/// the exponents of fp32 for which its three high bits of mantissa are those of e4m3, subnormal numbers
/// included. Its bits are therefore 2^20 times the code with a fraction.
__device__ inline uint8_t float_to_e4m3_stochastic(float x, uint32_t random) {
  uint32_t const bits = __float_as_uint(__fmul_rn(x, 0x1p-120f));
  return static_cast<uint8_t>((bits + (random & 0xFFFFFu)) >> 20);
}

/// FP4GEMM_ENCODE_EDEN: codes are rounded to nearest. The scale is then multiplied by sum z^2 / sum z q of
/// the scaled elements z and their values q, so that the block has its projection on the exact one, and
/// rounded stochastically.
template <Range kRange>
class EdenCast {
 public:
  template <Range kOther>
  using Rebind = EdenCast<kOther>;

  static constexpr float kLeastAmax = 0x1p-60f;
  static constexpr bool kResolves = false;

  using Shared = typename VariantCast<kRange>::Shared;

  __device__ EdenCast(CastOptions const&, Shared const& shared, float outer_amax) : philox_(shared.philox) {
    outer_ = OuterScale::of<kRange>(outer_amax, 256.0f);
    block_factor_ = __fmul_rn(outer_.encode, 0.1646875f);
  }

  template <class T>
  __device__ bool quantize(Block<T> const& block, float amax, int64_t index, QuantizedBlock& result) const {
    uint8_t const standard = float_to_e4m3(__fmul_rn(amax, block_factor_));
    float const factor = te_factor<kRange>(standard, outer_);
    result.codes = {encode_half(block, 0, factor), encode_half(block, 1, factor)};
    float squares[kBlock];
    float products[kBlock];
#pragma unroll
    for (int i = 0; i < kBlock; i += 2) {
      uint32_t const codes = i < kBlock / 2 ? result.codes.x : result.codes.y;
      float2 const q = __half22float2(decode_e2m1_pair(codes >> (4 * (i % 8))));
      float const low = __fmul_rn(block.element(i), factor);
      float const high = __fmul_rn(block.element(i + 1), factor);
      squares[i] = __fmul_rn(low, low);
      squares[i + 1] = __fmul_rn(high, high);
      products[i] = __fmul_rn(low, q.x);
      products[i + 1] = __fmul_rn(high, q.y);
    }
    float const ratio = __fdiv_rn(folded_sum(squares), folded_sum(products));
    float const corrected = fminf(__fmul_rn(e4m3_to_float(standard), ratio), 448.0f);
    uint4 const random = philox_.draw(static_cast<uint64_t>(index));
    result.scale = float_to_e4m3_stochastic(standard == 0 ? 0.0f : corrected, random.x);
    return true;
  }

 private:
  OuterScale outer_;
  float block_factor_;  // S * 0.1646875
  Philox philox_;
};

}  // namespace fp4gemm
