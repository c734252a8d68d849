// linear on CUDA tensors: quantization and product in one operator.
#include "linear_ops.hpp"

#include <torch/csrc/stable/ops.h>

#include <vector>

#include "gemm_ops.hpp"
#include "quantize_ops.hpp"

namespace fp4gemm_torch {
namespace {

constexpr int64_t kNotQuantized = 0, kRow = 1, kTensor = 2;  // scaling
constexpr int64_t kAlignBytes = 16;

/// The sizes of a tensor with another last size.
std::vector<int64_t> sizes_with_last(Tensor const& t, int64_t last) {
  std::vector<int64_t> sizes(t.sizes().begin(), t.sizes().end());
  sizes.back() = last;
  return sizes;
}

/// t (..., columns) as a contiguous, aligned matrix; a copy if it is neither.
Tensor matrix_of(char const* name, Tensor const& t) {
  STD_TORCH_CHECK(t.dim() >= 1, name, ": has no dimensions, must have one or more");
  int64_t const columns = t.size(t.dim() - 1);
  STD_TORCH_CHECK(columns > 0, name, ": last size is 0, must be positive");
  Tensor const rows = torch::stable::contiguous(torch::stable::reshape(t, {t.numel() / columns, columns}));
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % kAlignBytes == 0 ? rows
                                                                               : torch::stable::clone(rows);
}

void check_bound(char const* name, int64_t e4m3_max) {
  STD_TORCH_CHECK(e4m3_max == 448 || e4m3_max == 256, name, ": is ", e4m3_max, ", must be 448 or 256");
}

}  // namespace

Tensor linear(Tensor const& x, Tensor const& weight, std::optional<Tensor> weight_scales,
              Tensor const& weight_amax, std::optional<Tensor> bias, int64_t weight_rows,
              int64_t weight_e4m3_max, int64_t scaling, int64_t activation, std::optional<Tensor> c,
              double beta, std::optional<Tensor> x_scales, std::optional<Tensor> x_amax, int64_t x_e4m3_max,
              bool batch_invariant, std::optional<std::string> kernel, std::optional<ScalarType> out_dtype) {
  check_bound("weight_e4m3_max", weight_e4m3_max);
  check_bound("x_e4m3_max", x_e4m3_max);
  STD_TORCH_CHECK(scaling >= kNotQuantized && scaling <= kTensor, "scaling: is ", scaling,
                  ", must be 0, 1 or 2");
  STD_TORCH_CHECK(x_amax.has_value() || (!x_scales.has_value() && x_e4m3_max == 448),
                  "x_amax: is None, must be given with x_scales and with x_e4m3_max 256");
  Tensor a = matrix_of("x", x);
  std::optional<Tensor> scale_a = x_scales;
  std::optional<Tensor> amax_a = x_amax;
  if (!x_amax.has_value() && scaling != kNotQuantized) {
    if (weight_rows > 0) {
      auto [values, amax] = quantize_decoded(a, std::nullopt, scaling == kRow, 0, 0, false, 448, 0, 0,
                                             std::nullopt, std::nullopt);
      a = values;
      amax_a = amax;
    } else {
      auto [codes, scales, amax] = quantize(a, std::nullopt, scaling == kRow, -1, 1, 0, 0, false, 448, 0, 0,
                                            std::nullopt, std::nullopt);
      a = codes;
      scale_a = scales;
      amax_a = amax;
    }
  }
  float const bounds = static_cast<float>(amax_a.has_value() ? 36 * x_e4m3_max * weight_e4m3_max
                                                             : 6 * weight_e4m3_max);  // exact
  if (c.has_value()) {
    c = matrix_of("c", *c);
  }
  ScalarType const type = out_dtype.has_value() ? *out_dtype
                          : x_amax.has_value()  ? ScalarType::BFloat16
                                                : x.scalar_type();
  Tensor const out =
      gemm(a, weight, scale_a, weight_scales, std::nullopt, 1.0f / bounds, std::nullopt, amax_a, weight_amax,
           bias, activation, c, beta, batch_invariant, weight_rows, kernel, type);
  return x.dim() == 2 ? out : torch::stable::reshape(out, sizes_with_last(x, out.size(1)));
}

}  // namespace fp4gemm_torch
