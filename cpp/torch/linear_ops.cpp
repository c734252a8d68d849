// linear on CUDA tensors: one call of the C interface, which quantizes x and multiplies.
#include "linear_ops.hpp"

#include <torch/csrc/stable/ops.h>

#include "gemm_call.hpp"
#include "gemm_ops.hpp"
#include "quantize_ops.hpp"

namespace fp4gemm_torch {
namespace {

constexpr int kMaxDims = 64;  // of a tensor of torch
constexpr uintptr_t kAlignBytes = 16;

/// A tensor (..., columns) as a matrix whose rows are contiguous, `stride` elements apart and aligned.
struct Rows {
  Tensor tensor;
  int64_t rows, columns, stride;

  void const* data() const { return tensor.const_data_ptr(); }
};

/// The distance of the rows of x (..., columns) in elements, or -1 if they are not equally far apart.
int64_t row_stride(Tensor const& x, int64_t columns) {
  auto const sizes = x.sizes();
  auto const strides = x.strides();
  int64_t const last = x.dim() - 1;
  if (columns > 1 && strides[last] != 1) {
    return -1;
  }
  int64_t stride = 0;
  int64_t rows = 1;
  for (int64_t i = last - 1; i >= 0; --i) {
    if (sizes[i] == 1) {
      continue;
    }
    if (rows == 1) {
      stride = strides[i];
    } else if (strides[i] != stride * rows) {
      return -1;
    }
    rows *= sizes[i];
  }
  return rows == 1 ? columns : stride;
}

bool is_aligned(void const* data) { return reinterpret_cast<uintptr_t>(data) % kAlignBytes == 0; }

/// x as rows; a copy of x if its rows are not so, or not adjacent where that is needed.
Rows rows_of(char const* name, Tensor const& x, bool adjacent) {
  STD_TORCH_CHECK(x.dim() >= 1, name, ": has no dimensions, must have one or more");
  int64_t const columns = x.size(x.dim() - 1);
  STD_TORCH_CHECK(columns > 0, name, ": last size is 0, must be positive");
  Rows const whole{x, x.numel() / columns, columns, columns};
  bool const contiguous = x.is_contiguous();
  bool const aligned = is_aligned(x.const_data_ptr());
  if (contiguous) {
    return aligned ? whole : Rows{torch::stable::clone(x), whole.rows, columns, columns};
  }
  int64_t const stride = adjacent || !aligned ? -1 : row_stride(x, columns);
  if (stride >= columns && stride * x.element_size() % kAlignBytes == 0) {
    return {x, whole.rows, columns, stride};
  }
  return {torch::stable::contiguous(x), whole.rows, columns, columns};
}

/// A new tensor with the sizes of x but for the last one.
Tensor empty_like_rows(Tensor const& x, int64_t columns, ScalarType type, int32_t device) {
  int64_t const dims = x.dim();
  auto const given = x.sizes();
  int64_t sizes[kMaxDims];
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    sizes[i] = i == dims - 1 ? columns : given[i];
    strides[i] = stride;
    stride *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, sizes, strides, static_cast<int32_t>(type),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

fp4gemm_format_t format_of(Tensor const& x) {
  switch (dtype_of("x", x.scalar_type())) {
    case FP4GEMM_BF16: return FP4GEMM_FORMAT_BF16;
    case FP4GEMM_FP16: return FP4GEMM_FORMAT_FP16;
    default: return FP4GEMM_FORMAT_FP32;
  }
}

}  // namespace

Tensor linear(Tensor const& x, Tensor const& weight, std::optional<Tensor> weight_scales,
              std::optional<Tensor> weight_amax, std::optional<Tensor> bias, int64_t weight_rows,
              int64_t weight_e4m3_max, int64_t scaling, int64_t activation, std::optional<Tensor> c,
              double beta, std::optional<Tensor> x_scales, std::optional<Tensor> x_amax, int64_t x_e4m3_max,
              bool batch_invariant, bool use_fast_accum, std::optional<std::string> kernel,
              std::optional<ScalarType> out_dtype, std::optional<Tensor> residual_channels) {
  STD_TORCH_CHECK(x.is_cuda(), "x: must be on a CUDA device like weight");
  int32_t const device = x.get_device_index();
  bool const is_quantized = x_amax.has_value();  // before this call
  STD_TORCH_CHECK(x_e4m3_max == 448 || x_e4m3_max == 256, "x_e4m3_max: is ", x_e4m3_max,
                  ", must be 448 or 256");
  InputCast input(scaling);
  bool const mxfp8 = input.is_mxfp8 && !is_quantized;
  // Beside MXFP8 tokens the weight is MXFP8, or codes with scales in e8m0, which packed_operand checks.
  bool const mxfp4_weight = mxfp8 && weight.scalar_type() == ScalarType::Byte && weight_scales.has_value() &&
                            weight_scales->scalar_type() == ScalarType::Float8_e8m0fnu;
  STD_TORCH_CHECK(mxfp8 == is_fp8(weight) || mxfp4_weight, "weight: dtype is ", name_of(weight.scalar_type()),
                  mxfp8 ? ", must be Float8_e4m3fn (MXFP8) or Byte with scales in Float8_e8m0fnu (MXFP4)"
                        : ", must not be Float8_e4m3fn (MXFP8)",
                  " with scaling ", scaling);
  STD_TORCH_CHECK(weight_amax.has_value() != mxfp8, "weight_amax: must ", mxfp8 ? "" : "not ",
                  "be None with scaling ", scaling);
  STD_TORCH_CHECK(is_quantized || (!x_scales.has_value() && x_e4m3_max == 448),
                  "x_amax: is None, must be given with x_scales and with x_e4m3_max 256");
  bool const fp8 = is_quantized ? is_fp8(x) : input.quantize_a == FP4GEMM_QUANTIZE_A_FP8;
  STD_TORCH_CHECK(is_quantized || !is_fp8(x), "x_amax: is None, must be given with x in Float8_e4m3fn");
  STD_TORCH_CHECK(!fp8 || x_e4m3_max == 448, "x_e4m3_max: is ", x_e4m3_max, ", must be 448 for FP8 tokens");
  check_fast_accum(use_fast_accum, fp8);

  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.quantize_a = is_quantized ? FP4GEMM_QUANTIZE_A_NONE : input.quantize_a;
  bool const quantizes = args.quantize_a != FP4GEMM_QUANTIZE_A_NONE;
  Rows const rows = rows_of("x", x, !quantizes);
  args.m = rows.rows;
  args.k = rows.columns * (x_scales.has_value() ? 2 : 1);
  if (residual_channels.has_value()) {
    STD_TORCH_CHECK(args.quantize_a == FP4GEMM_QUANTIZE_A_ROW || args.quantize_a == FP4GEMM_QUANTIZE_A_TENSOR,
                    "residual_channels: must be None unless x is quantized to NVFP4 (scaling 1 or 2)");
    check_dims("residual_channels", *residual_channels, 1);
    check_contiguous("residual_channels", *residual_channels, ScalarType::Int, device);
    int64_t const count = residual_channels->size(0);
    STD_TORCH_CHECK(count > 0 && count <= args.k, "residual_channels: has ", count,
                    " elements, must have 32 or more, and at most ", args.k);
    input.cast.num_residual_channels = static_cast<int>(count);
    input.cast.residual_channels = static_cast<int32_t const*>(residual_channels->const_data_ptr());
    args.k += count;
  }
  std::optional<std::tuple<Tensor, Tensor>> mxfp8_x;  // values and scales
  if (mxfp8) {
    mxfp8_x = mxfp8_quantize(torch::stable::view(rows.tensor, {args.m, args.k}), -1,
                             ScalarType::Float8_e4m3fn, true, std::nullopt);
    auto const& [values, scales] = *mxfp8_x;
    args.a = packed_operand("x", "x_scales", values, scales, 0, args.m, args.k, device);
  } else if (x_scales.has_value()) {
    args.a = packed_operand("x", "x_scales", rows.tensor, *x_scales, 0, args.m, args.k, device);
  } else if (is_quantized && fp8) {
    check_contiguous("x", rows.tensor, ScalarType::Float8_e4m3fn, device);
    args.a = {rows.data(), nullptr, FP4GEMM_FORMAT_E4M3};
  } else {
    STD_TORCH_CHECK(!is_quantized || x.scalar_type() == ScalarType::Half, "x: dtype is ",
                    name_of(x.scalar_type()),
                    ", must be Half or Float8_e4m3fn with x_amax and without x_scales");
    STD_TORCH_CHECK(is_quantized || quantizes || x.scalar_type() != ScalarType::Float,
                    "x: dtype is Float, must be BFloat16 or Half where scaling is 0");
    args.a = {rows.data(), nullptr, format_of(x)};
  }
  args.a_row_stride = quantizes ? rows.stride : 0;
  args.alpha_row = vector_of("x_amax", x_amax, 0, args.m, device);

  args.n = check_weight("weight", weight, weight_scales, weight_rows, weight_e4m3_max, args.k, fp8, "x");
  args.b_is_constant = weight_rows > 0 ? 1 : 0;  // as in the operator gemm
  args.b = weight_rows > 0 ? prepacked_operand("weight", weight, fp8, device)
                           : packed_operand("weight", "weight_scales", weight, *weight_scales, 0, args.n,
                                            args.k, device, mxfp4_weight);
  args.alpha_col = vector_of("weight_amax", weight_amax, 0, args.n, device);
  // The product of the bounds is exact, so that there is one rounding.
  int64_t const bound_of_x = fp8            ? 448
                             : quantizes    ? 6 * input.cast.e4m3_max
                             : is_quantized ? 6 * x_e4m3_max
                                            : 1;
  args.alpha = mxfp8 ? 1.0f : 1.0f / static_cast<float>(bound_of_x * 6 * weight_e4m3_max);
  args.bias = vector_of("bias", bias, 0, args.n, device);
  args.activation = static_cast<fp4gemm_activation_t>(narrow("activation", activation));

  int64_t const columns = is_gated(activation) ? args.n / 2 : args.n;
  ScalarType const type = out_dtype.has_value() ? *out_dtype
                          : is_quantized        ? ScalarType::BFloat16
                                                : x.scalar_type();
  args.out_dtype = dtype_of("out_dtype", type);
  Tensor const out = empty_like_rows(x, columns, type, device);
  args.d = out.mutable_data_ptr();
  args.d_row_stride = columns;
  STD_TORCH_CHECK(c.has_value() || beta == 1.0, "beta: is ", beta, ", must be 1 without c");
  std::optional<Rows> addend;
  if (c.has_value()) {
    check_dtype("c", *c, type);
    check_device("c", *c, device);
    check_dims("c", *c, out.dim());
    for (int64_t i = 0; i < out.dim(); ++i) {
      STD_TORCH_CHECK(c->size(i) == out.size(i), "c: size ", i, " is ", c->size(i), ", must be ",
                      out.size(i));
    }
    addend = rows_of("c", *c, false);
    args.c = addend->data();
    args.c_row_stride = addend->stride;
    args.beta = static_cast<float>(beta);
  }
  args.batch_invariant = batch_invariant ? 1 : 0;
  args.use_fast_accum = use_fast_accum ? 1 : 0;
  args.kernel = kernel.has_value() ? kernel->c_str() : nullptr;
  call_gemm(args, device, is_quantized ? FP4GEMM_CAST_INIT : input.cast);
  return out;
}

}  // namespace fp4gemm_torch
