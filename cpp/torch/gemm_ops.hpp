// The GEMM ops on CUDA tensors; see the schemas in ops.cpp.
#pragma once

#include <optional>
#include <string>

#include "tensors.hpp"

namespace fp4gemm_torch {

Tensor scaled_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                 std::optional<Tensor> scale_b, double alpha, std::optional<Tensor> alpha_row,
                 std::optional<Tensor> alpha_col, std::optional<Tensor> bias, ScalarType out_dtype,
                 std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c, double beta,
                 bool batch_invariant, int64_t b_rows);

void scaled_mm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                   std::optional<Tensor> scale_b, double alpha, std::optional<Tensor> alpha_row,
                   std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                   std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c,
                   double beta, bool batch_invariant, int64_t b_rows, Tensor out);

Tensor scaled_grouped_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                         std::optional<Tensor> scale_b, Tensor const& offs, double alpha,
                         std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row,
                         std::optional<Tensor> alpha_col, std::optional<Tensor> bias, ScalarType out_dtype,
                         std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c,
                         double beta, bool batch_invariant, int64_t b_rows);

void scaled_grouped_mm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                           std::optional<Tensor> scale_b, Tensor const& offs, double alpha,
                           std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row,
                           std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                           std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c,
                           double beta, bool batch_invariant, int64_t b_rows, Tensor out);

}  // namespace fp4gemm_torch
