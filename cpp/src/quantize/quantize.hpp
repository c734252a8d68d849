// The launchers of the quantize, dequantize, decode and prepack kernels. Arguments have been checked; the
// device is current.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

constexpr int kBlock = 16;           // elements that share an e4m3 scale
constexpr int kScaleTileRows = 128;  // of a tile of the swizzled layout
constexpr int kScaleWord = 4;        // scales of a row that lie side by side: a tile's columns
constexpr int kGroupColumns = 64;    // groups along k begin at multiples of it
constexpr int kPrepackedChunk = 64;  // rows, and of k, of a chunk of a prepacked weight
constexpr int kPrepackedChunkBytes = 2304;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

/// Words of scales in a row of so many blocks, the padding included.
constexpr int num_words_of(int64_t num_blocks) { return static_cast<int>(ceil_div(num_blocks, kScaleWord)); }

/// Rows of the swizzled scales of so many rows.
constexpr int64_t scale_rows_of(int64_t rows) { return round_up(rows, kScaleTileRows); }

/// The same, of rows that may be in groups.
inline int64_t scale_rows_of(int64_t rows, int32_t const* offs, int num_groups) {
  return offs != nullptr ? fp4gemm_grouped_scale_rows(rows, num_groups) : scale_rows_of(rows);
}

fp4gemm_status_t launch_quantize(fp4gemm_quantize_args_t const& args, DeviceProperties const& properties,
                                 fp4gemm_stream_t stream);

fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const& args,
                                              DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const& args,
                                          DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const& args, fp4gemm_stream_t stream);

fp4gemm_status_t launch_mxfp8_quantize(fp4gemm_mxfp8_args_t const& args, fp4gemm_stream_t stream);

fp4gemm_status_t launch_mxfp8_dequantize(fp4gemm_mxfp8_args_t const& args, fp4gemm_stream_t stream);

/// One operand to decode: y (rows, k) fp16 = e2m1 value x block scale. It is one matrix, or groups of rows,
/// or a stack of matrices.
struct DecodeJob {
  int64_t rows = 0;
  uint8_t const* codes = nullptr;
  uint8_t const* scales = nullptr;  // swizzled
  void* y = nullptr;
  /// (num_groups) cumulative ends of groups of rows, on the device; null: no groups. Each group's scales
  /// begin at the next multiple of 128 rows; rows outside of all groups are skipped.
  int32_t const* offs = nullptr;
  int num_groups = 0;
  /// Rows of each matrix, of which `rows` is a multiple; 0: one matrix. Each one's scales begin at the next
  /// multiple of 128 rows.
  int64_t rows_per_matrix = 0;
};

/// Decodes both operands, of equal k, in one launch; a job with no rows is skipped.
fp4gemm_status_t launch_decode(DecodeJob const& first, DecodeJob const& second, int64_t k,
                               fp4gemm_stream_t stream);

/// num_matrices weights (n, k), codes and swizzled scales one after the other, to the same in chunks.
fp4gemm_status_t launch_prepack(int num_matrices, int64_t n, int64_t k, void const* codes, void const* scales,
                                void* packed, fp4gemm_stream_t stream);

/// The inverse.
fp4gemm_status_t launch_unpack(int num_matrices, int64_t n, int64_t k, void const* packed, void* codes,
                               void* scales, fp4gemm_stream_t stream);

/// An empty kernel: what is launched next, however early it starts, finds all before this complete.
fp4gemm_status_t launch_nothing(fp4gemm_stream_t stream);

}  // namespace fp4gemm
