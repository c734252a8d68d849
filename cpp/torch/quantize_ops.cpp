// The quantize, dequantize and decode operators on CUDA: they check tensors, allocate results and call the C
// interface.
#include "quantize_ops.hpp"

#include "quantize_call.hpp"

namespace fp4gemm_torch {
namespace {

/// The groups of a direction: of rows of the result, or of its columns.
struct Groups {
  int num = 0;  // 0: no groups
  bool of_columns = false;
};

/// Sets the amax of one direction, to `amax` if it is given and to a new tensor otherwise. Returns the new
/// tensor, which has no elements if no amax is written.
Tensor set_amax(char const* amax_name, fp4gemm_quantized_t& side, int64_t rows,
                std::optional<Tensor> const& amax, bool per_row, Groups groups, int32_t device) {
  int64_t const num_groups = groups.num > 0 ? groups.num : 1;
  bool const is_matrix = groups.num > 0 && groups.of_columns && per_row;
  bool const is_spread = groups.num > 0 && !groups.of_columns && !per_row;
  if (amax.has_value() && is_matrix) {
    check_matrix(amax_name, *amax, ScalarType::Float, device);
    check_shape(amax_name, *amax, num_groups, rows);
    side.amax_given = static_cast<float const*>(amax->const_data_ptr());
  } else if (amax.has_value()) {
    side.amax_given = check_vector(amax_name, *amax, per_row ? rows : num_groups, false, device);
  }
  bool const is_written = !amax.has_value() || is_spread;
  Tensor result = !is_written ? empty(0, -1, ScalarType::Float, device)
                  : is_matrix
                      ? empty(num_groups, rows, ScalarType::Float, device)
                      : empty(per_row || is_spread ? rows : num_groups, -1, ScalarType::Float, device);
  side.amax = is_written ? static_cast<float*>(result.mutable_data_ptr()) : nullptr;
  return result;
}

/// Sets new tensors for one direction of the result, (rows, k), and returns them.
Quantized set_side(char const* amax_name, fp4gemm_quantized_t& side, int64_t rows, int64_t k,
                   std::optional<Tensor> const& amax, bool per_row, Groups groups, int32_t device) {
  Shape const scales = scale_shape(rows, k / 16, true, groups.of_columns ? 0 : groups.num);
  Quantized result{empty(rows, k / 2, ScalarType::Byte, device),
                   empty(scales.rows, scales.columns, ScalarType::Float8_e4m3fn, device),
                   set_amax(amax_name, side, rows, amax, per_row, groups, device)};
  side.codes = static_cast<uint8_t*>(result.codes.mutable_data_ptr());
  side.scales = static_cast<uint8_t*>(result.scales.mutable_data_ptr());
  return result;
}

/// The arguments of a call without its results: x and the options, except for hadamard.
fp4gemm_quantize_args_t quantize_args(Tensor const& x, QuantizeOptions const& options,
                                      std::optional<Tensor> const& offs, int32_t device) {
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  set_input(args, x);
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_options(args, options, device);
  set_groups(args, offs, device);
  return args;
}

/// Sets the rows of x that are quantized, if they are given, and their number.
void set_rows(fp4gemm_quantize_args_t& args, std::optional<Tensor> const& rows, int32_t device) {
  if (!rows.has_value()) {
    return;
  }
  check_dims("rows", *rows, 1);
  check_contiguous("rows", *rows, ScalarType::Int, device);
  int64_t const num_rows = args.m;
  args.m = rows->size(0);
  if (args.m == 0) {
    return;  // an empty tensor may have a null pointer, which would mean that all rows are quantized
  }
  args.x_num_rows = num_rows;
  args.x_rows = static_cast<int32_t const*>(rows->const_data_ptr());
}

/// Sets the columns of x whose errors are quantized too, if they are given.
void set_residual_channels(fp4gemm_quantize_args_t& args, std::optional<Tensor> const& channels,
                           int32_t device) {
  if (!channels.has_value()) {
    return;
  }
  check_dims("residual_channels", *channels, 1);
  check_contiguous("residual_channels", *channels, ScalarType::Int, device);
  STD_TORCH_CHECK(channels->size(0) > 0, "residual_channels: has no elements, must have 32 or more");
  args.num_residual_channels = narrow("residual_channels: size", channels->size(0));
  args.residual_channels = static_cast<int32_t const*>(channels->const_data_ptr());
}

/// A direction of the result, (rows, k).
struct Direction {
  fp4gemm_quantized_t* side;
  int64_t rows;
  int64_t k;
  Groups groups;

