// The C interface of the quantizers: each function checks its arguments and launches on the given device.
#include <algorithm>
#include <cstdio>

#include "architecture.hpp"
#include "check.hpp"
#include "quantize/on_device.hpp"
#include "quantize/prepacked_order.hpp"
#include "quantize/stacks.hpp"

namespace fp4gemm {
namespace {

fp4gemm_status_t check_enum(char const* name, int value, int most, char const* wanted) {
  FP4GEMM_CHECK(value >= 0 && value <= most, "%s: is %d, must be %s", name, value, wanted);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_16_bit(char const* name, fp4gemm_dtype_t dtype) {
  FP4GEMM_CHECK(dtype == FP4GEMM_BF16 || dtype == FP4GEMM_FP16,
                "%s: is %d, must be FP4GEMM_BF16 or FP4GEMM_FP16", name, static_cast<int>(dtype));
  return FP4GEMM_SUCCESS;
}

/// Checks m and k and the input x (m, columns): type, row stride and memory.
fp4gemm_status_t check_input(int64_t m, int64_t k, void const* x, int64_t row_stride, int64_t columns,
                             fp4gemm_dtype_t dtype, char const* name_of_m = "m") {
  FP4GEMM_TRY(check_size(name_of_m, m, 0, 1));
  FP4GEMM_TRY(check_size("k", k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("x_dtype", dtype));
  FP4GEMM_TRY(check_row_stride("x_row_stride", row_stride, columns, dtype_bytes(dtype)));
  return check_buffer("x", x, m * columns);
}

fp4gemm_status_t check_groups(int32_t const* offs, int num_groups) {
  FP4GEMM_CHECK(offs == nullptr || num_groups >= 1,
                "num_groups: is %d, must be at least 1 where offs is given", num_groups);
  return check_buffer("offs", offs, 0, sizeof(int32_t));
}

fp4gemm_status_t unsupported(char const* text) { return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "%s", text); }

/// The most rows that m rows in groups need if each group begins at a multiple of `step`.
int64_t grouped_size(int64_t m, int num_groups, int step) {
  return (m + (step - 1) * std::min<int64_t>(num_groups, m)) / step * step;
}

/// Refuses combinations of options that have no definition or no kernel.
fp4gemm_status_t check_combination(fp4gemm_quantize_args_t const& args) {
  bool const square = args.block_rows == 16;
  bool const four_over_six = args.four_over_six != FP4GEMM_FOUR_OVER_SIX_NONE;
  bool const rotated =
      args.row.hadamard != FP4GEMM_HADAMARD_NONE || args.column.hadamard != FP4GEMM_HADAMARD_NONE;
  bool const other_encode = args.encode != FP4GEMM_ENCODE_TE;
  bool const eden = args.encode == FP4GEMM_ENCODE_EDEN;
  bool const wants_column = is_wanted(args.column);
  bool const wants_both = wants_column && is_wanted(args.row);
  bool const is_decoded = args.row.decoded != nullptr || args.column.decoded != nullptr;
  if (is_decoded && wants_both) {
    return unsupported("decoded: is supported for row or column alone, must be null where both are given");
  }
  if (square && is_decoded) {
    return unsupported("decoded: block_rows is 16, must be 1 where decoded is given");
  }
  if (square && (args.scaling != FP4GEMM_SCALING_TENSOR || args.offs != nullptr || rotated ||
                 args.rng_state != nullptr || other_encode)) {
    return unsupported(
        "block_rows: is 16, which requires FP4GEMM_SCALING_TENSOR and FP4GEMM_ENCODE_TE, without groups, "
        "Hadamard and stochastic rounding");
  }
  if (four_over_six && (rotated || args.rng_state != nullptr || other_encode)) {
    return unsupported("four_over_six: requires FP4GEMM_ENCODE_TE, without Hadamard and stochastic rounding");
  }
  if (wants_both && args.row.hadamard != FP4GEMM_HADAMARD_NONE) {
    return unsupported("row: hadamard must be FP4GEMM_HADAMARD_NONE where column is given too");
  }
  float const* const amax = args.row.amax_given != nullptr ? args.row.amax_given : args.row.amax;
  FP4GEMM_CHECK(!square || !wants_both || args.column.amax_given == nullptr || args.column.amax_given == amax,
                "column: amax_given is %p, must be that of row, %p, where block_rows is 16",
                static_cast<void const*>(args.column.amax_given), static_cast<void const*>(amax));
  FP4GEMM_TRY(check_flag("fast_error", args.fast_error));
  FP4GEMM_CHECK(args.e4m3_max == 448 || four_over_six || eden,
                "e4m3_max: is %d, must be 448 without four_over_six", args.e4m3_max);
  if (eden && wants_both) {
    return unsupported("encode: is FP4GEMM_ENCODE_EDEN, which requires row or column alone");
  }
  if (eden) {
    fp4gemm_hadamard_t const hadamard = wants_column ? args.column.hadamard : args.row.hadamard;
    FP4GEMM_CHECK(hadamard == FP4GEMM_HADAMARD_FP32,
                  "hadamard: is %d, must be FP4GEMM_HADAMARD_FP32 with FP4GEMM_ENCODE_EDEN",
                  static_cast<int>(hadamard));
    FP4GEMM_CHECK(args.rng_state != nullptr, "rng_state: is null, must be given with FP4GEMM_ENCODE_EDEN");
    FP4GEMM_CHECK(args.e4m3_max == 256, "e4m3_max: is %d, must be 256 with FP4GEMM_ENCODE_EDEN",
                  args.e4m3_max);
  }
  FP4GEMM_CHECK(!wants_both || args.scaling != FP4GEMM_SCALING_ROW || args.column.amax_given == nullptr ||
                    args.row.amax_given != nullptr,
                "row: amax_given is null, must be given if that of column is");
  return FP4GEMM_SUCCESS;
}

/// Whether the call is for `row` alone, with row scaling, a computed amax and default options.
bool is_plain(fp4gemm_quantize_args_t const& args) {
  return args.scaling == FP4GEMM_SCALING_ROW && !is_wanted(args.column) && args.row.amax_given == nullptr &&
         args.row.hadamard == FP4GEMM_HADAMARD_NONE && args.block_rows == 1 &&
         args.encode == FP4GEMM_ENCODE_TE && args.four_over_six == FP4GEMM_FOUR_OVER_SIX_NONE &&
         args.rng_state == nullptr;
}

/// Refuses a gather of rows with other calls than plain ones.
fp4gemm_status_t check_gather(fp4gemm_quantize_args_t const& args) {
  FP4GEMM_TRY(check_buffer("x_rows", args.x_rows, 0, sizeof(int32_t)));
  FP4GEMM_CHECK(args.x_rows != nullptr || args.x_num_rows == 0,
                "x_num_rows: is %lld, must be 0 where x_rows is null", ll(args.x_num_rows));
  if (args.x_rows != nullptr && !is_plain(args)) {
    return unsupported(
        "x_rows: requires FP4GEMM_SCALING_ROW, row alone with an amax that is computed, and "
        "FP4GEMM_ENCODE_TE, without Hadamard, four over six and stochastic rounding");
  }
  return FP4GEMM_SUCCESS;
}

/// Refuses residual channels with other calls than those of `row` with plain blocks.
fp4gemm_status_t check_residual_channels(fp4gemm_quantize_args_t const& args) {
  int const count = args.num_residual_channels;
  FP4GEMM_TRY(check_buffer("residual_channels", args.residual_channels, 0, sizeof(int32_t)));
  if (args.residual_channels == nullptr) {
    FP4GEMM_CHECK(count == 0, "num_residual_channels: is %d, must be 0 where residual_channels is null",
                  count);
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(count > 0 && count % Rules::kResidualChannels == 0 && count <= args.k,
                "num_residual_channels: is %d, must be a positive multiple of %d and at most k, %lld", count,
                Rules::kResidualChannels, ll(args.k));
  FP4GEMM_CHECK(args.k + count <= Rules::kMaxK, "k: is %lld with %d residual channels, must be at most %lld",
                ll(args.k), count, ll(Rules::kMaxK) - count);
  if (is_wanted(args.column) || args.block_rows != 1 || args.row.hadamard != FP4GEMM_HADAMARD_NONE ||
      args.rng_state != nullptr || args.offs != nullptr || args.x_rows != nullptr ||
      args.row.fp8 != nullptr) {
    return unsupported(
        "residual_channels: requires row alone with codes or decoded values and block_rows 1, without "
        "groups, "
        "x_rows, Hadamard and stochastic rounding");
  }
  return FP4GEMM_SUCCESS;
}

/// Refuses k that FP8 tokens cannot have.
fp4gemm_status_t check_fp8_k(uint8_t const* fp8, int64_t k) {
  FP4GEMM_CHECK(fp8 == nullptr || k % Rules::kFp8K == 0,
                "k: is %lld, must be a multiple of %d where fp8 is given", ll(k), Rules::kFp8K);
  return FP4GEMM_SUCCESS;
}

/// Refuses FP8 tokens with other calls than plain ones.
fp4gemm_status_t check_fp8(fp4gemm_quantize_args_t const& args) {
  if ((args.row.fp8 != nullptr || args.column.fp8 != nullptr) && !is_plain(args)) {
    return unsupported(
        "fp8: requires FP4GEMM_SCALING_ROW, row alone with an amax that is computed, and FP4GEMM_ENCODE_TE, "
        "without Hadamard, four over six and stochastic rounding");
  }
  return check_fp8_k(args.row.fp8, args.k);
}

/// check_buffer of a field. Its name is put together only where the buffer is refused: every call checks
/// many.
fp4gemm_status_t check_field(char const* prefix, char const* field, void const* pointer, int64_t elems,
                             int alignment = Rules::kPointerBytes) {
  if ((pointer != nullptr || elems == 0) && is_aligned(pointer, alignment)) {
    return FP4GEMM_SUCCESS;
  }
  char name[32];
  snprintf(name, sizeof(name), "%s%s", prefix, field);
  return check_buffer(name, pointer, elems, alignment);
}

/// Checks the buffers of a result, which has the fields of fp4gemm_quantized_t: codes and scales, or decoded
/// values or FP8 codes instead of both.
template <class Result>
fp4gemm_status_t check_result(char const* prefix, Result const& result, int64_t elems) {
  bool const is_fp8 = result.fp8 != nullptr;
  if (result.decoded == nullptr && !is_fp8) {
    FP4GEMM_TRY(check_field(prefix, "codes", result.codes, elems / 2));
    return check_field(prefix, "scales", result.scales, elems / 16);
  }
  char const* const given = is_fp8 ? "fp8" : "decoded";
  FP4GEMM_CHECK(result.codes == nullptr, "%scodes: is %p, must be null where %s is given", prefix,
                static_cast<void const*>(result.codes), given);
  FP4GEMM_CHECK(result.scales == nullptr, "%sscales: is %p, must be null where %s is given", prefix,
                static_cast<void const*>(result.scales), given);
  FP4GEMM_CHECK(!is_fp8 || result.decoded == nullptr, "%sdecoded: is %p, must be null where fp8 is given",
                prefix, static_cast<void const*>(result.decoded));
  return is_fp8 ? check_field(prefix, "fp8", result.fp8, elems)
                : check_field(prefix, "decoded", result.decoded, elems);
}

/// Checks the buffers of one direction, whose result is (rows, k) and whose amax has num_amaxes entries.
fp4gemm_status_t check_side(char const* prefix, fp4gemm_quantized_t const& side, int64_t rows, int64_t k,
                            int64_t num_amaxes) {
  int const hadamard = side.hadamard;
  FP4GEMM_CHECK(hadamard >= 0 && hadamard <= FP4GEMM_HADAMARD_FP32,
                "%shadamard: is %d, must be a fp4gemm_hadamard_t", prefix, hadamard);
  FP4GEMM_TRY(check_result(prefix, side, rows * k));
  bool const is_written = side.amax_given == nullptr;
  FP4GEMM_TRY(check_field(prefix, "amax_given", side.amax_given, 0, sizeof(float)));
  return check_field(prefix, "amax", side.amax, is_written ? num_amaxes : 0, sizeof(float));
}

}  // namespace

fp4gemm_status_t check_quantize(fp4gemm_quantize_args_t const* args) {
  FP4GEMM_TRY(check_args(args));
  int64_t const rows_of_x = args->x_rows != nullptr ? args->x_num_rows : args->m;
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_input(rows_of_x, args->k, args->x, args->x_row_stride, args->k, args->x_dtype,
                          args->x_rows != nullptr ? "x_num_rows" : "m"));
  FP4GEMM_TRY(check_scaling(args->scaling));
  FP4GEMM_CHECK(args->block_rows == 1 || args->block_rows == 16, "block_rows: is %d, must be 1 or 16",
                args->block_rows);
  FP4GEMM_TRY(check_enum("encode", args->encode, FP4GEMM_ENCODE_EDEN, "a fp4gemm_encode_t"));
  FP4GEMM_TRY(check_enum("four_over_six", args->four_over_six, FP4GEMM_FOUR_OVER_SIX_MSE,
                         "a fp4gemm_four_over_six_t"));
  FP4GEMM_CHECK(args->e4m3_max == 448 || args->e4m3_max == 256, "e4m3_max: is %d, must be 448 or 256",
                args->e4m3_max);
  FP4GEMM_CHECK(args->hadamard_signs <= 0xFFFFu, "hadamard_signs: is %u, must be at most 65535",
                args->hadamard_signs);
  FP4GEMM_TRY(check_buffer("rng_state", args->rng_state, 0, sizeof(int64_t)));
  FP4GEMM_TRY(check_groups(args->offs, args->num_groups));
  FP4GEMM_TRY(check_gather(*args));
  FP4GEMM_TRY(check_fp8(*args));
  FP4GEMM_TRY(check_residual_channels(*args));
  FP4GEMM_TRY(check_combination(*args));
  bool const per_row = args->scaling == FP4GEMM_SCALING_ROW;
  bool const wants_column = is_wanted(args->column);
  if (!wants_column || is_wanted(args->row)) {
    int64_t const num_amaxes = per_row || args->offs != nullptr ? args->m : 1;
    int64_t const columns = args->k + args->num_residual_channels;
    FP4GEMM_TRY(check_side("row.", args->row, args->m, columns, num_amaxes));
  }
  if (wants_column) {
    int64_t columns = args->m;
    if (args->offs == nullptr) {
      FP4GEMM_TRY(check_size("m", args->m, kBlock, kBlock));
    } else {
      columns = fp4gemm_grouped_columns(args->m, args->num_groups);
      FP4GEMM_CHECK(columns <= Rules::kMaxK,
                    "offs: %d groups of %lld rows need %lld columns, must be at most %lld", args->num_groups,
                    ll(args->m), ll(columns), ll(Rules::kMaxK));
    }
    int64_t const num_groups = args->offs != nullptr ? args->num_groups : 1;
    FP4GEMM_TRY(
        check_side("column.", args->column, args->k, columns, per_row ? num_groups * args->k : num_groups));
  }
  return FP4GEMM_SUCCESS;
}

namespace {

fp4gemm_status_t quantize(fp4gemm_quantize_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_quantize(args));
  return on_device(
      device, [&](DeviceProperties const& properties) { return launch_quantize(*args, properties, stream); });
}

fp4gemm_status_t silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const* args, int device,
                                       fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_16_bit("x_dtype", args->x_dtype));
  FP4GEMM_TRY(check_input(args->m, args->k, args->x, args->x_row_stride, 2 * args->k, args->x_dtype));
  FP4GEMM_TRY(check_groups(args->offs, args->num_groups));
  FP4GEMM_TRY(check_fp8_k(args->fp8, args->k));
  FP4GEMM_TRY(check_result("", *args, args->m * args->k));
  FP4GEMM_TRY(check_buffer("amax", args->amax, args->m, sizeof(float)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_silu_and_mul_quantize(*args, properties, stream);
  });
}

