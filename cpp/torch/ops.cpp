// The torch ops of fp4gemm: schemas, and CUDA implementations that check tensors, allocate and call the C
// interface.
//
// Built against torch's stable ABI: one binary serves every torch >= 2.11, with or without CUDA, and every
// Python. The CPU implementations and the fake (shape-only) ones are registered in Python.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <tuple>

#include "fp4gemm/fp4gemm.h"

// A torch without CUDA does not have this one; it is only called for CUDA tensors.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

char const* name_of(ScalarType type) { return torch::headeronly::toString(type); }

void check_status(fp4gemm_status_t status) {
  STD_TORCH_CHECK(status == FP4GEMM_SUCCESS, "fp4gemm: ", fp4gemm_last_error());
}

fp4gemm_stream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<fp4gemm_stream_t>(stream);
}

fp4gemm_dtype_t dtype_of(char const* name, ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16: return FP4GEMM_BF16;
    case ScalarType::Half: return FP4GEMM_FP16;
    case ScalarType::Float: return FP4GEMM_FP32;
    default: STD_TORCH_CHECK(false, name, ": dtype is ", name_of(type), ", must be BFloat16, Half or Float");
  }
}

/// A new contiguous tensor on a CUDA device; cols < 0 makes a vector.
Tensor empty(int64_t rows, int64_t cols, ScalarType type, int32_t device) {
  int64_t const sizes[] = {rows, cols};
  int64_t const strides[] = {cols < 1 ? 1 : cols, 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(cols < 0 ? 1 : 2, sizes, strides,
                                                  static_cast<int32_t>(type), aoti_torch_device_type_cuda(),
                                                  device, &handle));
  return Tensor(handle);
}

void check_dtype(char const* name, Tensor const& tensor, ScalarType type) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": dtype is ", name_of(tensor.scalar_type()),
                  ", must be ", name_of(type));
}

void check_device(char const* name, Tensor const& tensor, int32_t device) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, name, ": must be on cuda:", device,
                  " like the other arguments");
}

/// A contiguous matrix on the device.
void check_matrix(char const* name, Tensor const& tensor, ScalarType type, int32_t device) {
  check_dtype(name, tensor, type);
  check_device(name, tensor, device);
  STD_TORCH_CHECK(tensor.dim() == 2, name, ": has ", tensor.dim(), " dimensions, must have 2");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": must be contiguous");
}

void check_shape(char const* name, Tensor const& tensor, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(tensor.size(0) == rows && tensor.size(1) == cols, name, ": shape is (", tensor.size(0),
                  ", ", tensor.size(1), "), must be (", rows, ", ", cols, ")");
}

/// The swizzled scales of a (rows, k) tensor.
void check_scales(char const* name, Tensor const& scales, int64_t rows, int64_t k, int32_t device) {
  check_matrix(name, scales, ScalarType::Float8_e4m3fn, device);
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
  fp4gemm_padded_scale_shape(rows, k, &scale_rows, &scale_cols);
  check_shape(name, scales, scale_rows, scale_cols);
}

/// A contiguous fp32 vector of `length` elements, or one element where that is allowed.
float const* check_vector(char const* name, Tensor const& vector, int64_t length, bool one_allowed,
                          int32_t device) {
  check_dtype(name, vector, ScalarType::Float);
  check_device(name, vector, device);
  STD_TORCH_CHECK(vector.dim() == 1 && (vector.size(0) == length || (one_allowed && vector.size(0) == 1)),
                  name, ": has ", vector.numel(), " elements in ", vector.dim(),
                  " dimensions, must be a vector of ", length, one_allowed ? " or 1" : "");
  STD_TORCH_CHECK(vector.is_contiguous(), name, ": must be contiguous");
  return static_cast<float const*>(vector.const_data_ptr());
}