  /// Whether columns of groups without any row are quantized.
  bool is_empty() const { return k == 0; }
};

/// The direction that is quantized with this axis. The number of rows and the groups of args are set.
Direction direction_of(fp4gemm_quantize_args_t& args, int64_t axis) {
  STD_TORCH_CHECK(axis == -1 || axis == 0, "axis: is ", axis, ", must be -1 or 0");
  bool const has_groups = args.offs != nullptr;
  int const num_groups = has_groups ? args.num_groups : 0;
  if (axis == -1) {
    return {&args.row, args.m, args.k + args.num_residual_channels, {num_groups, false}};
  }
  STD_TORCH_CHECK(has_groups || (args.m > 0 && args.m % 16 == 0), "x: m is ", args.m,
                  ", must be a positive multiple of 16 for axis 0");
  int64_t const columns = has_groups ? fp4gemm_grouped_columns(args.m, num_groups) : args.m;
  return {&args.column, args.k, columns, {num_groups, true}};
}

fp4gemm_fp8_t fp8_of(char const* name, ScalarType type) {
  switch (type) {
    case ScalarType::Float8_e4m3fn: return FP4GEMM_E4M3;
    case ScalarType::Float8_e5m2: return FP4GEMM_E5M2;
    default:
      STD_TORCH_CHECK(false, name, ": dtype is ", name_of(type), ", must be Float8_e4m3fn or Float8_e5m2");
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor const& x, std::optional<Tensor> amax, bool per_row,
                                            int64_t axis,
                                            int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER),
                                            std::optional<Tensor> offs, std::optional<Tensor> rows,
                                            std::optional<Tensor> residual_channels) {
  int32_t const device = x.get_device_index();
  QuantizeOptions const options{per_row, block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT)};
  fp4gemm_quantize_args_t args = quantize_args(x, options, offs, device);
  set_rows(args, rows, device);
  set_residual_channels(args, residual_channels, device);
  Direction const to = direction_of(args, axis);
  to.side->hadamard = hadamard_of(options);
  Quantized out = set_side("amax", *to.side, to.rows, to.k, amax, per_row, to.groups, device);
  if (to.is_empty() && to.side->amax != nullptr) {
    // The codes have no elements and may have a null pointer, which would mean that no columns are quantized.
    to.side->codes = reinterpret_cast<uint8_t*>(to.side->amax);
  }
  if (!to.is_empty() || to.side->amax != nullptr) {
    check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  }
  return {out.codes, out.scales, out.amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_both(
    Tensor const& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, bool per_row,
    int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER), std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  STD_TORCH_CHECK(amax.has_value() == amax_t.has_value(), "amax_t: must be given exactly if amax is");
  // One call has null pointers where results have no elements, which would mean that a direction is not
  // wanted; and its blocks of 16x16 have one scale for both directions, and so one amax.
  bool const is_empty = offs.has_value() && x.dim() == 2 && x.size(0) == 0;
  bool const differ = block_rows == 16 && amax.has_value() && amax->data_ptr() != amax_t->data_ptr();
  if (is_empty || differ) {
    // The names of the last two parameters hide those of quantize_both, in the list of the options too.
    auto const side = [&](std::optional<Tensor> const& given, int64_t axis, int64_t hadamard, int64_t signs) {
      return quantize(x, given, per_row, axis, block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT), offs);
    };
    auto const [codes, scales, measured] = side(amax, -1, 0, 0);
    auto const [codes_t, scales_t, measured_t] = side(amax_t, 0, hadamard, signs);
    return {codes, scales, measured, codes_t, scales_t, measured_t};
  }
  QuantizeOptions const options{per_row, block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT)};
  fp4gemm_quantize_args_t args = quantize_args(x, options, offs, device);
  args.column.hadamard = hadamard_of(options);
  Direction const first = direction_of(args, -1);
  Direction const second = direction_of(args, 0);
  Quantized row = set_side("amax", args.row, first.rows, first.k, amax, per_row, first.groups, device);
  Quantized column =
      set_side("amax_t", args.column, second.rows, second.k, amax_t, per_row, second.groups, device);
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {row.codes, row.scales, row.amax, column.codes, column.scales, column.amax};
}

