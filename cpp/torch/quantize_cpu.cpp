// The compiled quantizer for tensors on the CPU: C functions that python/fp4gemm/ops/quantize.py calls with
// pointers.
//
// The formulas are those of python/fp4gemm/reference/nvfp4.py with encode te, one row for each block, blocks
// along k, and rounding to nearest, and those of four_over_six.py beside it.
#include "quantize_cpu.hpp"

#include <vector>

namespace {

using namespace fp4gemm::cpu;

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

/// How the elements of a row become codes and scales.
struct Options {
  int four_over_six;
  bool fast;
  int e4m3_max;
};

/// Quantizes `blocks` blocks at x into `chosen`; `other` is scratch memory.
inline void quantize_chunk(float const* x, int blocks, Outer const& outer, Options const& options,
                           Chunk& chosen, Chunk& other) {
  float block_amax[kChunkBlocks];
  block_amaxes(x, blocks, block_amax);
  if (options.four_over_six != 0) {
    choose_four_or_six(x, block_amax, blocks, outer, options.four_over_six == 2, options.fast, chosen, other);
  } else {
    encode_scales(block_amax, blocks, outer.encode, chosen.scales, chosen.values, chosen.factors);
    encode_elements(x, chosen.factors, blocks, chosen.nibbles);
  }
}

/// The errors of the elements of one row that residual channels name, as they are quantized.
class Errors {
 public:
  Errors(int32_t const* channels, int64_t count) : channels_(channels), values_(count) {}

  float const* data() const { return values_.data(); }

  /// Sets the errors of the channels whose elements lie in a chunk of the row, which begins at element
  /// `begin`: x less q * ((s * A) * (1 / 6B)).
  void find(float const* x, Chunk const& chunk, int64_t begin, int elems, Outer const& outer) {
    float const inverse = 1.0f / outer.bound;
    for (size_t j = 0; j < values_.size(); ++j) {
      int64_t const i = channels_[j] - begin;
      if (i >= 0 && i < elems) {
        float const factor = chunk.values[i / kBlock] * outer.amax * inverse;
        float const q = decode_e2m1(chunk.nibbles[i]);
        values_[j] = x[i] - q * factor;
      }
    }
  }

 private:
  int32_t const* channels_;
  std::vector<float> values_;
};

}  // namespace

/// row_amax[i] = the largest magnitude of row i, ignoring NaN. dtype: 0 bfloat16, 1 float16, 2 float32.
/// Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_row_amax(void const* x, int dtype,
                                                                             int64_t m, int64_t k,
                                                                             int64_t row_stride,
                                                                             float* row_amax) {
  Input const input{x, static_cast<Dtype>(dtype), m, k, row_stride};
  return for_each_row(m, k, [&](int64_t row) {
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

/// Quantizes m rows. amax: A of row i is amax[i * amax_stride]. Either codes (m, (k + r)/2) and scales are
/// written, or decoded, float16 (m, k + r). scales: swizzled, set to zero by the caller; row i of x has row
/// scale_rows[i], or row i if scale_rows is null. four_over_six: 0 none, 1 the mean absolute, 2 the mean
/// squared error, which is the fast one if `fast` is not 0. e4m3_max: 448 or 256. channels: r columns of x,
/// whose errors are the last r columns of the result; r is a multiple of 16, or 0. Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_quantize_matrix(
    void const* x, int dtype, int64_t m, int64_t k, int64_t row_stride, float const* amax,
    int64_t amax_stride, uint8_t* codes, uint8_t* scales, int64_t const* scale_rows, uint16_t* decoded,
    int four_over_six, int fast, int e4m3_max, int32_t const* channels, int64_t num_channels) {
  Input const input{x, static_cast<Dtype>(dtype), m, k, row_stride};
  Options const options{four_over_six, fast != 0, e4m3_max};
  int64_t const columns = k + num_channels;
  int64_t const tiles_per_row = (columns / kBlock + 3) / 4;
  return for_each_row(m, k, [&](int64_t row) {
    alignas(64) float buffer[kChunk];
    Chunk chosen, other;
    Outer const outer = outer_of(amax[row * amax_stride], e4m3_max);
    Errors errors(channels, num_channels);
    auto const store = [&](int64_t begin, int elems) {
      int const blocks = elems / kBlock;
      if (decoded != nullptr) {
        decode_elements(chosen.nibbles, chosen.values, blocks, decoded + row * columns + begin);
        return;
      }
      pack(chosen.nibbles, elems, codes + (row * columns + begin) / 2);
      int64_t const scale_row = scale_rows == nullptr ? row : scale_rows[row];
      for (int b = 0; b < blocks; ++b) {
        scales[scale_offset(scale_row, begin / kBlock + b, tiles_per_row)] = chosen.scales[b];
      }
    };
    for (int64_t begin = 0; begin < k; begin += kChunk) {
      int const elems = static_cast<int>(std::min<int64_t>(kChunk, k - begin));
      float const* chunk = input.load(row, begin, elems, buffer);
      quantize_chunk(chunk, elems / kBlock, outer, options, chosen, other);
      errors.find(chunk, chosen, begin, elems, outer);
      store(begin, elems);
    }
    for (int64_t begin = 0; begin < num_channels; begin += kChunk) {
      int const elems = static_cast<int>(std::min<int64_t>(kChunk, num_channels - begin));
      quantize_chunk(errors.data() + begin, elems / kBlock, outer, options, chosen, other);
      store(k + begin, elems);
    }
  });
}