fp4gemm_status_t rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const* args, int device,
                                   fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_16_bit("x_dtype", args->x_dtype));
  FP4GEMM_TRY(check_input(args->m, args->k, args->x, args->x_row_stride, args->k, args->x_dtype));
  FP4GEMM_CHECK(args->k <= Rules::kMaxNormK, "k: is %lld, must be at most %lld for a norm", ll(args->k),
                ll(Rules::kMaxNormK));
  FP4GEMM_CHECK((args->residual == nullptr) == (args->sum == nullptr),
                "sum: is %p, must be null exactly if residual (%p) is", args->sum, args->residual);
  FP4GEMM_CHECK(args->epsilon >= 0.0f, "epsilon: is %g, must not be negative",
                static_cast<double>(args->epsilon));
  FP4GEMM_TRY(check_buffer("weight", args->weight, 0));
  FP4GEMM_TRY(check_buffer("residual", args->residual, 0));
  FP4GEMM_TRY(check_buffer("sum", args->sum, 0));
  FP4GEMM_TRY(check_fp8_k(args->fp8, args->k));
  FP4GEMM_TRY(check_result("", *args, args->m * args->k));
  FP4GEMM_TRY(check_buffer("amax", args->amax, args->m, sizeof(float)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_rms_norm_quantize(*args, properties, stream);
  });
}

