// The operators of the fused producers on CUDA: SiLU and RMS norm, each quantized. They check tensors,
// allocate results and call the C interface.
#include "quantize_call.hpp"
#include "quantize_ops.hpp"

namespace fp4gemm_torch {
namespace {

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

/// The arguments of silu_and_mul_quantize without its results: x = [gate | up] and groups. k must be a
/// multiple of `step`.
fp4gemm_silu_and_mul_quantize_args_t silu_args(Tensor const& x, std::optional<Tensor> const& offs,
                                               int32_t device, int64_t step = 16) {
  fp4gemm_silu_and_mul_quantize_args_t args = FP4GEMM_SILU_AND_MUL_QUANTIZE_ARGS_INIT;
  set_input(args, x, 2 * step);
  args.k /= 2;
  args.x_dtype = dtype_of("x", x.scalar_type());
  set_groups(args, offs, device);
  return args;
}

/// The arguments of rms_norm_quantize without its results, except for *sum, which becomes the new residual.
/// k must be a multiple of `step`.
fp4gemm_rms_norm_quantize_args_t norm_args(Tensor const& x, std::optional<Tensor> const& weight,
                                           std::optional<Tensor> const& residual, double eps, Tensor* sum,
                                           int32_t device, int64_t step = 16) {
  fp4gemm_rms_norm_quantize_args_t args = FP4GEMM_RMS_NORM_QUANTIZE_ARGS_INIT;
  set_input(args, x, step);
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

}  // namespace

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

std::tuple<Tensor, Tensor> silu_and_mul_quantize_fp8(Tensor const& x, std::optional<Tensor> offs) {
  int32_t const device = x.get_device_index();
  fp4gemm_silu_and_mul_quantize_args_t args = silu_args(x, offs, device, kFp8Step);
  Tensor data = set_fp8(args, args.m, args.k, device);
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

std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize_fp8(Tensor const& x, std::optional<Tensor> weight,
                                                         std::optional<Tensor> residual, double eps) {
  int32_t const device = x.get_device_index();
  Tensor sum;
  fp4gemm_rms_norm_quantize_args_t args = norm_args(x, weight, residual, eps, &sum, device, kFp8Step);
  Tensor data = set_fp8(args, args.m, args.k, device);
  Tensor amax = set_row_amax(args, device);
  check_status(fp4gemm_rms_norm_quantize(&args, device, current_stream(device)));
  return {data, amax, sum};
}

}  // namespace fp4gemm_torch
