// The operators for mixtures of experts on CUDA tensors; ops.cpp has their schemas.
#pragma once

#include <optional>
#include <tuple>

#include "tensors.hpp"

namespace fp4gemm_torch {

/// (offs, token_of_row, row_of_pair), as fp4gemm_route defines them.
std::tuple<Tensor, Tensor, Tensor> route(Tensor const& topk_ids, int64_t num_experts);

/// The weighted sum of the rows of each token, as fp4gemm_combine defines it.
Tensor combine(Tensor const& y, Tensor const& row_of_pair, Tensor const& topk_weights,
               std::optional<ScalarType> out_dtype);

/// Writes zeros to the rows of x (m, n) that are in no group, those from offs[-1] on.
void zero_outside_groups(Tensor const& x, Tensor const& offs);

/// A block of experts: route, both grouped products with the quantization of their rows, and combine. The
/// weights are codes with scales, or prepacked bytes with w13_rows and w2_rows. scaling: 0 (tokens are not
/// quantized), 1 (to NVFP4, an amax for each row) or 3 (to e4m3).
Tensor experts(Tensor const& x, Tensor const& topk_ids, Tensor const& topk_weights, Tensor const& w13,
               std::optional<Tensor> w13_scales, Tensor const& w13_amax, std::optional<Tensor> w13_bias,
               Tensor const& w2, std::optional<Tensor> w2_scales, Tensor const& w2_amax,
               std::optional<Tensor> w2_bias, int64_t w13_rows, int64_t w2_rows, int64_t w13_e4m3_max,
               int64_t w2_e4m3_max, int64_t scaling, int64_t activation, bool batch_invariant,
               bool use_fast_accum);

}  // namespace fp4gemm_torch
