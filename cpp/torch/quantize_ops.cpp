// The quantize, dequantize and decode operators on CUDA: they check tensors, allocate results and call the C
// interface.
#include "quantize_ops.hpp"

#include "tensors.hpp"

namespace fp4gemm_torch {
namespace {

/// Sets x (m, k), which must have unit stride along k, and its sizes. k must be a multiple of `step`.
template <class Args>
void set_input(Args& args, Tensor const& x, int64_t step = 16) {
  STD_TORCH_CHECK(x.dim() == 2, "x: has ", x.dim(), " dimensions, must have 2");
  STD_TORCH_CHECK(x.stride(1) == 1, "x: stride along k is ", x.stride(1), ", must be 1");
  args.m = x.size(0);
  args.k = x.size(1);
  STD_TORCH_CHECK(args.k > 0 && args.k % step == 0, "x: k is ", args.k, ", must be a positive multiple of ",
                  step);
  args.x = x.const_data_ptr();
  args.x_row_stride = args.m > 1 ? x.stride(0) : args.k;  // the stride of a single row may be any number
}

/// Sets the ends of groups and their number, if there are groups.
template <class Args>
void set_groups(Args& args, std::optional<Tensor> const& offs, int32_t device) {
  if (!offs.has_value()) {
    return;
  }
  check_dtype("offs", *offs, ScalarType::Int);
  check_device("offs", *offs, device);
  STD_TORCH_CHECK(offs->dim() == 1 && offs->size(0) >= 1 && offs->is_contiguous(),
                  "offs: must be a contiguous vector of one element or more");
  args.offs = static_cast<int32_t const*>(offs->const_data_ptr());
  args.num_groups = narrow("offs: number of groups", offs->size(0));
}

struct Shape {
  int64_t rows;
  int64_t columns;
};

/// The shape of the scales of `rows` rows of `blocks` blocks, compact or swizzled. num_groups: groups of
/// rows, or 0.
Shape scale_shape(int64_t rows, int64_t blocks, bool swizzled = true, int num_groups = 0) {
  Shape shape{rows, blocks};
  if (swizzled) {
    fp4gemm_padded_scale_shape(rows, 16 * blocks, &shape.rows, &shape.columns);
  }
  if (num_groups > 0) {
    shape.rows = fp4gemm_grouped_scale_rows(rows, num_groups);
  }
  return shape;
}

struct Quantized {
  Tensor codes;
  Tensor scales;
  Tensor amax;  // without elements where it was given
};

/// Sets the amax of one direction, to `amax` if it is given and to a new tensor otherwise. Returns the new
/// tensor, which has no elements if no amax is written. num_groups: groups of rows, or 0.
Tensor set_amax(char const* amax_name, fp4gemm_quantized_t& side, int64_t rows,
                std::optional<Tensor> const& amax, bool per_row, int num_groups, int32_t device) {
  bool const is_spread = num_groups > 0 && !per_row;
  if (amax.has_value()) {
    side.amax_given = check_vector(amax_name, *amax,
                                   per_row     ? rows
                                   : is_spread ? num_groups
                                               : 1,
                                   false, device);
  }
  bool const is_written = !amax.has_value() || is_spread;
  Tensor result = empty(!is_written ? 0 : per_row || is_spread ? rows : 1, -1, ScalarType::Float, device);
  side.amax = is_written ? static_cast<float*>(result.mutable_data_ptr()) : nullptr;
  return result;
}

/// Sets new tensors for one direction of the result, (rows, k), and returns them.
Quantized set_side(char const* amax_name, fp4gemm_quantized_t& side, int64_t rows, int64_t k,
                   std::optional<Tensor> const& amax, bool per_row, int num_groups, int32_t device) {
  Shape const scales = scale_shape(rows, k / 16, true, num_groups);
  Quantized result{empty(rows, k / 2, ScalarType::Byte, device),
                   empty(scales.rows, scales.columns, ScalarType::Float8_e4m3fn, device),
                   set_amax(amax_name, side, rows, amax, per_row, num_groups, device)};
  side.codes = static_cast<uint8_t*>(result.codes.mutable_data_ptr());
  side.scales = static_cast<uint8_t*>(result.scales.mutable_data_ptr());
  return result;
}

#define FP4GEMM_AS_FIELD(type, name, schema) type name;
#define FP4GEMM_AS_ARGUMENT(type, name, schema) , name

/// The options of the quantize operators, in the order of their schemas. hadamard is that of the direction
/// that the operator rotates.
struct QuantizeOptions {
  bool per_row;
  int64_t block_rows;
  FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_FIELD)
  std::optional<Tensor> offs;
};

/// The arguments of a call without its results: x and the options, except for hadamard.
fp4gemm_quantize_args_t quantize_args(Tensor const& x, QuantizeOptions const& options, int32_t device) {
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  set_input(args, x);
  args.x_dtype = dtype_of("x", x.scalar_type());
  args.scaling = options.per_row ? FP4GEMM_SCALING_ROW : FP4GEMM_SCALING_TENSOR;
  args.block_rows = narrow("block_rows", options.block_rows);
  args.encode = static_cast<fp4gemm_encode_t>(narrow("encode", options.encode));
  args.four_over_six = static_cast<fp4gemm_four_over_six_t>(narrow("four_over_six", options.four_over_six));
  args.fast_error = options.fast_error ? 1 : 0;
  args.e4m3_max = narrow("e4m3_max", options.e4m3_max);
  args.hadamard_signs = static_cast<unsigned>(narrow("signs", options.signs));
  if (options.rng_state.has_value()) {
    Tensor const& state = *options.rng_state;
    check_dtype("rng_state", state, ScalarType::Long);
    check_device("rng_state", state, device);
    STD_TORCH_CHECK(state.dim() == 1 && state.size(0) == 2 && state.is_contiguous(),
                    "rng_state: must be a contiguous vector of 2 elements");
    args.rng_state = static_cast<int64_t const*>(state.const_data_ptr());
  }
  set_groups(args, options.offs, device);
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

fp4gemm_hadamard_t hadamard_of(QuantizeOptions const& options) {
  return static_cast<fp4gemm_hadamard_t>(narrow("hadamard", options.hadamard));
}

/// Sets a new tensor for decoded values, instead of codes and scales, and returns it.
template <class Result>
Tensor set_decoded(Result& result, int64_t rows, int64_t k, int32_t device) {
  Tensor data = empty(rows, k, ScalarType::Half, device);
  result.decoded = data.mutable_data_ptr();
  return data;
}

/// Sets a new tensor for the row amaxes of a fused producer and returns it.
template <class Args>
Tensor set_row_amax(Args& args, int32_t device) {
  Tensor amax = empty(args.m, -1, ScalarType::Float, device);
  args.amax = static_cast<float*>(amax.mutable_data_ptr());
  return amax;
}

/// Sets new tensors for all results of a fused producer and returns them.
template <class Args>
Quantized set_output(Args& args, int32_t device, int num_groups) {
  Shape const scales = scale_shape(args.m, args.k / 16, true, num_groups);
  Quantized result{empty(args.m, args.k / 2, ScalarType::Byte, device),
                   empty(scales.rows, scales.columns, ScalarType::Float8_e4m3fn, device),
                   set_row_amax(args, device)};
  args.codes = static_cast<uint8_t*>(result.codes.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(result.scales.mutable_data_ptr());
  return result;
}

/// The arguments of silu_and_mul_quantize without its results: x = [gate | up] and groups.
fp4gemm_silu_and_mul_quantize_args_t silu_args(Tensor const& x, std::optional<Tensor> const& offs,
                                               int32_t device) {
  fp4gemm_silu_and_mul_quantize_args_t args = FP4GEMM_SILU_AND_MUL_QUANTIZE_ARGS_INIT;
  set_input(args, x, 32);
  args.k /= 2;
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_groups(args, offs, device);
  return args;
}

/// The arguments of rms_norm_quantize without its results, except for *sum, which becomes the new residual.
fp4gemm_rms_norm_quantize_args_t norm_args(Tensor const& x, std::optional<Tensor> const& weight,
                                           std::optional<Tensor> const& residual, double eps, Tensor* sum,
                                           int32_t device) {
  fp4gemm_rms_norm_quantize_args_t args = FP4GEMM_RMS_NORM_QUANTIZE_ARGS_INIT;
  set_input(args, x);
  args.x_dtype = dtype_of("x", x.scalar_type());
  args.epsilon = static_cast<float>(eps);
  if (weight.has_value()) {
    check_dtype("weight", *weight, x.scalar_type());
    check_device("weight", *weight, device);
    STD_TORCH_CHECK(weight->dim() == 1 && weight->size(0) == args.k && weight->is_contiguous(),
                    "weight: must be a contiguous vector of ", args.k, " elements");
    args.weight = weight->const_data_ptr();
  }
  *sum =
      empty(residual.has_value() ? args.m : 0, residual.has_value() ? args.k : -1, x.scalar_type(), device);
  if (residual.has_value()) {
    check_matrix("residual", *residual, x.scalar_type(), device);
    check_shape("residual", *residual, args.m, args.k);
    args.residual = residual->const_data_ptr();
    args.sum = sum->mutable_data_ptr();
  }
  return args;
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
                                            std::optional<Tensor> offs, std::optional<Tensor> rows) {
  int32_t const device = x.get_device_index();
  QuantizeOptions const options{per_row, block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT), offs};
  fp4gemm_quantize_args_t args = quantize_args(x, options, device);
  STD_TORCH_CHECK(axis == -1 || axis == 0, "axis: is ", axis, ", must be -1 or 0");
  bool const along_m = axis == 0;
  set_rows(args, rows, device);
  STD_TORCH_CHECK(!along_m || offs.has_value() || (args.m > 0 && args.m % 16 == 0), "x: m is ", args.m,
                  ", must be a positive multiple of 16 for axis 0");
  fp4gemm_quantized_t& side = along_m ? args.column : args.row;
  side.hadamard = hadamard_of(options);
  int64_t const columns = offs.has_value() ? fp4gemm_grouped_columns(args.m, args.num_groups) : args.m;
  Quantized out = set_side("amax", side, along_m ? args.k : args.m, along_m ? columns : args.k, amax, per_row,
                           along_m ? 0 : args.num_groups, device);
  if (along_m && columns == 0) {
    if (side.amax == nullptr) {
      return {out.codes, out.scales, out.amax};  // nothing to write
    }
    // The codes have no elements and may have a null pointer, which would mean that no columns are quantized.
    side.codes = reinterpret_cast<uint8_t*>(side.amax);
  }
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {out.codes, out.scales, out.amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_both(
    Tensor const& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, bool per_row,
    int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER)) {
  int32_t const device = x.get_device_index();
  QuantizeOptions const options{per_row, block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT), std::nullopt};
  fp4gemm_quantize_args_t args = quantize_args(x, options, device);
  STD_TORCH_CHECK(args.m > 0 && args.m % 16 == 0, "x: m is ", args.m, ", must be a positive multiple of 16");
  STD_TORCH_CHECK(amax.has_value() == amax_t.has_value(), "amax_t: must be given exactly if amax is");
  args.column.hadamard = hadamard_of(options);
  Quantized row = set_side("amax", args.row, args.m, args.k, amax, per_row, 0, device);
  Quantized column = set_side("amax_t", args.column, args.k, args.m, amax_t, per_row, 0, device);
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {row.codes, row.scales, row.amax, column.codes, column.scales, column.amax};
}

std::tuple<Tensor, Tensor> quantize_decoded(Tensor const& x, std::optional<Tensor> amax,
                                            bool per_row FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER),
                                            std::optional<Tensor> offs, std::optional<Tensor> rows) {
  int32_t const device = x.get_device_index();
  QuantizeOptions const options{per_row, 1 FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT), offs};
  fp4gemm_quantize_args_t args = quantize_args(x, options, device);
  args.row.hadamard = hadamard_of(options);
  set_rows(args, rows, device);
  Tensor measured = set_amax("amax", args.row, args.m, amax, per_row, args.num_groups, device);
  Tensor data = set_decoded(args.row, args.m, args.k, device);
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {data, measured};
}