fp4gemm_status_t dequantize(fp4gemm_dequantize_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_size("k", args->k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("y_dtype", args->y_dtype));
  FP4GEMM_TRY(check_scaling(args->scaling));
  FP4GEMM_CHECK(args->e4m3_max == 448 || args->e4m3_max == 256, "e4m3_max: is %d, must be 448 or 256",
                args->e4m3_max);
  FP4GEMM_TRY(check_groups(args->offs, args->num_groups));
  FP4GEMM_CHECK(args->offs == nullptr || args->scaling == FP4GEMM_SCALING_ROW,
                "scaling: is %d, must be FP4GEMM_SCALING_ROW for groups", static_cast<int>(args->scaling));
  FP4GEMM_TRY(check_flag("scales_are_compact", args->scales_are_compact));
  FP4GEMM_CHECK(args->offs == nullptr || args->scales_are_compact == 0,
                "scales_are_compact: is %d, must be 0 for groups", args->scales_are_compact);
  FP4GEMM_TRY(check_buffer("codes", args->codes, args->m * args->k / 2));
  FP4GEMM_TRY(
      check_buffer("scales", args->scales, args->m * args->k / 16, args->scales_are_compact != 0 ? 1 : 16));
  FP4GEMM_TRY(
      check_buffer("amax", args->amax, args->scaling == FP4GEMM_SCALING_ROW ? args->m : 1, sizeof(float)));
  FP4GEMM_TRY(check_buffer("y", args->y, args->m * args->k));
  return on_device(device, [&](auto const& gpu) { return launch_dequantize(*args, gpu, stream); });
}

