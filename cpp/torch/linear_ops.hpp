// The linear operator on CUDA tensors; ops.cpp has its schema.
#pragma once

#include <optional>
#include <string>

#include "tensors.hpp"

namespace fp4gemm_torch {

/// A linear layer: the quantization of x (..., k) and its product with a weight (n, k). D is (..., n), or
/// (..., n/2) with a gated activation. scaling: 0 (x is not quantized), 1 (an amax for each row), 2 (one),
/// 3 (e4m3 with an amax for each row) or 128 (MXFP8, as the weight, which alone has no amax). x_amax: x was
/// quantized before, to codes (..., k/2) with x_scales, to decoded fp16 values (..., k), or to e4m3 (..., k).
/// residual_channels: columns of x whose errors are quantized too; the weight is then (n, k + their number).
Tensor linear(Tensor const& x, Tensor const& weight, std::optional<Tensor> weight_scales,
              std::optional<Tensor> weight_amax, std::optional<Tensor> bias, int64_t weight_rows,
              int64_t weight_e4m3_max, int64_t scaling, int64_t activation, std::optional<Tensor> c,
              double beta, std::optional<Tensor> x_scales, std::optional<Tensor> x_amax, int64_t x_e4m3_max,
              bool batch_invariant, bool use_fast_accum, std::optional<std::string> kernel,
              std::optional<ScalarType> out_dtype, std::optional<Tensor> residual_channels);

}  // namespace fp4gemm_torch
