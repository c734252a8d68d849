// Host tests of the quantizers' C interface: the messages for wrong arguments. No GPU is used.
#include "checks.hpp"
#include "fp4gemm/scales.h"

namespace {

template <class Change>
void bad_quantize(char const* what, Change change, char const* text,
                  fp4gemm_status_t status = FP4GEMM_ERROR_INVALID_ARGUMENT) {
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  args.m = 4;
  args.k = 32;
  args.x = address();
  args.x_row_stride = 32;
  args.row.codes = static_cast<uint8_t*>(address());
  args.row.scales = static_cast<uint8_t*>(address());
  args.row.amax = static_cast<float*>(address());
  change(args);
  expect_error(what, fp4gemm_quantize(&args, 0, nullptr), status, text);
}

/// Arguments without an error but that codes, scales or other results are not set, for m = 4.
fp4gemm_silu_and_mul_quantize_args_t silu_args(int64_t k) {
  fp4gemm_silu_and_mul_quantize_args_t args = FP4GEMM_SILU_AND_MUL_QUANTIZE_ARGS_INIT;
  args.m = 4;
  args.k = k;
  args.x = address();
  args.x_row_stride = 2 * k;
  args.amax = static_cast<float*>(address());
  return args;
}

fp4gemm_rms_norm_quantize_args_t norm_args(int64_t k) {
  fp4gemm_rms_norm_quantize_args_t args = FP4GEMM_RMS_NORM_QUANTIZE_ARGS_INIT;
  args.m = 4;
  args.k = args.x_row_stride = k;
  args.x = address();
  args.amax = static_cast<float*>(address());
  return args;
}

/// Expects that a call with a producer's arguments is refused as an invalid argument.
void bad_producer(char const* what, fp4gemm_silu_and_mul_quantize_args_t const& args, char const* text) {
  expect_error(what, fp4gemm_silu_and_mul_quantize(&args, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT, text);
}

void bad_producer(char const* what, fp4gemm_rms_norm_quantize_args_t const& args, char const* text) {
  expect_error(what, fp4gemm_rms_norm_quantize(&args, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT, text);
}

void test_quantize_errors() {
  using Args = fp4gemm_quantize_args_t;
  bad_quantize("m", [](Args& a) { a.m = -3; }, "m: is -3");
  bad_quantize("k", [](Args& a) { a.k = 24; }, "k: is 24, must be a multiple of 16");
  bad_quantize("x_dtype", [](Args& a) { a.x_dtype = static_cast<fp4gemm_dtype_t>(-1); }, "x_dtype: is -1");
  bad_quantize("scaling", [](Args& a) { a.scaling = static_cast<fp4gemm_scaling_t>(2); }, "scaling: is 2");
  bad_quantize("short stride", [](Args& a) { a.x_row_stride = 16; }, "x_row_stride: is 16");
  bad_quantize("odd stride", [](Args& a) { a.x_row_stride = 33; }, "x_row_stride: is 33");
  bad_quantize(
      "stride whose bytes overflow",
      [](Args& a) {
        a.x_dtype = FP4GEMM_FP32;
        a.x_row_stride = int64_t{1} << 62;
      },
      "x_row_stride: is 4611686018427387904, must be at most");
  bad_quantize("x null", [](Args& a) { a.x = nullptr; }, "x: is null");
  bad_quantize("x misaligned", [](Args& a) { a.x = address(8); }, "x: is 0x1008, must be 16-byte aligned");
  bad_quantize(
      "codes", [](Args& a) { a.row.codes = static_cast<uint8_t*>(address(1)); }, "row.codes: is 0x1001");
  bad_quantize("scales", [](Args& a) { a.row.scales = nullptr; }, "row.scales: is null");
  bad_quantize("amax", [](Args& a) { a.row.amax = nullptr; }, "row.amax: is null");
  bad_quantize("no direction", [](Args& a) { a.row.codes = nullptr; }, "row.codes: is null");
  bad_quantize(
      "hadamard", [](Args& a) { a.row.hadamard = static_cast<fp4gemm_hadamard_t>(3); }, "row.hadamard: is 3");
  bad_quantize("block_rows", [](Args& a) { a.block_rows = 8; }, "block_rows: is 8, must be 1 or 16");
  bad_quantize("encode", [](Args& a) { a.encode = static_cast<fp4gemm_encode_t>(3); }, "encode: is 3");
  bad_quantize("eden", [](Args& a) { a.encode = FP4GEMM_ENCODE_EDEN; }, "hadamard: is 0, must be");
  bad_quantize(
      "four_over_six", [](Args& a) { a.four_over_six = static_cast<fp4gemm_four_over_six_t>(3); },
      "four_over_six: is 3");
  bad_quantize("e4m3_max", [](Args& a) { a.e4m3_max = 240; }, "e4m3_max: is 240, must be 448 or 256");
  bad_quantize("fast_error", [](Args& a) { a.fast_error = 2; }, "fast_error: is 2, must be 0 or 1");
  bad_quantize("bound alone", [](Args& a) { a.e4m3_max = 256; }, "e4m3_max: is 256, must be 448 without");
  bad_quantize("signs", [](Args& a) { a.hadamard_signs = 0x10000; }, "hadamard_signs: is 65536");
  bad_quantize(
      "rng_state", [](Args& a) { a.rng_state = static_cast<int64_t*>(address(4)); }, "rng_state: is 0x1004");
  bad_quantize("no groups", [](Args& a) { a.offs = static_cast<int32_t*>(address()); }, "num_groups: is 0");
  bad_quantize("ragged column", [](Args& a) { a.column = a.row; }, "m: is 4, must be between 16");
  fp4gemm_status_t const not_supported = FP4GEMM_ERROR_NOT_SUPPORTED;
  bad_quantize(
      "square rows", [](Args& a) { a.block_rows = 16; }, "block_rows: is 16, which requires", not_supported);
  bad_quantize(
      "four over six, stochastic",
      [](Args& a) {
        a.four_over_six = FP4GEMM_FOUR_OVER_SIX_MAE;
        a.rng_state = static_cast<int64_t*>(address());
      },
      "four_over_six: requires", not_supported);
  bad_quantize(
      "square stochastic",
      [](Args& a) {
        a.block_rows = 16;
        a.scaling = FP4GEMM_SCALING_TENSOR;
        a.rng_state = static_cast<int64_t*>(address());
      },
      "block_rows: is 16, which requires", not_supported);
  bad_quantize(
      "groups of columns without amax",
      [](Args& a) {
        a.offs = static_cast<int32_t*>(address());
        a.num_groups = 1;
        a.column = a.row;
        a.column.amax = nullptr;
      },
      "column.amax: is null");
  bad_quantize(
      "both ways, one amax given",
      [](Args& a) {
        a.m = 16;
        a.column = a.row;
        a.column.amax_given = static_cast<float*>(address());
      },
      "row: amax_given is null");
  bad_quantize(
      "both ways in blocks of 16x16, two amaxes",
      [](Args& a) {
        a.m = a.k = a.block_rows = 16;
        a.scaling = FP4GEMM_SCALING_TENSOR;
        a.column = a.row;
        a.row.amax_given = static_cast<float*>(address());
        a.column.amax_given = static_cast<float*>(address(16));
      },
      "column: amax_given is 0x1010, must be that of row, 0x1000");
  bad_quantize("struct_size", [](Args& a) { a.struct_size = 0; }, "args: struct_size is 0");
}

void test_decoded_errors() {
  using Args = fp4gemm_quantize_args_t;
  fp4gemm_status_t const not_supported = FP4GEMM_ERROR_NOT_SUPPORTED;
  bad_quantize(
      "decoded and codes", [](Args& a) { a.row.decoded = address(); }, "row.codes: is 0x1000, must be null");
  auto const decoded_alone = [](Args& a) {
    a.row.codes = a.row.scales = nullptr;
    a.row.decoded = address();
  };
  bad_quantize(
      "decoded and scales",
      [&](Args& a) {
        decoded_alone(a);
        a.row.scales = static_cast<uint8_t*>(address());
      },
      "row.scales: is 0x1000, must be null");
  bad_quantize(
      "decoded misaligned",
      [&](Args& a) {
        decoded_alone(a);
        a.row.decoded = address(8);
      },
      "row.decoded: is 0x1008, must be 16-byte aligned");
  bad_quantize(
      "decoded squares",
      [&](Args& a) {
        decoded_alone(a);
        a.block_rows = 16;
        a.scaling = FP4GEMM_SCALING_TENSOR;
      },
      "decoded: block_rows is 16, must be 1", not_supported);
  bad_quantize(
      "decoded beside a column",
      [&](Args& a) {
        a.column = a.row;
        decoded_alone(a);
      },
      "decoded: is supported for row or column alone", not_supported);
  bad_quantize(
      "decoded column beside a row", [](Args& a) { a.column.decoded = address(); },
      "decoded: is supported for row or column alone", not_supported);
  bad_quantize(
      "decoded column and scales",
      [](Args& a) {
        a.m = 16;
        a.row.codes = nullptr;
        a.column.decoded = address();
        a.column.scales = static_cast<uint8_t*>(address());
      },
      "column.scales: is 0x1000, must be null");
  auto silu = silu_args(32);
  silu.decoded = address();
  silu.scales = static_cast<uint8_t*>(address());
  bad_producer("silu, decoded and scales", silu, "scales: is 0x1000, must be null");
  auto norm = norm_args(32);
  norm.decoded = address(2);
  bad_producer("norm, decoded misaligned", norm, "decoded: is 0x1002, must be 16-byte aligned");
}

void test_fp8_errors() {
  using Args = fp4gemm_quantize_args_t;
  fp4gemm_status_t const not_supported = FP4GEMM_ERROR_NOT_SUPPORTED;
  auto const fp8_alone = [](Args& a) {
    a.k = a.x_row_stride = 64;
    a.row.codes = a.row.scales = nullptr;
    a.row.fp8 = static_cast<uint8_t*>(address());
  };
  auto const bad = [&](char const* what, auto change, char const* text,
                       fp4gemm_status_t status = FP4GEMM_ERROR_INVALID_ARGUMENT) {
    bad_quantize(
        what,
        [&](Args& a) {
          fp8_alone(a);
          change(a);
        },
        text, status);
  };
  bad(
      "fp8 and codes", [](Args& a) { a.row.codes = static_cast<uint8_t*>(address()); },
      "row.codes: is 0x1000, must be null where fp8 is given");
  bad(
      "fp8 and scales", [](Args& a) { a.row.scales = static_cast<uint8_t*>(address()); },
      "row.scales: is 0x1000, must be null where fp8 is given");
  bad(
      "fp8 and decoded", [](Args& a) { a.row.decoded = address(); },
      "row.decoded: is 0x1000, must be null where fp8 is given");
  bad(
      "fp8 misaligned", [](Args& a) { a.row.fp8 = static_cast<uint8_t*>(address(8)); },
      "row.fp8: is 0x1008, must be 16-byte aligned");
  bad("fp8 without amax", [](Args& a) { a.row.amax = nullptr; }, "row.amax: is null");
  bad("fp8 k", [](Args& a) { a.k = 32; }, "k: is 32, must be a multiple of 64 where fp8 is given");
  char const* const plain = "fp8: requires FP4GEMM_SCALING_ROW, row alone with an amax that is computed";
  bad("fp8, tensor scaling", [](Args& a) { a.scaling = FP4GEMM_SCALING_TENSOR; }, plain, not_supported);
  bad(
      "fp8, given amax", [](Args& a) { a.row.amax_given = static_cast<float*>(address()); }, plain,
      not_supported);
  bad("fp8, Hadamard", [](Args& a) { a.row.hadamard = FP4GEMM_HADAMARD_BF16; }, plain, not_supported);
  bad("fp8, squares", [](Args& a) { a.block_rows = 16; }, plain, not_supported);
  bad("fp8, encode", [](Args& a) { a.encode = FP4GEMM_ENCODE_TE_PER_TOKEN; }, plain, not_supported);
  bad(
      "fp8, four over six", [](Args& a) { a.four_over_six = FP4GEMM_FOUR_OVER_SIX_MAE; }, plain,
      not_supported);
  bad(
      "fp8, stochastic", [](Args& a) { a.rng_state = static_cast<int64_t*>(address()); }, plain,
      not_supported);
  bad(
      "fp8 beside a column", [](Args& a) { a.column.codes = static_cast<uint8_t*>(address()); }, plain,
      not_supported);
  bad_quantize(
      "fp8 of a column", [](Args& a) { a.column.fp8 = static_cast<uint8_t*>(address()); }, plain,
      not_supported);
  auto silu = silu_args(64);
  silu.fp8 = static_cast<uint8_t*>(address());
  silu.decoded = address();
  bad_producer("silu, fp8 and decoded", silu, "decoded: is 0x1000, must be null where fp8 is given");
  silu = silu_args(32);
  silu.fp8 = static_cast<uint8_t*>(address());
  bad_producer("silu, fp8 k", silu, "k: is 32, must be a multiple of 64 where fp8 is given");
  auto norm = norm_args(64);
  norm.fp8 = static_cast<uint8_t*>(address(4));
  bad_producer("norm, fp8 misaligned", norm, "fp8: is 0x1004, must be 16-byte aligned");
  norm = norm_args(80);
  norm.fp8 = static_cast<uint8_t*>(address());
  bad_producer("norm, fp8 k", norm, "k: is 80, must be a multiple of 64 where fp8 is given");
}

void test_producer_errors() {
  auto const with_codes = [](auto args) {
    args.codes = static_cast<uint8_t*>(address());
    args.scales = static_cast<uint8_t*>(address());
    return args;
  };
  auto silu = with_codes(silu_args(32));
  silu.x_row_stride = 32;
  bad_producer("silu stride", silu, "x_row_stride: is 32, must be at least the 64 columns");
  silu.x_dtype = FP4GEMM_FP32;
  bad_producer("silu dtype", silu, "x_dtype: is 2, must be FP4GEMM_BF16 or FP4GEMM_FP16");
  auto norm = with_codes(norm_args(32));
  norm.residual = address();
  bad_producer("norm sum", norm, "sum: is ");
  norm = with_codes(norm_args(32));
  norm.epsilon = -1.0f;
  bad_producer("norm epsilon", norm, "epsilon: is -1");
  bad_producer("norm k", with_codes(norm_args(65552)), "k: is 65552, must be at most 65536");
  fp4gemm_mxfp8_args_t mx = FP4GEMM_MXFP8_ARGS_INIT;
  mx.m = 4;
  mx.k = 48;
  expect_error("mxfp8 k", fp4gemm_mxfp8_quantize(&mx, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "k: is 48, must be a multiple of 32");
  mx.k = 64;
  mx.fp8 = static_cast<fp4gemm_fp8_t>(2);
  expect_error("mxfp8 type", fp4gemm_mxfp8_dequantize(&mx, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "fp8: is 2");
  mx.fp8 = FP4GEMM_E4M3;
  mx.is_transposed = -1;
  expect_error("mxfp8 is_transposed", fp4gemm_mxfp8_dequantize(&mx, 0, nullptr),
               FP4GEMM_ERROR_INVALID_ARGUMENT, "is_transposed: is -1, must be 0 or 1");
  mx.is_transposed = 0;
  mx.scales_are_compact = 2;
  expect_error("mxfp8 scales_are_compact", fp4gemm_mxfp8_dequantize(&mx, 0, nullptr),
               FP4GEMM_ERROR_INVALID_ARGUMENT, "scales_are_compact: is 2, must be 0 or 1");
  fp4gemm_mxfp4_args_t mx4 = FP4GEMM_MXFP4_ARGS_INIT;
  mx4.m = 4;
  mx4.k = 48;
  expect_error("mxfp4 k", fp4gemm_mxfp4_quantize(&mx4, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "k: is 48, must be a multiple of 32");
  mx4.k = 64;
  expect_error("mxfp4 codes", fp4gemm_mxfp4_quantize(&mx4, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "codes: is null");
  mx4.scale = static_cast<fp4gemm_mxfp4_scale_t>(2);
  expect_error("mxfp4 scale", fp4gemm_mxfp4_dequantize(&mx4, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "scale: is 2");
}

void test_dequantize_and_decode_errors() {
  fp4gemm_dequantize_args_t args = FP4GEMM_DEQUANTIZE_ARGS_INIT;
  args.m = 4;
  args.k = 32;
  args.codes = static_cast<uint8_t*>(address());
  args.scales = static_cast<uint8_t*>(address());
  args.amax = static_cast<float*>(address());
  args.y = address();
  fp4gemm_dequantize_args_t bad = args;
  bad.e4m3_max = 100;
  expect_error("e4m3_max", fp4gemm_dequantize(&bad, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "e4m3_max: is 100, must be 448 or 256");
  bad = args;
  bad.scales_are_compact = 2;
  expect_error("scales_are_compact", fp4gemm_dequantize(&bad, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "scales_are_compact: is 2, must be 0 or 1");
  bad = args;
  bad.y = address(4);
  expect_error("y", fp4gemm_dequantize(&bad, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT, "y: is 0x1004");
  bad = args;
  bad.y_dtype = static_cast<fp4gemm_dtype_t>(3);
  expect_error("y_dtype", fp4gemm_dequantize(&bad, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "y_dtype: is 3");
  auto const* const bytes = static_cast<uint8_t const*>(address());
  expect_error("decode k", fp4gemm_decode(4, 17, bytes, bytes, address(), 0, nullptr),
               FP4GEMM_ERROR_INVALID_ARGUMENT, "k: is 17");
  expect_error("decode codes", fp4gemm_decode(4, 32, nullptr, bytes, address(), 0, nullptr),
               FP4GEMM_ERROR_INVALID_ARGUMENT, "codes: is null");
  expect_error("decode y", fp4gemm_decode(4, 32, bytes, bytes, nullptr, 0, nullptr),
               FP4GEMM_ERROR_INVALID_ARGUMENT, "y: is null");
}

/// swizzle_scales with one argument that is wrong.
void bad_swizzle(char const* what, int num_matrices, int64_t rows, int64_t columns, void* compact,
                 int64_t row_stride, void* swizzled, char const* text) {
  expect_error(what,
               fp4gemm_swizzle_scales(num_matrices, rows, columns, static_cast<uint8_t*>(compact), row_stride,
                                      static_cast<uint8_t*>(swizzled), 0, nullptr),
               FP4GEMM_ERROR_INVALID_ARGUMENT, text);
}

void test_swizzle_errors() {
  void* const at = address();
  bad_swizzle("num_matrices", -1, 4, 8, at, 8, at, "num_matrices: is -1");
  bad_swizzle("rows", 1, -4, 8, at, 8, at, "rows: is -4");
  bad_swizzle("columns", 1, 4, 0, at, 8, at, "columns: is 0, must be between 1");
  bad_swizzle("row_stride", 1, 4, 8, at, 7, at, "row_stride: is 7, must be between 8");
  bad_swizzle("compact", 1, 4, 8, nullptr, 8, at, "compact: is null");
  bad_swizzle("swizzled", 1, 4, 8, at, 8, nullptr, "swizzled: is null");
  bad_swizzle("alignment", 1, 4, 8, address(1), 8, address(8),
              "swizzled: is 0x1008, must be 16-byte aligned");
  bad_swizzle("overflow", INT32_MAX, INT32_MAX, 1, at, 1 << 30, at, "num_matrices: is 2147483647");
}

}  // namespace

int main() {
  test_quantize_errors();
  test_decoded_errors();
  test_fp8_errors();
  test_producer_errors();
  test_dequantize_and_decode_errors();
  test_swizzle_errors();
  return report();
}
