// The compiled quantizer for tensors on the CPU: C functions that python/fp4gemm/ops/cpu.py calls with
// pointers.
//
// The formulas are those of python/fp4gemm/reference/nvfp4.py with encode te, one row for each block, blocks
// along k, and rounding to nearest, and those of four_over_six.py beside it. The file is compiled with
// -ffp-contract=off, so that each operation rounds once and the bits are those of the reference. The loops
// have no branches, so that a compiler vectorizes them, and no operation depends on the order in which
// elements are processed.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu.hpp"

namespace {

using namespace fp4gemm::cpu;

constexpr float kFloatMax = 3.4028234663852886e38f;

enum class Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

/// min(x, kFloatMax), which is kFloatMax where x is NaN.
inline float bounded(float x) { return x < kFloatMax ? x : kFloatMax; }

/// The e4m3 code of x >= 0, rounded to nearest even and saturated at 448.
inline uint32_t encode_e4m3(float x) {
  x = x < 448.0f ? x : 448.0f;
  // Below 2^-6, codes count steps of 2^-9, which is the distance of neighbours of 2^14 in float32.
  uint32_t const small = as_bits(x + 16384.0f) - as_bits(16384.0f);
  uint32_t const bits = as_bits(x);
  uint32_t const normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) >> 20) - (120 << 3);
  return x < 0.015625f ? small : normal;
}

/// The e2m1 code of x, rounded to nearest even and saturated at 6. NaN gives 7.
inline uint32_t encode_e2m1(float x) {
  uint32_t const sign = x == x ? as_bits(x) >> 28 & 8 : 0;
  float a = as_float(as_bits(x) & 0x7FFFFFFF);
  a = a < 6.0f ? a : 6.0f;
  // Values below 2 are multiples of 1/2, below 4 of 1, and then of 2. The addition rounds to such a multiple,
  // and the lowest bits of the sum count them.
  float const magic = a < 2.0f ? 4194304.0f : a < 4.0f ? 8388608.0f : 16777216.0f;
  uint32_t const first = a < 2.0f ? 0 : a < 4.0f ? 2 : 4;
  return ((as_bits(a + magic) & 7) + first) | sign;
}

FP4GEMM_CLONES void load_bf16(uint16_t const* x, int elems, float* out) {
  for (int i = 0; i < elems; ++i) {
    out[i] = as_float(static_cast<uint32_t>(x[i]) << 16);
  }
}

FP4GEMM_CLONES void load_fp16(uint16_t const* x, int elems, float* out) {
  for (int i = 0; i < elems; ++i) {
    uint32_t const magnitude = x[i] & 0x7FFF;
    uint32_t const sign = static_cast<uint32_t>(x[i] & 0x8000) << 16;
    float const subnormal = static_cast<float>(static_cast<int32_t>(magnitude)) * 5.9604644775390625e-8f;
    uint32_t const exponent_shift = magnitude < 0x7C00 ? 112u << 23 : 224u << 23;  // inf and NaN: 31 to 255
    uint32_t const normal = (magnitude << 13) + exponent_shift;
    out[i] = as_float((magnitude < 0x0400 ? as_bits(subnormal) : normal) | sign);
  }
}

/// The largest magnitude of each block; a NaN counts as zero.
FP4GEMM_CLONES void block_amaxes(float const* x, int blocks, float* amax) {
  for (int b = 0; b < blocks; ++b) {
    int32_t largest = 0;  // magnitudes are ordered like their bits
    for (int i = 0; i < kBlock; ++i) {
      int32_t const magnitude = static_cast<int32_t>(as_bits(x[b * kBlock + i]) & 0x7FFFFFFF);
      int32_t const number = magnitude > 0x7F800000 ? 0 : magnitude;
      largest = number > largest ? number : largest;
    }
    amax[b] = as_float(static_cast<uint32_t>(largest));
  }
}

/// The scale s of each block, its value, and the factor e of its elements. encode is S.
FP4GEMM_CLONES void encode_scales(float const* amax, int blocks, float encode, uint8_t* scales, float* values,
                                  float* factors) {
  float const sixth = encode * (1.0f / 6.0f);
  float const inverse = 1.0f / encode;
  for (int b = 0; b < blocks; ++b) {
    uint32_t const code = encode_e4m3(bounded(amax[b] * sixth));
    float const value = decode_e4m3(code);
    scales[b] = static_cast<uint8_t>(code);
    values[b] = value;
    factors[b] = bounded(1.0f / (value * inverse));
  }
}

/// The e2m1 code of each element, in a byte.
FP4GEMM_CLONES void encode_elements(float const* x, float const* factors, int blocks, uint8_t* nibbles) {
  for (int b = 0; b < blocks; ++b) {
    float const factor = factors[b];
    for (int i = 0; i < kBlock; ++i) {
      nibbles[b * kBlock + i] = static_cast<uint8_t>(encode_e2m1(x[b * kBlock + i] * factor));
    }
  }
}