std::tuple<Tensor, Tensor, Tensor> silu_and_mul_quantize(Tensor const& x, std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  fp4gemm_silu_and_mul_quantize_args_t args = silu_args(x, offs, device);
  Quantized out = set_output(args, device, args.num_groups);
  check_status(fp4gemm_silu_and_mul_quantize(&args, device, current_stream(device)));
  return {out.codes, out.scales, out.amax};
}

std::tuple<Tensor, Tensor> silu_and_mul_quantize_decoded(Tensor const& x, std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  fp4gemm_silu_and_mul_quantize_args_t args = silu_args(x, offs, device);
  Tensor data = set_decoded(args, args.m, args.k, device);
  Tensor amax = set_row_amax(args, device);
  check_status(fp4gemm_silu_and_mul_quantize(&args, device, current_stream(device)));
  return {data, amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_quantize(Tensor const& x, std::optional<Tensor> weight,
                                                             std::optional<Tensor> residual, double eps) {
  int32_t const device = x.get_device_index();
  Tensor sum;
  fp4gemm_rms_norm_quantize_args_t args = norm_args(x, weight, residual, eps, &sum, device);
  Quantized out = set_output(args, device, 0);
  check_status(fp4gemm_rms_norm_quantize(&args, device, current_stream(device)));
  return {out.codes, out.scales, out.amax, sum};
}

std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize_decoded(Tensor const& x, std::optional<Tensor> weight,
                                                             std::optional<Tensor> residual, double eps) {
  int32_t const device = x.get_device_index();
  Tensor sum;
  fp4gemm_rms_norm_quantize_args_t args = norm_args(x, weight, residual, eps, &sum, device);
  Tensor data = set_decoded(args, args.m, args.k, device);
  Tensor amax = set_row_amax(args, device);
  check_status(fp4gemm_rms_norm_quantize(&args, device, current_stream(device)));
  return {data, amax, sum};
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

std::tuple<Tensor, Tensor> mxfp8_quantize(Tensor const& x, int64_t axis, ScalarType dtype, bool swizzled) {
  int32_t const device = x.get_device_index();
  fp4gemm_mxfp8_args_t args = FP4GEMM_MXFP8_ARGS_INIT;
  set_input(args, x, 32);
  args.dtype = dtype_of("x", x.scalar_type());
  args.fp8 = fp8_of("dtype", dtype);
  STD_TORCH_CHECK(axis == -1 || axis == 0, "axis: is ", axis, ", must be -1 or 0");
  args.is_transposed = axis == 0 ? 1 : 0;
  args.scales_are_compact = swizzled ? 0 : 1;
  int64_t const rows = axis == 0 ? args.k : args.m;
  int64_t const columns = axis == 0 ? args.m : args.k;
  STD_TORCH_CHECK(columns > 0 && columns % 32 == 0, "x: m is ", args.m,
                  ", must be a positive multiple of 32 for axis 0");
  Tensor values = empty(rows, columns, dtype, device);
  Shape const shape = scale_shape(rows, columns / 32, swizzled);
  Tensor scales = empty(shape.rows, shape.columns, ScalarType::Float8_e8m0fnu, device);
  args.values = static_cast<uint8_t*>(values.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  check_status(fp4gemm_mxfp8_quantize(&args, device, current_stream(device)));
  return {values, scales};
}

Tensor mxfp8_dequantize(Tensor const& values, Tensor const& scales, ScalarType dtype, bool swizzled) {
  int32_t const device = values.get_device_index();
  fp4gemm_mxfp8_args_t args = FP4GEMM_MXFP8_ARGS_INIT;
  args.fp8 = fp8_of("values", values.scalar_type());
  check_matrix("values", values, values.scalar_type(), device);
  args.m = values.size(0);
  args.k = values.size(1);
  check_matrix("scales", scales, ScalarType::Float8_e8m0fnu, device);
  Shape const wanted = scale_shape(args.m, args.k / 32, swizzled);
  check_shape("scales", scales, wanted.rows, wanted.columns);
  args.dtype = dtype_of("dtype", dtype);
  args.scales_are_compact = swizzled ? 0 : 1;
  // The struct is that of quantization too, so that its pointers are not const.
  args.values = static_cast<uint8_t*>(const_cast<void*>(values.const_data_ptr()));
  args.scales = static_cast<uint8_t*>(const_cast<void*>(scales.const_data_ptr()));
  Tensor y = empty(args.m, args.k, dtype, device);
  args.y = y.mutable_data_ptr();
  check_status(fp4gemm_mxfp8_dequantize(&args, device, current_stream(device)));
  return y;
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