/// Checks what the struct of every MX format has.
template <class Args>
fp4gemm_status_t check_mx(Args const* args, char const* values_name, uint8_t const* values) {
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_size("k", args->k, Rules::kMxK, Rules::kMxK, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("dtype", args->dtype));
  FP4GEMM_TRY(check_flag("is_transposed", args->is_transposed));
  FP4GEMM_TRY(check_flag("scales_are_compact", args->scales_are_compact));
  FP4GEMM_TRY(check_groups(args->offs, args->num_groups));
  FP4GEMM_CHECK(args->offs == nullptr || args->scales_are_compact == 0,
                "scales_are_compact: is %d, must be 0 for groups", args->scales_are_compact);
  FP4GEMM_TRY(check_buffer(values_name, values, args->m * args->k));
  return check_buffer("scales", args->scales, args->m * args->k / Rules::kMxK,
                      args->scales_are_compact != 0 ? 1 : 16);
}

template <class Args>
MxArgs mx_args_of(Args const& args, MxElement element, bool floors, uint8_t* values) {
  return {args.m,
          args.k,
          args.x,
          args.x_row_stride,
          args.y,
          args.dtype,
          args.is_transposed != 0,
          element,
          floors,
          values,
          args.scales,
          args.scales_are_compact != 0,
          args.offs,
          args.num_groups};
}

