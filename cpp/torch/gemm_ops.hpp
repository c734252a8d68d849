// The GEMM operators on CUDA tensors; see the schemas in ops.cpp.
#pragma once

#include <optional>
#include <string>

#include "tensors.hpp"

namespace fp4gemm_torch {

/// Whether D has half the columns of the accumulator with this activation (a number of the schemas).
bool is_gated(int64_t activation);

/// A dense GEMM, or a grouped one where offs is given. D is (m, n), or (groups, m, n) ragged in k, where b is
/// one matrix.
Tensor gemm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a, std::optional<Tensor> scale_b,
            std::optional<Tensor> offs, double alpha, std::optional<Tensor> alpha_groups,
            std::optional<Tensor> alpha_row, std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
            int64_t activation, std::optional<Tensor> c, double beta, bool batch_invariant,
            bool use_fast_accum, int64_t b_rows, std::optional<std::string> kernel, ScalarType out_dtype);

/// The same into `out`, of which the rows are contiguous.
void gemm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a, std::optional<Tensor> scale_b,
              std::optional<Tensor> offs, double alpha, std::optional<Tensor> alpha_groups,
              std::optional<Tensor> alpha_row, std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
              int64_t activation, std::optional<Tensor> c, double beta, bool batch_invariant,
              bool use_fast_accum, int64_t b_rows, std::optional<std::string> kernel, Tensor out);

}  // namespace fp4gemm_torch
