// What the compiled quantizers of CPU tensors share: the blocks of x as float32.
//
// Files that include it are compiled with -ffp-contract=off, so that each operation rounds once and the bits
// are those of python/fp4gemm/reference. The loops have no branches, so that a compiler vectorizes them, and
// no operation depends on the order in which elements are processed.
#pragma once

#include "cpu.hpp"

namespace fp4gemm::cpu {

enum class Dtype : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

FP4GEMM_CLONES static void load_bf16(uint16_t const* x, int elems, float* out) {
  for (int i = 0; i < elems; ++i) {
    out[i] = as_float(static_cast<uint32_t>(x[i]) << 16);
  }
}

FP4GEMM_CLONES static void load_fp16(uint16_t const* x, int elems, float* out) {
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
FP4GEMM_CLONES static void block_amaxes(float const* x, int blocks, float* amax) {
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

/// The e2m1 code of each element, in a byte.
FP4GEMM_CLONES static void encode_elements(float const* x, float const* factors, int blocks,
                                           uint8_t* nibbles) {
  for (int b = 0; b < blocks; ++b) {
    float const factor = factors[b];
    for (int i = 0; i < kBlock; ++i) {
      nibbles[b * kBlock + i] = static_cast<uint8_t>(encode_e2m1(x[b * kBlock + i] * factor));
    }
  }
}

FP4GEMM_CLONES static void pack(uint8_t const* nibbles, int elems, uint8_t* codes) {
  for (int i = 0; i < elems / 2; ++i) {
    codes[i] = static_cast<uint8_t>(nibbles[2 * i] | nibbles[2 * i + 1] << 4);
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
};

}  // namespace fp4gemm::cpu
