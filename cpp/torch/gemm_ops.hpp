// The GEMM operators on CUDA tensors; see the schemas in ops.cpp.
#pragma once

#include <optional>
#include <string>
#include <vector>

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

/// The parameters of a GEMM with a formula that is compiled at run time (fp4gemm/generated.h). `formula` is
/// the address of it. `form` has the formula's kind and the numbers of its inputs: takes_pairs, num_results,
/// takes_bias, takes_c, num_rows, num_columns, num_groups, num_matrices; `inputs` are those by row, by
/// column, by group, and like D. D and the further outputs are written to `out` and `aux`.
#define FP4GEMM_GENERATED_PARAMETERS                                                                        \
  int64_t formula, std::vector<int64_t> form, std::vector<Tensor> inputs, std::vector<double> scalars,      \
      Tensor out, std::vector<Tensor> aux, Tensor const &a, Tensor const &b, std::optional<Tensor> scale_a, \
      std::optional<Tensor> scale_b, std::optional<Tensor> offs, double alpha,                              \
      std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row, std::optional<Tensor> alpha_col, \
      std::optional<Tensor> bias, std::optional<Tensor> c, bool batch_invariant, bool use_fast_accum,       \
      int64_t b_rows, std::optional<std::string> kernel

/// The source of the kernel that the call needs.
std::string gemm_generated_source(FP4GEMM_GENERATED_PARAMETERS);

/// Loads that kernel from a cubin.
void gemm_generated_load(Tensor const& cubin, FP4GEMM_GENERATED_PARAMETERS);

/// Runs the call. The result is false if its kernel is not loaded; nothing was launched then.
bool gemm_generated(FP4GEMM_GENERATED_PARAMETERS);

}  // namespace fp4gemm_torch