/// x (m, k) with unit stride along k, which the quantizers read.
template <class Args>
void set_input(Args& args, Tensor const& x, int64_t step = 16) {
  STD_TORCH_CHECK(x.dim() == 2, "x: has ", x.dim(), " dimensions, must have 2");
  STD_TORCH_CHECK(x.stride(1) == 1, "x: stride along k is ", x.stride(1), ", must be 1");
  args.m = x.size(0);
  args.k = x.size(1);
  STD_TORCH_CHECK(args.k > 0 && args.k % step == 0, "x: k is ", args.k, ", must be a positive multiple of ",
                  step);
  args.x = x.const_data_ptr();
  args.x_row_stride = args.m > 1 ? x.stride(0) : args.k;  // torch leaves the stride of a single row open
}

/// The ends of groups, and how many there are.
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
  args.num_groups = static_cast<int>(offs->size(0));
}

Tensor empty_scales(int64_t rows, int64_t k, int num_groups, int32_t device) {
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
  fp4gemm_padded_scale_shape(rows, k, &scale_rows, &scale_cols);
  if (num_groups > 0) {
    scale_rows = fp4gemm_grouped_scale_rows(rows, num_groups);
  }
  return empty(scale_rows, scale_cols, ScalarType::Float8_e4m3fn, device);
}

struct Quantized {
  Tensor codes;
  Tensor scales;
  Tensor amax;  // without elements where it was given
};

/// New tensors for one direction of the result: rows of k elements.
Quantized set_side(char const* amax_name, fp4gemm_quantized_t& side, int64_t rows, int64_t k,
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
  Quantized result{empty(rows, k / 2, ScalarType::Byte, device), empty_scales(rows, k, num_groups, device),
                   empty(!is_written            ? 0
                         : per_row || is_spread ? rows
                                                : 1,
                         -1, ScalarType::Float, device)};
  side.codes = static_cast<uint8_t*>(result.codes.mutable_data_ptr());
  side.scales = static_cast<uint8_t*>(result.scales.mutable_data_ptr());
  side.amax = is_written ? static_cast<float*>(result.amax.mutable_data_ptr()) : nullptr;
  return result;
}