/// The scale of each block for one candidate of four over six; stretch is 1.5 if the amax is mapped to 4.
FP4GEMM_CLONES void encode_candidates(float const* amax, int blocks, float encode, float stretch,
                                      uint8_t* scales, float* values, float* factors) {
  float const inverse = 1.0f / encode;
  for (int b = 0; b < blocks; ++b) {
    float const base = amax[b] / 6.0f * encode;
    uint32_t const code = encode_e4m3(base * stretch);
    float const value = decode_e4m3(code);
    scales[b] = static_cast<uint8_t>(code);
    values[b] = value;
    factors[b] = bounded(1.0f / (value * inverse));
  }
}

/// What the error of a candidate is computed with: S, A and 6B.
struct Outer {
  float encode, amax, bound;
};

/// E of each block: the 16 terms are added in order, and each addition rounds.
template <bool kMse, bool kFast>
inline __attribute__((always_inline)) void sum_errors(float const* x, uint8_t const* nibbles,
                                                      float const* values, int blocks, Outer outer,
                                                      float* errors) {
  alignas(64) float terms[kChunk];
  for (int b = 0; b < blocks; ++b) {
    float const scale = values[b];
    for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      float const value = decode_e2m1(nibbles[i]) * scale;
      float const d = kFast ? value - x[i] * outer.encode : value * outer.amax / outer.bound - x[i];
      terms[i] = kMse ? d * d : as_float(as_bits(d) & 0x7FFFFFFF);
    }
  }
  for (int b = 0; b < blocks; ++b) {
    float total = terms[b * kBlock];
    for (int i = 1; i < kBlock; ++i) {
      total += terms[b * kBlock + i];
    }
    errors[b] = total;
  }
}

FP4GEMM_CLONES void candidate_errors(float const* x, uint8_t const* nibbles, float const* values, int blocks,
                                     Outer outer, bool mse, bool fast, float* errors) {
  if (mse) {
    fast ? sum_errors<true, true>(x, nibbles, values, blocks, outer, errors)
         : sum_errors<true, false>(x, nibbles, values, blocks, outer, errors);
  } else {
    fast ? sum_errors<false, true>(x, nibbles, values, blocks, outer, errors)
         : sum_errors<false, false>(x, nibbles, values, blocks, outer, errors);
  }
}

FP4GEMM_CLONES void pack(uint8_t const* nibbles, int elems, uint8_t* codes) {
  for (int i = 0; i < elems / 2; ++i) {
    codes[i] = static_cast<uint8_t>(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
  }
}

/// q * s of each element as float16, which is exact: a product is 0 or a normal number of float16.
FP4GEMM_CLONES void decode_elements(uint8_t const* nibbles, float const* scales, int blocks, uint16_t* out) {
  for (int b = 0; b < blocks; ++b) {
    float const scale = scales[b];
    for (int i = 0; i < kBlock; ++i) {
      uint32_t const nibble = nibbles[b * kBlock + i];
      uint32_t const code = nibble & 7;
      float const small = static_cast<float>(static_cast<int32_t>(code)) * 0.5f;
      float const value = code < 2 ? small : as_float((code + (126 << 1)) << 22);
      uint32_t const bits = as_bits(value * scale);
      uint32_t const half = bits == 0 ? 0 : (bits >> 13) - (112 << 10);
      out[b * kBlock + i] = static_cast<uint16_t>(half | (nibble & 8) << 12);
    }
  }
}

/// The matrix that is quantized, (m, k), and its rows, which are row_stride elements apart.
struct Input {
  void const* x;
  Dtype dtype;
  int64_t m, k, row_stride;

  /// Elements begin .. begin + elems - 1 of a row as float32, in `buffer` unless x is float32.
  float const* load(int64_t row, int64_t begin, int elems, float* buffer) const {
    int64_t const offset = row * row_stride + begin;
    if (dtype == Dtype::kFp32) {
      return static_cast<float const*>(x) + offset;
    }
    auto const* halves = static_cast<uint16_t const*>(x) + offset;
    dtype == Dtype::kBf16 ? load_bf16(halves, elems, buffer) : load_fp16(halves, elems, buffer);
    return buffer;
  }

  /// Calls function(row) for each row. Returns 0, or 1 if torch failed.
  template <class Function>
  int for_each_row(Function const& function) const {
    return fp4gemm::cpu::for_each_row(m, k, function);
  }
};

/// The quantized blocks of a chunk: a code in each byte, the scales, their values, and e of each block.
struct Chunk {
  alignas(64) uint8_t nibbles[kChunk];
  float values[kChunkBlocks], factors[kChunkBlocks];
  uint8_t scales[kChunkBlocks];
};

/// S, A and 6B of a row.
inline Outer outer_of(float amax, int e4m3_max) {
  float const bound = 6.0f * static_cast<float>(e4m3_max);
  float const quotient = bounded(bound / amax);
  return {quotient == 0.0f ? 1.0f : quotient, amax, bound};
}

/// Quantizes each block with its amax mapped to 6 and to 4, and leaves in `six` the one of smaller error.
void choose_four_or_six(float const* x, float const* amax, int blocks, Outer outer, bool mse, bool fast,
                        Chunk& six, Chunk& four) {
  float error_six[kChunkBlocks], error_four[kChunkBlocks];
  encode_candidates(amax, blocks, outer.encode, 1.0f, six.scales, six.values, six.factors);
  encode_elements(x, six.factors, blocks, six.nibbles);
  candidate_errors(x, six.nibbles, six.values, blocks, outer, mse, fast, error_six);
  encode_candidates(amax, blocks, outer.encode, 1.5f, four.scales, four.values, four.factors);
  encode_elements(x, four.factors, blocks, four.nibbles);
  candidate_errors(x, four.nibbles, four.values, blocks, outer, mse, fast, error_four);
  for (int b = 0; b < blocks; ++b) {
    if (error_four[b] < error_six[b]) {  // a tie or a NaN selects 6
      std::memcpy(six.nibbles + b * kBlock, four.nibbles + b * kBlock, kBlock);
      six.scales[b] = four.scales[b];
      six.values[b] = four.values[b];
    }
  }
}

}  // namespace

