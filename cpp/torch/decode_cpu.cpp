// The values of NVFP4 tensors on the CPU: a C function that python/fp4gemm/ops/convert.py calls with
// pointers.
//
// The formulas are those of decode and dequantize in python/fp4gemm/reference/nvfp4.py. The file is
// compiled like quantize_cpu.cpp, whose comment says why.
#include "cpu.hpp"

namespace {

using namespace fp4gemm::cpu;

FP4GEMM_CLONES void unpack(uint8_t const* codes, int elems, uint8_t* nibbles) {
  for (int i = 0; i < elems / 2; ++i) {
    nibbles[2 * i] = codes[i] & 15;
    nibbles[2 * i + 1] = codes[i] >> 4;
  }
}

/// q times the factor of its block.
FP4GEMM_CLONES void multiply(uint8_t const* nibbles, float const* factors, int blocks, float* out) {
  for (int b = 0; b < blocks; ++b) {
    float const factor = factors[b];
    for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      out[i] = decode_e2m1(nibbles[i]) * factor;
    }
  }
}

FP4GEMM_CLONES void widen(float const* values, int elems, double* out) {
  for (int i = 0; i < elems; ++i) {
    out[i] = values[i];
  }
}

/// The value of any e4m3 code. Those of a checkpoint may be negative or NaN (127 and 255).
inline float scale_value(uint32_t code) {
  float const magnitude = (code & 127) == 127 ? as_float(0x7FC00000) : decode_e4m3(code & 127);
  return as_float(as_bits(magnitude) | (code & 128) << 24);
}

}  // namespace

/// Rows first_row .. first_row + m - 1 of a matrix (.., k): codes of the first of these rows, row_stride
/// bytes apart, and the swizzled scales of the whole matrix. With out_fp64: q * s as float64. With out_fp32:
/// q * fl(fl(s * A) * inverse_bound), where A of row i is amax[i * amax_stride]. The other is null. The
/// result is contiguous. Returns 0 on success.
extern "C" __attribute__((visibility("default"))) int fp4gemm_torch_decode_matrix(
    uint8_t const* codes, int64_t row_stride, uint8_t const* scales, int64_t first_row, int64_t m, int64_t k,
    float const* amax, int64_t amax_stride, float inverse_bound, double* out_fp64, float* out_fp32) {
  int64_t const tiles_per_row = (k / kBlock + 3) / 4;
  return for_each_row(m, k, [&](int64_t row) {
    alignas(64) uint8_t nibbles[kChunk];
    alignas(64) float buffer[kChunk];
    float factors[kChunkBlocks];
    for (int64_t begin = 0; begin < k; begin += kChunk) {
      int const elems = static_cast<int>(std::min<int64_t>(kChunk, k - begin));
      int const blocks = elems / kBlock;
      for (int b = 0; b < blocks; ++b) {
        float const scale =
            scale_value(scales[scale_offset(first_row + row, begin / kBlock + b, tiles_per_row)]);
        factors[b] = amax == nullptr ? scale : scale * amax[row * amax_stride] * inverse_bound;
      }
      unpack(codes + row * row_stride + begin / 2, elems, nibbles);
      float* const values = out_fp32 == nullptr ? buffer : out_fp32 + row * k + begin;
      multiply(nibbles, factors, blocks, values);
      if (out_fp64 != nullptr) {
        widen(values, elems, out_fp64 + row * k + begin);
      }
    }
  });
}
