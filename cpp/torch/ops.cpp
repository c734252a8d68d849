// The torch ops of fp4gemm: schemas, registration, and scaled_mm on CUDA.
//
// Built against torch's stable ABI: one binary serves every torch >= 2.11, with or without CUDA, and every
// Python. The CPU implementations and the fake (shape-only) ones are registered in Python.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "quantize_ops.hpp"
#include "tensors.hpp"

namespace fp4gemm_torch {
namespace {

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
}  // namespace fp4gemm_torch

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
  m.impl("quantize", TORCH_BOX(&fp4gemm_torch::quantize));
  m.impl("quantize_both", TORCH_BOX(&fp4gemm_torch::quantize_both));
  m.impl("silu_and_mul_quantize", TORCH_BOX(&fp4gemm_torch::silu_and_mul_quantize));
  m.impl("rms_norm_quantize", TORCH_BOX(&fp4gemm_torch::rms_norm_quantize));
  m.impl("mxfp8_quantize", TORCH_BOX(&fp4gemm_torch::mxfp8_quantize));
  m.impl("mxfp8_dequantize", TORCH_BOX(&fp4gemm_torch::mxfp8_dequantize));
  m.impl("dequantize", TORCH_BOX(&fp4gemm_torch::dequantize));
  m.impl("decode", TORCH_BOX(&fp4gemm_torch::decode));
  m.impl("scaled_mm", TORCH_BOX(&fp4gemm_torch::scaled_mm));
  m.impl("scaled_mm_out", TORCH_BOX(&fp4gemm_torch::scaled_mm_out));
}
