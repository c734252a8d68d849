// The compiled block of GPTQ for tensors on the CPU: a C function that python/fp4gemm/calibration/gptq.py
// calls with pointers. The formulas, the candidates and their order are those of
// python/fp4gemm/reference/gptq.py.
//
// Columns of the weight are contiguous, and the loops go over kLanes rows of it at a time, which a compiler
// vectorizes. The values of a column are corrected only when the column is reached, by the differences
// of the columns before it, from left to right: the additions of each value are those of the definition in
// the same order, and the sum stays in registers.
#include <utility>

#include "cpu.hpp"

namespace {

using namespace fp4gemm::cpu;

constexpr int kSteps[] = {0, 1, 2, 3, 4, 5, 6, -1, -2, -3, -4, -5, -6};
constexpr int kLargestCode = 126;  // the e4m3 code of 448
constexpr int kLanes = 32;         // rows that are rounded at a time
constexpr int kNumSteps = sizeof kSteps / sizeof kSteps[0];

/// A value of each row, and 16 of each row.
using Lanes = float[kLanes];
using Columns = float[kBlock][kLanes];

/// U_ji / U_jj of the block at [i][j], j < i, and 1 / U_jj^2.
struct Factors {
  float rows[kBlock][kBlock];
  float cost[kBlock];
};

/// A candidate of each row: the code of s, e, s, and t.
struct Candidates {
  alignas(64) int32_t codes[kLanes];
  alignas(64) Lanes factors, values, weights;
};

/// The rows of a tile: a = max |w|, S, A and what is computed of them.
struct Outer {
  alignas(64) int32_t first[kLanes];               // c_0
  alignas(64) Lanes largest, inverse, amax, unit;  // a, fl(1 / S), A, p = fl(A * fl(1 / 6B))
};

/// What rounding costs: d, and g with an FP8 operand.
struct Differences {
  alignas(64) Columns own;
  alignas(64) Columns apart;
};

/// Computes a row's constants from its A. a is NaN where a value is: magnitudes are ordered like their bits,
/// and those of NaN are the largest.
inline __attribute__((always_inline)) void prepare(Columns const& w, float bound, Outer& outer) {
  float const inverse_bound = 1.0f / bound;
  for (int r = 0; r < kLanes; ++r) {
    int32_t largest = 0;
    for (int i = 0; i < kBlock; ++i) {
      int32_t const magnitude = static_cast<int32_t>(as_bits(w[i][r]) & 0x7FFFFFFF);
      largest = magnitude > largest ? magnitude : largest;
    }
    float const a = as_float(static_cast<uint32_t>(largest));
    float const quotient = bounded(bound / outer.amax[r]);
    float const encode = quotient == 0.0f ? 1.0f : quotient;
    auto const code = static_cast<int32_t>(encode_e4m3(bounded(a * (encode * (1.0f / 6.0f)))));
    outer.first[r] = code < 1 ? 1 : code;
    outer.largest[r] = a;
    outer.inverse[r] = 1.0f / encode;
    outer.unit[r] = outer.amax[r] * inverse_bound;
  }
}

/// The candidates that are steps[r] codes from the first ones; a row of zeros has the code 0.
inline __attribute__((always_inline)) void candidates_at(Outer const& outer, int32_t const* steps,
                                                         float inverse_bound, Candidates& made) {
  for (int r = 0; r < kLanes; ++r) {
    int32_t code = outer.first[r] + steps[r];
    code = code < 1 ? 1 : code;
    code = code > kLargestCode ? kLargestCode : code;
    code = outer.largest[r] == 0.0f ? 0 : code;
    float const value = decode_e4m3(static_cast<uint32_t>(code));
    made.codes[r] = code;
    made.factors[r] = bounded(1.0f / (value * outer.inverse[r]));
    made.values[r] = value;
    made.weights[r] = value * outer.amax[r] * inverse_bound;
  }
}

/// scaled = column i of the corrected w times e; column i of made = the differences.
///
/// @tparam kFp8 The weight is multiplied as FP8 values too.
template <bool kFp8, int i>
inline __attribute__((always_inline)) void feed_back_column(Columns const& w, Factors const& factors,
                                                            Outer const& outer, Candidates const& tried,
                                                            Columns& scaled, Differences& made) {
  for (int r = 0; r < kLanes; ++r) {
    float value = w[i][r];
    for (int j = 0; j < i; ++j) {
      value -= made.own[j][r] * factors.rows[i][j];
    }
    float const product = value * tried.factors[r];
    float a = product < 6.0f ? product : 6.0f;  // 6 where it is NaN
    a = a > -6.0f ? a : -6.0f;
    // The sum of a and 1.5 * 2^(22 + x), x the exponent of a but at least 0, has the precision of e2m1.
    auto const bits = static_cast<int32_t>(as_bits(a) & 0x7F800000);
    int32_t const exponent = bits > 0x3F800000 ? bits : 0x3F800000;
    float const magic = as_float(static_cast<uint32_t>(exponent + ((22 << 23) + (1 << 22))));
    float const q = (a + magic) - magic;
    scaled[i][r] = product;
    if constexpr (kFp8) {
      float const exact = q * tried.values[r], half = 0.5f * (eight_e4m3_of_eighth(exact) - exact);
      made.own[i][r] = value - (exact + half) * outer.unit[r];
      made.apart[i][r] = half * outer.unit[r];
    } else {
      made.own[i][r] = value - q * tried.weights[r];
    }
  }
}

template <bool kFp8, int... i>
inline __attribute__((always_inline)) void feed_back(Columns const& w, Factors const& factors,
                                                     Outer const& outer, Candidates const& tried,
                                                     Columns& scaled, Differences& made,
                                                     std::integer_sequence<int, i...>) {
  (feed_back_column<kFp8, i>(w, factors, outer, tried, scaled, made), ...);
}

/// E of each row; a NaN counts as infinity.
template <bool kFp8>
inline __attribute__((always_inline)) void sum_errors(Differences const& made, Factors const& factors,
                                                      Lanes& errors) {
  for (int r = 0; r < kLanes; ++r) {
    float terms[kBlock];
    for (int i = 0; i < kBlock; ++i) {
      float square = made.own[i][r] * made.own[i][r];
      if constexpr (kFp8) {
        square += made.apart[i][r] * made.apart[i][r];
      }
      terms[i] = square * factors.cost[i];
    }
    for (int i = 0; i < 8; ++i) {
      terms[i] += terms[i + 8];
    }
    for (int i = 0; i < 4; ++i) {
      terms[i] += terms[i + 4];
    }
    float const sum = (terms[0] + terms[2]) + (terms[1] + terms[3]);
    errors[r] = sum == sum ? sum : __builtin_inff();
  }
}

/// Rounds a tile. Leaves d in `made`, the e2m1 codes and the codes of the scales.
template <bool kFp8>
inline __attribute__((always_inline)) void round_rows(Columns const& w, Factors const& factors, float bound,
                                                      Outer& outer, Differences& made,
                                                      uint8_t (*codes)[kLanes], uint8_t* scales) {
  float const inverse_bound = 1.0f / bound;
  constexpr auto kColumns = std::make_integer_sequence<int, kBlock>();
  Candidates tried;
  alignas(64) Columns scaled;
  alignas(64) Lanes errors, least;
  alignas(64) int32_t steps[kLanes], best[kLanes] = {};
  prepare(w, bound, outer);
  for (int c = 0; c < kNumSteps; ++c) {
    std::fill(steps, steps + kLanes, kSteps[c]);
    candidates_at(outer, steps, inverse_bound, tried);
    feed_back<kFp8>(w, factors, outer, tried, scaled, made, kColumns);
    sum_errors<kFp8>(made, factors, errors);
    for (int r = 0; r < kLanes; ++r) {
      bool const is_better = c == 0 || errors[r] < least[r];
      best[r] = is_better ? kSteps[c] : best[r];
      least[r] = is_better ? errors[r] : least[r];
    }
  }
  candidates_at(outer, best, inverse_bound, tried);
  feed_back<kFp8>(w, factors, outer, tried, scaled, made, kColumns);
  for (int r = 0; r < kLanes; ++r) {
    scales[r] = static_cast<uint8_t>(tried.codes[r]);
  }
  for (int i = 0; i < kBlock; ++i) {
    for (int r = 0; r < kLanes; ++r) {
      codes[i][r] = static_cast<uint8_t>(encode_e2m1(scaled[i][r]));
    }
  }
}

/// round_rows, compiled for each instruction set.
FP4GEMM_CLONES void round_tile(Columns const& w, Factors const& factors, float bound, Outer& outer,
                               Differences& made, uint8_t (*codes)[kLanes], uint8_t* scales) {
  round_rows<false>(w, factors, bound, outer, made, codes, scales);
}
FP4GEMM_CLONES void round_tile_fp8(Columns const& w, Factors const& factors, float bound, Outer& outer,
                                   Differences& made, uint8_t (*codes)[kLanes], uint8_t* scales) {
  round_rows<true>(w, factors, bound, outer, made, codes, scales);
}

}  // namespace