std::tuple<Tensor, Tensor> quantize_decoded(Tensor const& x, std::optional<Tensor> amax, bool per_row,
                                            int64_t axis FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER),
                                            std::optional<Tensor> offs, std::optional<Tensor> rows,
                                            std::optional<Tensor> residual_channels) {
  int32_t const device = x.get_device_index();
  QuantizeOptions const options{per_row, 1 FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT)};
  fp4gemm_quantize_args_t args = quantize_args(x, options, offs, device);
  set_rows(args, rows, device);
  set_residual_channels(args, residual_channels, device);
  Direction const to = direction_of(args, axis);
  to.side->hadamard = hadamard_of(options);
  Tensor measured = set_amax("amax", *to.side, to.rows, amax, per_row, to.groups, device);
  Tensor data = set_decoded(*to.side, to.rows, to.k, device);
  if (to.is_empty() && to.side->amax != nullptr) {
    to.side->decoded = to.side->amax;  // as the codes in quantize
  }
  if (!to.is_empty() || to.side->amax != nullptr) {
    check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  }
  return {data, measured};
}

std::tuple<Tensor, Tensor> quantize_fp8(Tensor const& x, std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  set_input(args, x, kFp8Step);
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_groups(args, offs, device);
  Tensor amax = set_amax("amax", args.row, args.m, std::nullopt, true, {args.num_groups, false}, device);
  Tensor data = set_fp8(args.row, args.m, args.k, device);
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {data, amax};
}

Tensor dequantize(Tensor const& codes, Tensor const& scales, Tensor const& amax, int64_t e4m3_max,
                  ScalarType dtype, bool swizzled, std::optional<Tensor> offs) {
  int32_t const device = codes.get_device_index();
  check_matrix("codes", codes, ScalarType::Byte, device);
  fp4gemm_dequantize_args_t args = FP4GEMM_DEQUANTIZE_ARGS_INIT;
  args.m = codes.size(0);
  args.k = codes.size(1) * 2;
  set_groups(args, offs, device);
  check_matrix("scales", scales, ScalarType::Float8_e4m3fn, device);
  Shape const wanted = scale_shape(args.m, args.k / 16, swizzled, args.num_groups);
  check_shape("scales", scales, wanted.rows, wanted.columns);
  args.codes = static_cast<uint8_t const*>(codes.const_data_ptr());
  args.scales = static_cast<uint8_t const*>(scales.const_data_ptr());
  args.scales_are_compact = swizzled ? 0 : 1;
  args.amax = check_vector("amax", amax, args.m, args.num_groups == 0, device);
  args.scaling = amax.size(0) == 1 && args.num_groups == 0 ? FP4GEMM_SCALING_TENSOR : FP4GEMM_SCALING_ROW;
  args.e4m3_max = static_cast<int>(e4m3_max);
  args.y_dtype = dtype_of("dtype", dtype);
  Tensor y = empty(args.m, args.k, dtype, device);
  args.y = y.mutable_data_ptr();
  check_status(fp4gemm_dequantize(&args, device, current_stream(device)));
  return y;
}

