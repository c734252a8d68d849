// The launchers of the quantize, dequantize, decode and prepack kernels. Arguments have been checked; the
// device is current.
#pragma once

#include <cstdint>

#include "cutlass_evt/epilogue/arguments.hpp"
#include "device.hpp"
#include "fp4gemm/fp4gemm.h"
#include "quantize/sizes.hpp"

namespace fp4gemm {

/// Whether a direction is quantized.
inline bool is_wanted(fp4gemm_quantized_t const& side) {
  return side.codes != nullptr || side.decoded != nullptr || side.fp8 != nullptr;
}

fp4gemm_status_t launch_quantize(fp4gemm_quantize_args_t const& args, DeviceProperties const& properties,
                                 fp4gemm_stream_t stream);

fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const& args,
                                              DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const& args,
                                          DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const& args, DeviceProperties const& properties,
                                   fp4gemm_stream_t stream);

/// The elements of a tensor in an MX format.
enum class MxElement { kE4m3, kE5m2, kE2m1 };

/// What the C interface's structs of the MX formats have in common; the fields are those of
/// fp4gemm_mxfp8_args_t.
struct MxArgs {
  int64_t m, k;
  void const* x;
  int64_t x_row_stride;
  void* y;
  fp4gemm_dtype_t dtype;
  bool is_transposed;
  MxElement element;
  bool floors;  // kE2m1: FP4GEMM_MXFP4_FLOOR; else the scale is rounded up
  uint8_t* values;
  uint8_t* scales;
  bool scales_are_compact;
  int32_t const* offs;
  int num_groups;
};

fp4gemm_status_t launch_mx_quantize(MxArgs const& args, fp4gemm_stream_t stream);

fp4gemm_status_t launch_mx_dequantize(MxArgs const& args, fp4gemm_stream_t stream);

/// An operand in an MX format to decode for a product of fp16 operands: one matrix, groups of rows, or a
/// stack of matrices. Row r becomes y (rows, k) = fp16(value * scale / 2^p), and its factor is 2^p, where 2^p
/// is the largest scale of the row that is no NaN times 2^-7 for e4m3 and 2^-13 for e2m1. This is exact where
/// no scale of a value that is not zero is below the largest by more than 2^22 for e4m3 and 2^36 for e2m1;
/// what lies below is rounded to a multiple of 2^-24.
struct MxDecodeJob {
  MxElement element = MxElement::kE4m3;  // or kE2m1
  int64_t rows = 0;
  int64_t k = 0;
  uint8_t const* values = nullptr;
  uint8_t const* scales = nullptr;  // swizzled
  void* y = nullptr;
  int32_t const* offs = nullptr;  // as in DecodeJob
  int num_groups = 0;
  int64_t rows_per_matrix = 0;  // of a stack; `rows` of one matrix
  /// What a factor is multiplied by: a vector or one number for each matrix, or num_given of them for the one
  /// matrix; data null: 1.
  cutlass_evt::EpilogueVector given;
  int num_given = 1;
  float* factors = nullptr;  // out (num_given, rows)
};

fp4gemm_status_t launch_mx_decode(MxDecodeJob const& job, fp4gemm_stream_t stream);

/// Writes e2m1 codes, two in a byte, as e4m3 numbers of the same values. num_codes is a multiple of 32, and
/// both pointers are multiples of 16 bytes.
fp4gemm_status_t launch_expand_codes(int64_t num_codes, void const* codes, void* values,
                                     fp4gemm_stream_t stream);

/// An operand to decode, y (rows, k) fp16 = e2m1 value * block scale: one matrix, groups of rows, or a stack
/// of matrices.
struct DecodeJob {
  int64_t rows = 0;
  uint8_t const* codes = nullptr;
  uint8_t const* scales = nullptr;  // swizzled
  void* y = nullptr;
  /// (num_groups) cumulative ends of groups of rows, in device memory; null: no groups. The scales of a group
  /// begin at the next multiple of 128 rows. Rows outside of all groups are skipped.
  int32_t const* offs = nullptr;
  int num_groups = 0;
  /// Rows of each matrix of a stack, which divide `rows`; 0: one matrix. The scales of a matrix begin at the
  /// next multiple of 128 rows.
  int64_t rows_per_matrix = 0;
};

/// Decodes both operands, of equal k, in one launch; a job with no rows is skipped.
fp4gemm_status_t launch_decode(DecodeJob const& first, DecodeJob const& second, int64_t k,
                               DeviceProperties const& properties, fp4gemm_stream_t stream);

/// Rearranges num_matrices weights (n, k), whose codes and swizzled scales lie one after the other, into the
/// chunks of cutlass_evt/mainloop/nvfp4_packing.hpp.
fp4gemm_status_t launch_prepack(int num_matrices, int64_t n, int64_t k, void const* codes, void const* scales,
                                void* packed, fp4gemm_stream_t stream);

/// The inverse of launch_prepack.
fp4gemm_status_t launch_unprepack(int num_matrices, int64_t n, int64_t k, void const* packed, void* codes,
                                  void* scales, fp4gemm_stream_t stream);

/// The same two for the chunks of cutlass_evt/mainloop/nvfp4_fp8_packing.hpp.
fp4gemm_status_t launch_prepack_fp8(int num_matrices, int64_t n, int64_t k, void const* codes,
                                    void const* scales, void* packed, fp4gemm_stream_t stream);
fp4gemm_status_t launch_unprepack_fp8(int num_matrices, int64_t n, int64_t k, void const* packed, void* codes,
                                      void* scales, fp4gemm_stream_t stream);

/// Launches an empty kernel, without overlap. It ends after all kernels before it, so that the next kernel
/// finds their results even if it starts early and does not wait.
fp4gemm_status_t launch_nothing(fp4gemm_stream_t stream);

}  // namespace fp4gemm
