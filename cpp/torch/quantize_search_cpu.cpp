// The compiled scale search for tensors on the CPU: a C function that python/fp4gemm/ops/quantize.py calls
// with pointers. The formulas, the candidates and their order are those of
// python/fp4gemm/reference/scale_search.py.
#include "quantize_cpu.hpp"

namespace {

using namespace fp4gemm::cpu;

constexpr int kLargestCode = 126;  // the e4m3 code of 448
constexpr int kSteps[] = {0, 1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6};

/// S, A and 1 / 6B of a row, and whether it is multiplied as FP8 values too.
struct Outer {
  float encode, amax, inverse_bound;
  bool fp8_operand;
};

/// A candidate of each block: the code of s, e, s, and what an e2m1 value is multiplied with to dequantize
/// it.
struct Candidates {
  uint8_t codes[kChunkBlocks];
  float factors[kChunkBlocks], values[kChunkBlocks], weights[kChunkBlocks];
};

/// The code of the standard scale of each block, at least 1.
FP4GEMM_CLONES void standard_codes(float const* amax, int blocks, float encode, int32_t* codes) {
  float const sixth = encode * (1.0f / 6.0f);
  for (int b = 0; b < blocks; ++b) {
    auto const code = static_cast<int32_t>(encode_e4m3(bounded(amax[b] * sixth)));
    codes[b] = code < 1 ? 1 : code;
  }
}

/// The candidates that are `step` codes from the first ones; blocks of zeros have the code 0.
FP4GEMM_CLONES void candidates_at(int32_t const* first, float const* amax, int blocks, int step, Outer outer,
                                  Candidates& made) {
  float const inverse = 1.0f / outer.encode;
  for (int b = 0; b < blocks; ++b) {
    int32_t code = first[b] + step;
    code = code < 1 ? 1 : code;
    code = code > kLargestCode ? kLargestCode : code;
    code = amax[b] == 0.0f ? 0 : code;
    float const value = decode_e4m3(static_cast<uint32_t>(code));
    made.codes[b] = static_cast<uint8_t>(code);
    made.factors[b] = bounded(1.0f / (value * inverse));
    made.values[b] = value;
    made.weights[b] = value * outer.amax * outer.inverse_bound;
  }
}

/// E of each block of a row. The magnitudes are quantized, since signs do not change an error. importance:
/// that of the elements of the blocks, or null.
///
/// @tparam kWeighted There is an importance.
/// @tparam kFp8 The row is multiplied as FP8 values too.
template <bool kWeighted, bool kFp8>
inline __attribute__((always_inline)) void sum_errors(float const* x, float const* importance, Outer outer,
                                                      Candidates const& tried, int blocks, float* errors) {
  alignas(64) float terms[kChunk];
  float const unit = outer.amax * outer.inverse_bound;
  for (int b = 0; b < blocks; ++b) {
    float const factor = tried.factors[b], scale = tried.values[b], weight = tried.weights[b];
    for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      float const magnitude = as_float(as_bits(x[i]) & 0x7FFFFFFF);
      float const product = magnitude * factor;
      float const a = product < 6.0f ? product : 6.0f;
      // As in encode_e2m1, with the value in place of the code.
      float const magic = a < 2.0f ? 4194304.0f : a < 4.0f ? 8388608.0f : 16777216.0f;
      float const q = (a + magic) - magic;
      float square;
      if constexpr (kFp8) {
        float const value = q * scale, half = 0.5f * (eight_e4m3_of_eighth(value) - value);
        float const d = (value + half) * unit - magnitude, apart = half * unit;
        square = d * d + apart * apart;
      } else {
        float const d = q * weight - magnitude;
        square = d * d;
      }
      terms[i] = kWeighted ? square * importance[i] : square;
    }
  }
  for (int b = 0; b < blocks; ++b) {
    float const* t = terms + b * kBlock;
    float sums[kBlock / 2];
    for (int i = 0; i < 8; ++i) {
      sums[i] = t[i] + t[i + 8];
    }
    for (int i = 0; i < 4; ++i) {
      sums[i] += sums[i + 4];
    }
    errors[b] = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  }
}

FP4GEMM_CLONES void block_errors(float const* x, float const* importance, Outer outer,
                                 Candidates const& tried, int blocks, float* errors) {
  if (outer.fp8_operand) {
    if (importance == nullptr) {
      sum_errors<false, true>(x, nullptr, outer, tried, blocks, errors);
    } else {
      sum_errors<true, true>(x, importance, outer, tried, blocks, errors);
    }
  } else if (importance == nullptr) {
    sum_errors<false, false>(x, nullptr, outer, tried, blocks, errors);
  } else {
    sum_errors<true, false>(x, importance, outer, tried, blocks, errors);
  }
}

