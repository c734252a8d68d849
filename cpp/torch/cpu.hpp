// What the loops on CPU tensors share: the instruction sets, bits of floats, encodings, the layout of the
// scales, and the threads.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cutlass_evt/scale_layout.hpp"

// The loops are compiled for several instruction sets, of which the loader of the library selects one.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FP4GEMM_CLONES __attribute__((target_clones("default", "arch=haswell", "arch=skylake-avx512")))
#else
#define FP4GEMM_CLONES
#endif

namespace fp4gemm::cpu {

constexpr int kBlock = 16;
constexpr int kChunkBlocks = 64;  // blocks of a row that are processed at a time; their data stays in L1
constexpr int kChunk = kChunkBlocks * kBlock;
constexpr float kFloatMax = 3.4028234663852886e38f;
constexpr int64_t kGrainElems = 1 << 16;  // the least number of elements of a thread

inline float as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline uint32_t as_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

/// The value of an e2m1 code.
inline float decode_e2m1(uint32_t nibble) {
  uint32_t const code = nibble & 7;
  float const small = static_cast<float>(static_cast<int32_t>(code)) * 0.5f;
  uint32_t const bits = code < 2 ? as_bits(small) : (code + (126 << 1)) << 22;
  return as_float(bits | (nibble & 8) << 28);
}

/// The value of an e4m3 code 0..126.
inline float decode_e4m3(uint32_t code) {
  float const small = static_cast<float>(static_cast<int32_t>(code)) * 0.001953125f;
  return code < 8 ? small : as_float((code + (120 << 3)) << 20);
}

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

/// 8 * e4m3(u / 8), rounded to nearest even, for |u| <= 6 * 448: the operand of FP8 tensor cores for u = q *
/// s.
inline float eight_e4m3_of_eighth(float u) {
  // The sum of u and 1.5 * 2^(20 + x), x the exponent of u but at least -3, has the precision of 8 * e4m3.
  auto const bits = static_cast<int32_t>(as_bits(u) & 0x7F800000);
  int32_t const exponent = bits > 0x3E000000 ? bits : 0x3E000000;
  float const magic = as_float(static_cast<uint32_t>(exponent + ((20 << 23) + (1 << 22))));
  return (u + magic) - magic;
}

using cutlass_evt::scale_offset;

/// Calls function(row) for each row of k elements, on the threads of torch. Returns 0, or 1 if torch failed.
template <class Function>
int for_each_row(int64_t m, int64_t k, Function const& function) try {
  int64_t const grain = std::max<int64_t>(1, kGrainElems / k);
  torch::stable::parallel_for(0, m, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      function(row);
    }
  });
  return 0;
} catch (...) {
  return 1;
}

}  // namespace fp4gemm::cpu