fp4gemm_status_t mx_quantize(MxArgs const& args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_input(args.m, args.k, args.x, args.x_row_stride, args.k, args.dtype));
  if (args.is_transposed && args.offs == nullptr) {
    FP4GEMM_TRY(check_size("m", args.m, Rules::kMxK, Rules::kMxK));
  }
  return on_device(device, [&](DeviceProperties const&) { return launch_mx_quantize(args, stream); });
}

fp4gemm_status_t mx_dequantize(MxArgs const& args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_buffer("y", args.y, args.m * args.k));
  return on_device(device, [&](DeviceProperties const&) { return launch_mx_dequantize(args, stream); });
}

fp4gemm_status_t check_mxfp8(fp4gemm_mxfp8_args_t const* args) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_enum("fp8", args->fp8, FP4GEMM_E5M2, "FP4GEMM_E4M3 or FP4GEMM_E5M2"));
  return check_mx(args, "values", args->values);
}

MxArgs mx_args_of(fp4gemm_mxfp8_args_t const& args) {
  return mx_args_of(args, args.fp8 == FP4GEMM_E4M3 ? MxElement::kE4m3 : MxElement::kE5m2, false, args.values);
}

fp4gemm_status_t check_mxfp4(fp4gemm_mxfp4_args_t const* args) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(
      check_enum("scale", args->scale, FP4GEMM_MXFP4_CEIL, "FP4GEMM_MXFP4_FLOOR or FP4GEMM_MXFP4_CEIL"));
  return check_mx(args, "codes", args->codes);
}

