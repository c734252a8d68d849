// The operators of a training step of a linear layer on CUDA tensors; ops.cpp has their schemas.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "tensors.hpp"

namespace fp4gemm_torch {

/// y = x W^T + bias (m, n) of the dtype of x, and the codes, scales and amax of x^T.
///
/// cast, cast_t: how x and x^T are quantized, as the members of Cast in train_ops.cpp. decoded: the left
/// operand of the product is decoded. w: codes with scales, or the bytes of w_rows prepacked rows.
std::tuple<Tensor, Tensor, Tensor, Tensor> train_forward(Tensor const& x, std::vector<int64_t> cast,
                                                         std::vector<int64_t> cast_t, bool decoded,
                                                         std::optional<Tensor> rng_state, Tensor const& w,
                                                         std::optional<Tensor> w_scales, Tensor const& w_amax,
                                                         int64_t w_rows, int64_t w_e4m3_max,
                                                         std::optional<Tensor> bias);

/// dx = dy W (m, k) of the dtype of dy, and dW = dy^T x (n, k) of dw_dtype.
///
/// cast, cast_t: of dy and dy^T, both decoded or neither. w_t: W^T as w above. x_t: what train_forward made.
std::tuple<Tensor, Tensor> train_backward(Tensor const& dy, std::vector<int64_t> cast,
                                          std::vector<int64_t> cast_t, bool decoded,
                                          std::optional<Tensor> rng_state, Tensor const& w_t,
                                          std::optional<Tensor> w_t_scales, Tensor const& w_t_amax,
                                          int64_t w_t_rows, int64_t w_t_e4m3_max, Tensor const& x_t,
                                          Tensor const& x_t_scales, Tensor const& x_t_amax,
                                          int64_t x_t_e4m3_max, ScalarType dw_dtype);

}  // namespace fp4gemm_torch