namespace {

/// Fills in what the arguments of every MX format have, quantizes, and returns the data and the scales.
/// per_entry: elements in an entry of the data.
template <class Args, class Quantize>
std::tuple<Tensor, Tensor> mx_quantize(Args args, uint8_t* Args::* data, ScalarType type, int64_t per_entry,
                                       Tensor const& x, int64_t axis, bool swizzled,
                                       std::optional<Tensor> const& offs, Quantize quantize) {
  int32_t const device = x.get_device_index();
  set_input(args, x, 32);
  args.dtype = dtype_of("x", x.scalar_type());
  STD_TORCH_CHECK(axis == -1 || axis == 0, "axis: is ", axis, ", must be -1 or 0");
  args.is_transposed = axis == 0 ? 1 : 0;
  args.scales_are_compact = swizzled ? 0 : 1;
  set_groups(args, offs, device);
  int64_t const rows = axis == 0 ? args.k : args.m;
  int64_t const rows_in_groups =
      offs.has_value() ? fp4gemm_grouped_scale_rows(args.m, args.num_groups) : args.m;
  int64_t const columns = axis == 0 ? rows_in_groups : args.k;
  STD_TORCH_CHECK(offs.has_value() || (columns > 0 && columns % 32 == 0), "x: m is ", args.m,
                  ", must be a positive multiple of 32 for axis 0");
  Tensor values = empty(rows, columns / per_entry, type, device);
  Shape const shape = scale_shape(rows, columns / 32, swizzled, axis == 0 ? 0 : args.num_groups);
  Tensor scales = empty(shape.rows, shape.columns, ScalarType::Float8_e8m0fnu, device);
  args.*data = static_cast<uint8_t*>(values.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  check_status(quantize(&args, device, current_stream(device)));
  return {values, scales};
}

/// The same for the other direction. name: of the data, for messages.
template <class Args, class Dequantize>
Tensor mx_dequantize(Args args, uint8_t* Args::* data, char const* name, int64_t per_entry,
                     Tensor const& values, Tensor const& scales, ScalarType dtype, bool swizzled,
                     std::optional<Tensor> const& offs, Dequantize dequantize) {
  int32_t const device = values.get_device_index();
  check_matrix(name, values, values.scalar_type(), device);
  args.m = values.size(0);
  args.k = values.size(1) * per_entry;
  check_matrix("scales", scales, ScalarType::Float8_e8m0fnu, device);
  set_groups(args, offs, device);
  Shape const wanted = scale_shape(args.m, args.k / 32, swizzled, args.num_groups);
  check_shape("scales", scales, wanted.rows, wanted.columns);
  args.dtype = dtype_of("dtype", dtype);
  args.scales_are_compact = swizzled ? 0 : 1;
  // The struct is that of quantization too, so that its pointers are not const.
  args.*data = static_cast<uint8_t*>(const_cast<void*>(values.const_data_ptr()));
  args.scales = static_cast<uint8_t*>(const_cast<void*>(scales.const_data_ptr()));
  Tensor y = empty(args.m, args.k, dtype, device);
  args.y = y.mutable_data_ptr();
  check_status(dequantize(&args, device, current_stream(device)));
  return y;
}

}  // namespace

std::tuple<Tensor, Tensor> mxfp8_quantize(Tensor const& x, int64_t axis, ScalarType dtype, bool swizzled,
                                          std::optional<Tensor> offs) {
  fp4gemm_mxfp8_args_t args = FP4GEMM_MXFP8_ARGS_INIT;
  args.fp8 = fp8_of("dtype", dtype);
  return mx_quantize(args, &fp4gemm_mxfp8_args_t::values, dtype, 1, x, axis, swizzled, offs,
                     fp4gemm_mxfp8_quantize);
}

Tensor mxfp8_dequantize(Tensor const& values, Tensor const& scales, ScalarType dtype, bool swizzled,
                        std::optional<Tensor> offs) {
  fp4gemm_mxfp8_args_t args = FP4GEMM_MXFP8_ARGS_INIT;
  args.fp8 = fp8_of("values", values.scalar_type());
  return mx_dequantize(args, &fp4gemm_mxfp8_args_t::values, "values", 1, values, scales, dtype, swizzled,
                       offs, fp4gemm_mxfp8_dequantize);
}

std::tuple<Tensor, Tensor> mxfp4_quantize(Tensor const& x, int64_t axis, bool ceil, bool swizzled,
                                          std::optional<Tensor> offs) {
  fp4gemm_mxfp4_args_t args = FP4GEMM_MXFP4_ARGS_INIT;
  args.scale = ceil ? FP4GEMM_MXFP4_CEIL : FP4GEMM_MXFP4_FLOOR;
  return mx_quantize(args, &fp4gemm_mxfp4_args_t::codes, ScalarType::Byte, 2, x, axis, swizzled, offs,
                     fp4gemm_mxfp4_quantize);
}

Tensor mxfp4_dequantize(Tensor const& codes, Tensor const& scales, ScalarType dtype, bool swizzled,
                        std::optional<Tensor> offs) {
  check_dtype("codes", codes, ScalarType::Byte);
  return mx_dequantize(FP4GEMM_MXFP4_ARGS_INIT, &fp4gemm_mxfp4_args_t::codes, "codes", 2, codes, scales,
                       dtype, swizzled, offs, fp4gemm_mxfp4_dequantize);
}

Tensor decode(Tensor const& codes, Tensor const& scales) {
  int32_t const device = codes.get_device_index();
  check_matrix("codes", codes, ScalarType::Byte, device);
  int64_t const m = codes.size(0);
  int64_t const k = codes.size(1) * 2;
  check_scales("scales", scales, m, k, device);
  Tensor y = empty(m, k, ScalarType::Half, device);
  check_status(fp4gemm_decode(m, k, static_cast<uint8_t const*>(codes.const_data_ptr()),
                              static_cast<uint8_t const*>(scales.const_data_ptr()), y.mutable_data_ptr(),
                              device, current_stream(device)));
  return y;
}

}  // namespace fp4gemm_torch
