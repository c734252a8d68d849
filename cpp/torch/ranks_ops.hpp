// The operators of expert parallelism on CUDA tensors; ops.cpp has their schemas.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "tensors.hpp"

namespace fp4gemm_torch {

void quantize_records(Tensor const& x, Tensor const& out, int64_t four_over_six, bool fast_error,
                      int64_t e4m3_max, std::optional<Tensor> rng_state, int64_t first_row);

void make_records(Tensor const& codes, Tensor const& scales, Tensor const& amax, Tensor const& out);

std::tuple<Tensor, Tensor, Tensor> gather_records(std::vector<Tensor> records, Tensor const& rows,
                                                  Tensor const& offs, int64_t k);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route_ranks(Tensor const& topk_ids, int64_t num_experts,
                                                               int64_t num_ranks, int64_t rank,
                                                               int64_t capacity);

Tensor combine_ranks(std::vector<Tensor> y, Tensor const& row_of_pair, Tensor const& topk_weights,
                     std::optional<ScalarType> out_dtype);

void combine_part(Tensor const& y, Tensor const& topk_ids, Tensor const& row_of_pair,
                  Tensor const& topk_weights, Tensor const& out, int64_t num_experts, int64_t num_ranks,
                  int64_t rank);

Tensor combine_tree(std::vector<Tensor> parts, Tensor const& topk_ids, int64_t num_experts,
                    int64_t first_token, ScalarType out_dtype);

}  // namespace fp4gemm_torch