MxArgs mx_args_of(fp4gemm_mxfp4_args_t const& args) {
  return mx_args_of(args, MxElement::kE2m1, args.scale == FP4GEMM_MXFP4_FLOOR, args.codes);
}

fp4gemm_status_t decode(DecodeJob const& job, int64_t k, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_size("m", job.rows, 0, 1));
  FP4GEMM_TRY(check_size("k", k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_buffer("codes", job.codes, job.rows * k / 2));
  FP4GEMM_TRY(check_buffer("scales", job.scales, job.rows * k / 16));
  FP4GEMM_TRY(check_buffer("y", job.y, job.rows * k));
  return on_device(device, [&](auto const& gpu) { return launch_decode(job, {}, k, gpu, stream); });
}

/// Checks the arguments of prepack and its inverse. Buffer sizes are those of one matrix.
fp4gemm_status_t check_pack(PrepackedOrder const& order, int num_matrices, int64_t n, int64_t k,
                            void const* codes, void const* scales, void const* packed) {
  FP4GEMM_TRY(check_size("num_matrices", num_matrices, 1, 1));
  FP4GEMM_TRY(check_size("n", n, 0, 1));
  FP4GEMM_TRY(check_size("k", k, order.k_step, order.k_step, Rules::kMaxK));
  FP4GEMM_CHECK(num_matrices * n <= Rules::kMaxSize,
                "num_matrices: %d of %lld rows, must be at most %lld rows", num_matrices, ll(n),
                ll(Rules::kMaxSize));
  FP4GEMM_TRY(check_buffer("codes", codes, n * k / 2));
  FP4GEMM_TRY(check_buffer("scales", scales, n * k / 16));
  return check_buffer("packed", packed, order.bytes(n, k));
}

fp4gemm_status_t prepack(PrepackedOrder const& order, int num_matrices, int64_t n, int64_t k,
                         uint8_t const* codes, uint8_t const* scales, void* packed, int device,
                         fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_pack(order, num_matrices, n, k, codes, scales, packed));
  return on_device(device, [&](DeviceProperties const&) {
    FP4GEMM_TRY(order.prepack(num_matrices, n, k, codes, scales, packed, stream));
    // GEMM kernels may start, and read weights, before the kernel ahead of them has ended. An empty kernel in
    // between ends after the weights are written.
    return launch_nothing(stream);
  });
}