/// Rounds a block of 16 columns of a weight with n rows. All are contiguous: w (16, n), unchanged; rows (16,
/// 16), U_ji / U_jj at [j][i]; cost (16), 1 / U_jj^2; codes (16, n), scales (n) and differences (16, n),
/// which are written. amax: A of row r is amax[r * amax_stride]. fp8_operand: 0 or 1. Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_gptq_block(
    float const* w, int64_t n, float const* rows, float const* cost, float const* amax, int64_t amax_stride,
    int e4m3_max, int fp8_operand, uint8_t* codes, uint8_t* scales, float* differences) {
  Factors factors;
  for (int i = 0; i < kBlock; ++i) {
    for (int j = 0; j < i; ++j) {
      factors.rows[i][j] = rows[j * kBlock + i];
    }
    factors.cost[i] = cost[i];
  }
  float const bound = 6.0f * static_cast<float>(e4m3_max);
  auto const round_rows = [&](int64_t tile) {
    int64_t const first = tile * kLanes;
    int const count = static_cast<int>(std::min<int64_t>(kLanes, n - first));
    alignas(64) Columns values = {};  // lanes behind the last row hold zeros
    Differences left;
    Outer outer{};
    uint8_t made[kBlock][kLanes], made_scales[kLanes];
    for (int i = 0; i < kBlock; ++i) {
      std::copy_n(w + i * n + first, count, values[i]);
    }
    for (int r = 0; r < count; ++r) {
      outer.amax[r] = amax[(first + r) * amax_stride];
    }
    (fp8_operand != 0 ? round_tile_fp8 : round_tile)(values, factors, bound, outer, left, made, made_scales);
    for (int i = 0; i < kBlock; ++i) {
      std::copy_n(made[i], count, codes + i * n + first);
      std::copy_n(left.own[i], count, differences + i * n + first);
    }
    std::copy_n(made_scales, count, scales + first);
  };
  return for_each_row((n + kLanes - 1) / kLanes, kLanes * kBlock * kNumSteps, round_rows);
}