/// row_amax[i] = the largest magnitude of row i, ignoring NaN. dtype: 0 bfloat16, 1 float16, 2 float32.
/// Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_row_amax(void const* x, int dtype,
                                                                             int64_t m, int64_t k,
                                                                             int64_t row_stride,
                                                                             float* row_amax) {
  Input const input{x, static_cast<Dtype>(dtype), m, k, row_stride};
  return input.for_each_row([&](int64_t row) {
    alignas(64) float buffer[kChunk];
    float amax[kChunkBlocks];
    float largest = 0.0f;
    for (int64_t begin = 0; begin < k; begin += kChunk) {
      int const elems = static_cast<int>(std::min<int64_t>(kChunk, k - begin));
      block_amaxes(input.load(row, begin, elems, buffer), elems / kBlock, amax);
      largest = std::max(largest, *std::max_element(amax, amax + elems / kBlock));
    }
    row_amax[row] = largest;
  });
}

/// Quantizes m rows. amax: A of row i is amax[i * amax_stride]. Either codes (m, k/2) and scales are written,
/// or decoded, float16 (m, k). scales: swizzled, set to zero by the caller; row i of x has row scale_rows[i],
/// or row i if scale_rows is null. four_over_six: 0 none, 1 the mean absolute, 2 the mean squared error,
/// which is the fast one if `fast` is not 0. e4m3_max: 448 or 256. Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_quantize_matrix(
    void const* x, int dtype, int64_t m, int64_t k, int64_t row_stride, float const* amax,
    int64_t amax_stride, uint8_t* codes, uint8_t* scales, int64_t const* scale_rows, uint16_t* decoded,
    int four_over_six, int fast, int e4m3_max) {
  Input const input{x, static_cast<Dtype>(dtype), m, k, row_stride};
  int64_t const tiles_per_row = (k / kBlock + 3) / 4;
  return input.for_each_row([&](int64_t row) {
    alignas(64) float buffer[kChunk];
    float block_amax[kChunkBlocks];
    Chunk chosen, other;
    Outer const outer = outer_of(amax[row * amax_stride], e4m3_max);
    for (int64_t begin = 0; begin < k; begin += kChunk) {
      int const elems = static_cast<int>(std::min<int64_t>(kChunk, k - begin));
      int const blocks = elems / kBlock;
      float const* chunk = input.load(row, begin, elems, buffer);
      block_amaxes(chunk, blocks, block_amax);
      if (four_over_six != 0) {
        choose_four_or_six(chunk, block_amax, blocks, outer, four_over_six == 2, fast != 0, chosen, other);
      } else {
        encode_scales(block_amax, blocks, outer.encode, chosen.scales, chosen.values, chosen.factors);
        encode_elements(chunk, chosen.factors, blocks, chosen.nibbles);
      }
      if (decoded != nullptr) {
        decode_elements(chosen.nibbles, chosen.values, blocks, decoded + row * k + begin);
        continue;
      }
      pack(chosen.nibbles, elems, codes + (row * k + begin) / 2);
      int64_t const scale_row = scale_rows == nullptr ? row : scale_rows[row];
      for (int b = 0; b < blocks; ++b) {
        scales[scale_offset(scale_row, begin / kBlock + b, tiles_per_row)] = chosen.scales[b];
      }
    }
  });
}