fp4gemm_status_t unprepack(PrepackedOrder const& order, int num_matrices, int64_t n, int64_t k,
                           void const* packed, uint8_t* codes, uint8_t* scales, int device,
                           fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_pack(order, num_matrices, n, k, codes, scales, packed));
  return on_device(device, [&](DeviceProperties const&) {
    return order.unprepack(num_matrices, n, k, packed, codes, scales, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

void fp4gemm_padded_scale_shape(int64_t rows, int64_t k, int64_t* scale_rows, int64_t* scale_cols) {
  *scale_rows = fp4gemm::scale_rows_of(rows);
  *scale_cols = fp4gemm::round_up(fp4gemm::ceil_div(k, fp4gemm::kBlock), fp4gemm::kScaleWord);
}

int64_t fp4gemm_grouped_scale_rows(int64_t m, int num_groups) {
  return fp4gemm::grouped_size(m, num_groups, fp4gemm::kScaleTileRows);
}

int64_t fp4gemm_grouped_columns(int64_t m, int num_groups) {
  return fp4gemm::grouped_size(m, num_groups, fp4gemm::kGroupColumns);
}

int fp4gemm_quantize_supported(int arch) {
  // The build passes the compute capabilities that have machine code, and the least that has portable code.
  bool const is_portable = FP4GEMM_QUANTIZE_PORTABLE > 0 && arch >= FP4GEMM_QUANTIZE_PORTABLE;
  return is_portable || fp4gemm::lists_device(FP4GEMM_QUANTIZE_DEVICES, arch) ? 1 : 0;
}

fp4gemm_status_t fp4gemm_quantize(fp4gemm_quantize_args_t const* args, int device, fp4gemm_stream_t stream) {
  return fp4gemm::quantize(args, device, stream);
}

fp4gemm_status_t fp4gemm_dequantize(fp4gemm_dequantize_args_t const* args, int device,
                                    fp4gemm_stream_t stream) {
  return fp4gemm::dequantize(args, device, stream);
}

fp4gemm_status_t fp4gemm_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const* args, int device,
                                               fp4gemm_stream_t stream) {
  return fp4gemm::silu_and_mul_quantize(args, device, stream);
}

fp4gemm_status_t fp4gemm_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const* args, int device,
                                           fp4gemm_stream_t stream) {
  return fp4gemm::rms_norm_quantize(args, device, stream);
}

fp4gemm_status_t fp4gemm_mxfp8_quantize(fp4gemm_mxfp8_args_t const* args, int device,
                                        fp4gemm_stream_t stream) {
  FP4GEMM_TRY(fp4gemm::check_mxfp8(args));
  return fp4gemm::mx_quantize(fp4gemm::mx_args_of(*args), device, stream);
}

fp4gemm_status_t fp4gemm_mxfp8_dequantize(fp4gemm_mxfp8_args_t const* args, int device,
                                          fp4gemm_stream_t stream) {
  FP4GEMM_TRY(fp4gemm::check_mxfp8(args));
  return fp4gemm::mx_dequantize(fp4gemm::mx_args_of(*args), device, stream);
}

fp4gemm_status_t fp4gemm_mxfp4_quantize(fp4gemm_mxfp4_args_t const* args, int device,
                                        fp4gemm_stream_t stream) {
  FP4GEMM_TRY(fp4gemm::check_mxfp4(args));
  return fp4gemm::mx_quantize(fp4gemm::mx_args_of(*args), device, stream);
}

fp4gemm_status_t fp4gemm_mxfp4_dequantize(fp4gemm_mxfp4_args_t const* args, int device,
                                          fp4gemm_stream_t stream) {
  FP4GEMM_TRY(fp4gemm::check_mxfp4(args));
  return fp4gemm::mx_dequantize(fp4gemm::mx_args_of(*args), device, stream);
}

fp4gemm_status_t fp4gemm_decode(int64_t m, int64_t k, uint8_t const* codes, uint8_t const* scales, void* y,
                                int device, fp4gemm_stream_t stream) {
  return fp4gemm::decode({m, codes, scales, y}, k, device, stream);
}

int64_t fp4gemm_prepacked_bytes(int64_t n, int64_t k) {
  return fp4gemm::ceil_div(n, fp4gemm::kPrepackedChunk) * fp4gemm::ceil_div(k, fp4gemm::kPrepackedChunk) *
         fp4gemm::kPrepackedChunkBytes;
}

fp4gemm_status_t fp4gemm_prepack(int num_matrices, int64_t n, int64_t k, uint8_t const* codes,
                                 uint8_t const* scales, void* packed, int device, fp4gemm_stream_t stream) {
  return fp4gemm::prepack(fp4gemm::kOrderForFp16, num_matrices, n, k, codes, scales, packed, device, stream);
}

fp4gemm_status_t fp4gemm_unprepack(int num_matrices, int64_t n, int64_t k, void const* packed, uint8_t* codes,
                                   uint8_t* scales, int device, fp4gemm_stream_t stream) {
  return fp4gemm::unprepack(fp4gemm::kOrderForFp16, num_matrices, n, k, packed, codes, scales, device,
                            stream);
}

int64_t fp4gemm_prepacked_fp8_bytes(int64_t n, int64_t k) {
  return fp4gemm::ceil_div(n, fp4gemm::kPrepackedChunk) * fp4gemm::ceil_div(k, fp4gemm::kPrepackedFp8Depth) *
         fp4gemm::kPrepackedFp8ChunkBytes;
}

fp4gemm_status_t fp4gemm_prepack_fp8(int num_matrices, int64_t n, int64_t k, uint8_t const* codes,
                                     uint8_t const* scales, void* packed, int device,
                                     fp4gemm_stream_t stream) {
  return fp4gemm::prepack(fp4gemm::kOrderForFp8, num_matrices, n, k, codes, scales, packed, device, stream);
}

fp4gemm_status_t fp4gemm_unprepack_fp8(int num_matrices, int64_t n, int64_t k, void const* packed,
                                       uint8_t* codes, uint8_t* scales, int device, fp4gemm_stream_t stream) {
  return fp4gemm::unprepack(fp4gemm::kOrderForFp8, num_matrices, n, k, packed, codes, scales, device, stream);
}

}  // extern "C"
