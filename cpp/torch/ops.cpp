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

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor const& x, bool per_row) {
  int32_t const device = x.get_device_index();
  STD_TORCH_CHECK(x.dim() == 2, "x: has ", x.dim(), " dimensions, must have 2");
  STD_TORCH_CHECK(x.stride(1) == 1, "x: stride along k is ", x.stride(1), ", must be 1");

  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  args.m = x.size(0);
  args.k = x.size(1);
  args.x = x.const_data_ptr();
  args.x_row_stride = args.m > 1 ? x.stride(0) : args.k;  // torch leaves the stride of a single row open
  args.x_dtype = dtype_of("x", x.scalar_type());
  args.scaling = per_row ? FP4GEMM_SCALING_ROW : FP4GEMM_SCALING_TENSOR;
  STD_TORCH_CHECK(args.k > 0 && args.k % 16 == 0, "x: k is ", args.k, ", must be a positive multiple of 16");

  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
  fp4gemm_padded_scale_shape(args.m, args.k, &scale_rows, &scale_cols);
  Tensor codes = empty(args.m, args.k / 2, ScalarType::Byte, device);
  Tensor scales = empty(scale_rows, scale_cols, ScalarType::Float8_e4m3fn, device);
  Tensor amax = empty(per_row ? args.m : 1, -1, ScalarType::Float, device);
  args.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  args.amax = static_cast<float*>(amax.mutable_data_ptr());
  check_status(fp4gemm_quantize(&args, device, current_stream(device)));
  return {codes, scales, amax};
}

Tensor dequantize(Tensor const& codes, Tensor const& scales, Tensor const& amax, int64_t e4m3_max,
                  ScalarType dtype) {
  int32_t const device = codes.get_device_index();
  check_matrix("codes", codes, ScalarType::Byte, device);
  fp4gemm_dequantize_args_t args = FP4GEMM_DEQUANTIZE_ARGS_INIT;
  args.m = codes.size(0);
  args.k = codes.size(1) * 2;
  check_scales("scales", scales, args.m, args.k, device);
  args.codes = static_cast<uint8_t const*>(codes.const_data_ptr());
  args.scales = static_cast<uint8_t const*>(scales.const_data_ptr());
  args.amax = check_vector("amax", amax, args.m, true, device);
  args.scaling = amax.size(0) == 1 ? FP4GEMM_SCALING_TENSOR : FP4GEMM_SCALING_ROW;
  args.e4m3_max = static_cast<int>(e4m3_max);
  args.y_dtype = dtype_of("dtype", dtype);
  Tensor y = empty(args.m, args.k, dtype, device);
  args.y = y.mutable_data_ptr();
  check_status(fp4gemm_dequantize(&args, device, current_stream(device)));
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
  m.def("quantize(Tensor x, bool per_row) -> (Tensor, Tensor, Tensor)");
  m.def("dequantize(Tensor codes, Tensor scales, Tensor amax, int e4m3_max, ScalarType dtype) -> Tensor");
  m.def("decode(Tensor codes, Tensor scales) -> Tensor");
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
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("decode", TORCH_BOX(&decode));
  m.impl("scaled_mm", TORCH_BOX(&scaled_mm));
  m.impl("scaled_mm_out", TORCH_BOX(&scaled_mm_out));
}