/// errors[0] = the sum of the 16 rows of errors, folded by halves.
FP4GEMM_CLONES void fold_rows(float (*errors)[kChunkBlocks], int blocks) {
  for (int half = kBlock / 2; half > 0; half /= 2) {
    for (int row = 0; row < half; ++row) {
      for (int b = 0; b < blocks; ++b) {
        errors[row][b] += errors[row + half][b];
      }
    }
  }
}

FP4GEMM_CLONES void keep_better(Candidates const& tried, float const* errors, int blocks, Candidates& best,
                                float* best_errors) {
  for (int b = 0; b < blocks; ++b) {
    bool const better = errors[b] < best_errors[b];
    best.codes[b] = better ? tried.codes[b] : best.codes[b];
    best.factors[b] = better ? tried.factors[b] : best.factors[b];
    best_errors[b] = better ? errors[b] : best_errors[b];
  }
}

/// A chunk of the blocks of `count` rows, which share their scales if there are several.
struct Chunk {
  alignas(64) float buffers[kBlock][kChunk];
  float const* rows[kBlock];
  int count, blocks;
};

/// Leaves the candidate of the smallest error of each block in `best`.
void search(Chunk const& chunk, bool is_tile, float const* amax, float const* importance, Outer outer,
            Candidates& best) {
  int const blocks = chunk.blocks;
  int32_t first[kChunkBlocks];
  float errors[kBlock][kChunkBlocks] = {}, best_errors[kChunkBlocks];
  Candidates tried;
  standard_codes(amax, blocks, outer.encode, first);
  for (int step : kSteps) {
    candidates_at(first, amax, blocks, step, outer, tried);
    for (int row = 0; row < chunk.count; ++row) {
      block_errors(chunk.rows[row], importance, outer, tried, blocks, errors[row]);
    }
    if (is_tile) {
      for (int row = chunk.count; row < kBlock; ++row) {
        std::fill(errors[row], errors[row] + blocks, 0.0f);
      }
      fold_rows(errors, blocks);
    }
    if (step == 0) {
      best = tried;
      std::copy(errors[0], errors[0] + blocks, best_errors);
    } else {
      keep_better(tried, errors[0], blocks, best, best_errors);
    }
  }
}

}  // namespace

/// Quantizes x (m, k) with the scale search. amax: A of row i is amax[i * amax_stride]. importance (k), or
/// null. block_rows: 1, or 16 with amax_stride 0. codes (m, k/2); scales: swizzled, set to zero by the
/// caller. dtype: 0 bfloat16, 1 float16, 2 float32. fp8_operand: 0 or 1. Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_quantize_searched(
    void const* x, int dtype, int64_t m, int64_t k, int64_t row_stride, float const* amax,
    int64_t amax_stride, float const* importance, int block_rows, int e4m3_max, int fp8_operand,
    uint8_t* codes, uint8_t* scales) {
  Input const input{x, static_cast<Dtype>(dtype), m, k, row_stride};
  int64_t const tiles_per_row = (k / kBlock + 3) / 4;
  bool const is_tile = block_rows == kBlock;
  float const bound = 6.0f * static_cast<float>(e4m3_max);
  auto const quantize_rows = [&](int64_t group) {
    int64_t const first_row = group * block_rows;
    Chunk chunk;
    Candidates best;
    alignas(64) uint8_t nibbles[kChunk];
    float block_amax[kChunkBlocks], row_amax[kChunkBlocks];
    float const outer_amax = amax[first_row * amax_stride];
    float const quotient = bounded(bound / outer_amax);
    Outer const outer{quotient == 0.0f ? 1.0f : quotient, outer_amax, 1.0f / bound, fp8_operand != 0};
    chunk.count = static_cast<int>(std::min<int64_t>(block_rows, m - first_row));
    for (int64_t begin = 0; begin < k; begin += kChunk) {
      int const elems = static_cast<int>(std::min<int64_t>(kChunk, k - begin));
      int const blocks = chunk.blocks = elems / kBlock;
      for (int row = 0; row < chunk.count; ++row) {
        chunk.rows[row] = input.load(first_row + row, begin, elems, chunk.buffers[row]);
        block_amaxes(chunk.rows[row], blocks, row == 0 ? block_amax : row_amax);
        for (int b = 0; row > 0 && b < blocks; ++b) {
          block_amax[b] = std::max(block_amax[b], row_amax[b]);
        }
      }
      search(chunk, is_tile, block_amax, importance == nullptr ? nullptr : importance + begin, outer, best);
      for (int row = 0; row < chunk.count; ++row) {
        encode_elements(chunk.rows[row], best.factors, blocks, nibbles);
        pack(nibbles, elems, codes + ((first_row + row) * k + begin) / 2);
        for (int b = 0; b < blocks; ++b) {
          scales[scale_offset(first_row + row, begin / kBlock + b, tiles_per_row)] = best.codes[b];
        }
      }
    }
  };
  return for_each_row((m + block_rows - 1) / block_rows, k * block_rows, quantize_rows);
}