void set_options(fp4gemm_quantize_args_t& args, bool per_row, int64_t block_rows, int64_t encode,
                 int64_t four_over_six, bool fast_error, int64_t e4m3_max, int64_t signs,
                 std::optional<Tensor> const& rng_state, int32_t device) {
  args.scaling = per_row ? FP4GEMM_SCALING_ROW : FP4GEMM_SCALING_TENSOR;
  args.block_rows = static_cast<int>(block_rows);
  args.encode = static_cast<fp4gemm_encode_t>(encode);
  args.four_over_six = static_cast<fp4gemm_four_over_six_t>(four_over_six);
  args.fast_error = fast_error ? 1 : 0;
  args.e4m3_max = static_cast<int>(e4m3_max);
  args.hadamard_signs = static_cast<unsigned>(signs);
  if (rng_state.has_value()) {
    check_dtype("rng_state", *rng_state, ScalarType::Long);
    check_device("rng_state", *rng_state, device);
    STD_TORCH_CHECK(rng_state->dim() == 1 && rng_state->size(0) == 2 && rng_state->is_contiguous(),
                    "rng_state: must be a contiguous vector of 2 elements");
    args.rng_state = static_cast<int64_t const*>(rng_state->const_data_ptr());
  }
}

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor const& x, std::optional<Tensor> amax, bool per_row,
                                            int64_t axis, int64_t block_rows, int64_t encode,
                                            int64_t four_over_six, bool fast_error, int64_t e4m3_max,
                                            int64_t hadamard, int64_t signs, std::optional<Tensor> rng_state,
                                            std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  set_input(args, x);
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_options(args, per_row, block_rows, encode, four_over_six, fast_error, e4m3_max, signs, rng_state,
              device);
  set_groups(args, offs, device);
  STD_TORCH_CHECK(axis == -1 || axis == 0, "axis: is ", axis, ", must be -1 or 0");
  bool const along_m = axis == 0;
  STD_TORCH_CHECK(!along_m || (args.m > 0 && args.m % 16 == 0), "x: m is ", args.m,
                  ", must be a positive multiple of 16 for axis 0");
  fp4gemm_quantized_t& side = along_m ? args.column : args.row;
  side.hadamard = static_cast<fp4gemm_hadamard_t>(hadamard);
  Quantized out = set_side("amax", side, along_m ? args.k : args.m, along_m ? args.m : args.k, amax, per_row,
                           args.num_groups, device);
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {out.codes, out.scales, out.amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_both(
    Tensor const& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, bool per_row,
    int64_t block_rows, int64_t encode, int64_t four_over_six, bool fast_error, int64_t e4m3_max,
    int64_t hadamard, int64_t signs, std::optional<Tensor> rng_state) {
  int32_t const device = x.get_device_index();
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  set_input(args, x);
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_options(args, per_row, block_rows, encode, four_over_six, fast_error, e4m3_max, signs, rng_state,
              device);
  STD_TORCH_CHECK(args.m > 0 && args.m % 16 == 0, "x: m is ", args.m, ", must be a positive multiple of 16");
  STD_TORCH_CHECK(amax.has_value() == amax_t.has_value(), "amax_t: must be given exactly if amax is");
  args.column.hadamard = static_cast<fp4gemm_hadamard_t>(hadamard);
  Quantized row = set_side("amax", args.row, args.m, args.k, amax, per_row, 0, device);
  Quantized column = set_side("amax_t", args.column, args.k, args.m, amax_t, per_row, 0, device);
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {row.codes, row.scales, row.amax, column.codes, column.scales, column.amax};
}

/// What the two fused producers write.
template <class Args>
Quantized set_output(Args& args, int32_t device, int num_groups) {
  Quantized result{empty(args.m, args.k / 2, ScalarType::Byte, device),
                   empty_scales(args.m, args.k, num_groups, device),
                   empty(args.m, -1, ScalarType::Float, device)};
  args.codes = static_cast<uint8_t*>(result.codes.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(result.scales.mutable_data_ptr());
  args.amax = static_cast<float*>(result.amax.mutable_data_ptr());
  return result;
}

std::tuple<Tensor, Tensor, Tensor> silu_and_mul_quantize(Tensor const& x, std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  fp4gemm_silu_and_mul_quantize_args_t args = FP4GEMM_SILU_AND_MUL_QUANTIZE_ARGS_INIT;
  set_input(args, x, 32);
  args.k /= 2;
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_groups(args, offs, device);
  Quantized out = set_output(args, device, args.num_groups);
  check_status(fp4gemm_silu_and_mul_quantize(&args, device, current_stream(device)));
  return {out.codes, out.scales, out.amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_quantize(Tensor const& x, std::optional<Tensor> weight,
                                                             std::optional<Tensor> residual, double eps) {
  int32_t const device = x.get_device_index();
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
  Tensor sum =
      empty(residual.has_value() ? args.m : 0, residual.has_value() ? args.k : -1, x.scalar_type(), device);
  if (residual.has_value()) {
    check_matrix("residual", *residual, x.scalar_type(), device);
    check_shape("residual", *residual, args.m, args.k);
    args.residual = residual->const_data_ptr();
    args.sum = sum.mutable_data_ptr();
  }
  Quantized out = set_output(args, device, 0);
  check_status(fp4gemm_rms_norm_quantize(&args, device, current_stream(device)));
  return {out.codes, out.scales, out.amax, sum};
}

Tensor dequantize(Tensor const& codes, Tensor const& scales, Tensor const& amax, int64_t e4m3_max,
                  ScalarType dtype, bool swizzled, std::optional<Tensor> offs) {
  int32_t const device = codes.get_device_index();
  check_matrix("codes", codes, ScalarType::Byte, device);
  fp4gemm_dequantize_args_t args = FP4GEMM_DEQUANTIZE_ARGS_INIT;
  args.m = codes.size(0);
  args.k = codes.size(1) * 2;
  set_groups(args, offs, device);
  if (swizzled && args.num_groups == 0) {
    check_scales("scales", scales, args.m, args.k, device);
  } else {
    check_matrix("scales", scales, ScalarType::Float8_e4m3fn, device);
    check_shape("scales", scales, swizzled ? fp4gemm_grouped_scale_rows(args.m, args.num_groups) : args.m,
                swizzled ? (args.k / 16 + 3) / 4 * 4 : args.k / 16);
  }
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

fp4gemm_fp8_t fp8_of(char const* name, ScalarType type) {
  switch (type) {
    case ScalarType::Float8_e4m3fn: return FP4GEMM_E4M3;
    case ScalarType::Float8_e5m2: return FP4GEMM_E5M2;
    default:
      STD_TORCH_CHECK(false, name, ": dtype is ", name_of(type), ", must be Float8_e4m3fn or Float8_e5m2");
  }
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
  Tensor scales =
      empty(swizzled ? (rows + 127) / 128 * 128 : rows, swizzled ? (columns / 32 + 3) / 4 * 4 : columns / 32,
            ScalarType::Float8_e8m0fnu, device);
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
  check_shape("scales", scales, swizzled ? (args.m + 127) / 128 * 128 : args.m,
              swizzled ? (args.k / 32 + 3) / 4 * 4 : args.k / 32);
  args.dtype = dtype_of("dtype", dtype);
  args.scales_are_compact = swizzled ? 0 : 1;
  // One struct serves both directions, so that what is only read here is not const there.
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

/// An operand with its scales, or one that is decoded already.
fp4gemm_operand_t operand_of(char const* name, char const* scale_name, Tensor const& data,
                             std::optional<Tensor> const& scales, int64_t k, int32_t device) {
  if (!scales.has_value()) {
    check_matrix(name, data, ScalarType::Half, device);
    return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_FP16};
  }
  check_matrix(name, data, ScalarType::Byte, device);
  check_scales(scale_name, *scales, data.size(0), k, device);
  return {data.const_data_ptr(), scales->const_data_ptr(), FP4GEMM_FORMAT_NVFP4};
}

int64_t k_of(Tensor const& data, std::optional<Tensor> const& scales) {
  return data.size(1) * (scales.has_value() ? 2 : 1);
}

/// scaled_mm into an existing (m, n) tensor of which the rows are contiguous.
void run_scaled_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& scale_a,
                   std::optional<Tensor> const& scale_b, double alpha, std::optional<Tensor> const& alpha_row,
                   std::optional<Tensor> const& alpha_col, std::optional<Tensor> const& bias,
                   std::optional<std::string> const& kernel, Tensor const& out) {
  int32_t const device = a.get_device_index();
  fp4gemm_dense_args_t args = FP4GEMM_DENSE_ARGS_INIT;
  STD_TORCH_CHECK(a.dim() == 2, "a: has ", a.dim(), " dimensions, must have 2");
  STD_TORCH_CHECK(b.dim() == 2, "b: has ", b.dim(), " dimensions, must have 2");
  args.m = a.size(0);
  args.n = b.size(0);
  args.k = k_of(a, scale_a);
  STD_TORCH_CHECK(k_of(b, scale_b) == args.k, "b: k is ", k_of(b, scale_b), ", must be ", args.k, " as of a");
  args.a = operand_of("a", "scale_a", a, scale_a, args.k, device);
  args.b = operand_of("b", "scale_b", b, scale_b, args.k, device);
  args.alpha = static_cast<float>(alpha);
  if (alpha_row.has_value()) {
    args.alpha_row = {check_vector("alpha_row", *alpha_row, args.m, true, device), alpha_row->size(0)};
  }
  if (alpha_col.has_value()) {
    args.alpha_col = {check_vector("alpha_col", *alpha_col, args.n, true, device), alpha_col->size(0)};
  }
  if (bias.has_value()) {
    args.bias = check_vector("bias", *bias, args.n, false, device);
  }
  args.out_dtype = dtype_of("out", out.scalar_type());
  args.d = out.mutable_data_ptr();
  args.d_row_stride = args.m > 1 && args.n > 0 ? out.stride(0) : args.n;
  args.kernel = kernel.has_value() ? kernel->c_str() : nullptr;

  size_t workspace_bytes = 0;
  check_status(fp4gemm_dense_workspace_bytes(&args, device, &workspace_bytes));
  std::optional<Tensor> workspace;
  void* workspace_data = nullptr;
  if (workspace_bytes > 0) {
    workspace = empty(static_cast<int64_t>(workspace_bytes), -1, ScalarType::Byte, device);
    workspace_data = workspace->mutable_data_ptr();
  }
  check_status(fp4gemm_dense(&args, workspace_data, workspace_bytes, device, current_stream(device)));
}

Tensor scaled_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                 std::optional<Tensor> scale_b, double alpha, std::optional<Tensor> alpha_row,
                 std::optional<Tensor> alpha_col, std::optional<Tensor> bias, ScalarType out_dtype,
                 std::optional<std::string> kernel) {
  Tensor out = empty(a.size(0), b.size(0), out_dtype, a.get_device_index());
  run_scaled_mm(a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, kernel, out);
  return out;
}

void scaled_mm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                   std::optional<Tensor> scale_b, double alpha, std::optional<Tensor> alpha_row,
                   std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                   std::optional<std::string> kernel, Tensor out) {
  check_device("out", out, a.get_device_index());
  STD_TORCH_CHECK(out.dim() == 2, "out: has ", out.dim(), " dimensions, must have 2");
  check_shape("out", out, a.size(0), b.size(0));
  STD_TORCH_CHECK(out.stride(1) == 1, "out: stride along n is ", out.stride(1), ", must be 1");
  run_scaled_mm(a, b, scale_a, scale_b, alpha, alpha_row, alpha_col, bias, kernel, out);
}

}  // namespace

STABLE_TORCH_LIBRARY(fp4gemm, m) {
  m.def(
      "quantize(Tensor x, Tensor? amax, bool per_row, int axis=-1, int block_rows=1, int encode=0, "
      "int four_over_six=0, bool fast_error=False, int e4m3_max=448, int hadamard=0, int signs=0, "
      "Tensor? rng_state=None, Tensor? offs=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "quantize_both(Tensor x, Tensor? amax, Tensor? amax_t, bool per_row, int block_rows=1, int encode=0, "
      "int four_over_six=0, bool fast_error=False, int e4m3_max=448, int hadamard=0, int signs=0, "
      "Tensor? rng_state=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("silu_and_mul_quantize(Tensor x, Tensor? offs=None) -> (Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm_quantize(Tensor x, Tensor? weight, Tensor? residual, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "dequantize(Tensor codes, Tensor scales, Tensor amax, int e4m3_max, ScalarType dtype, "
      "bool swizzled=True, Tensor? offs=None) -> Tensor");
  m.def("decode(Tensor codes, Tensor scales) -> Tensor");
  m.def("mxfp8_quantize(Tensor x, int axis, ScalarType dtype, bool swizzled) -> (Tensor, Tensor)");
  m.def("mxfp8_dequantize(Tensor values, Tensor scales, ScalarType dtype, bool swizzled) -> Tensor");
  m.def(
      "scaled_mm(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, float alpha, Tensor? alpha_row, "
      "Tensor? alpha_col, "
      "Tensor? bias, ScalarType out_dtype, str? kernel) -> Tensor");
  m.def(
      "scaled_mm_out(Tensor a, Tensor b, Tensor? scale_a, Tensor? scale_b, float alpha, Tensor? alpha_row, "
      "Tensor? alpha_col, "
      "Tensor? bias, str? kernel, *, Tensor(d!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fp4gemm, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&quantize));
  m.impl("quantize_both", TORCH_BOX(&quantize_both));
  m.impl("silu_and_mul_quantize", TORCH_BOX(&silu_and_mul_quantize));
  m.impl("rms_norm_quantize", TORCH_BOX(&rms_norm_quantize));
  m.impl("mxfp8_quantize", TORCH_BOX(&mxfp8_quantize));
  m.impl("mxfp8_dequantize", TORCH_BOX(&mxfp8_dequantize));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
  m.impl("scaled_mm_out", TORCH_BOX(&scaled_mm_out));
}
