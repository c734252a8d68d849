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

/// A GEMM with a formula that was compiled at run time (fp4gemm/generated.h). `form` has the formula's kind
/// and the numbers of its inputs: takes_pairs, num_results, takes_bias, takes_c, num_rows, num_columns,
/// num_groups, num_matrices; `inputs` are those by row, by column, by group, and like D.
/// gemm_generated_source gives the source of the kernel, gemm_generated_load the handle of a compiled one,
/// and gemm_generated D and the further outputs. The element types of these are numbers of fp4gemm_dtype_t.
std::string gemm_generated_source(std::vector<int64_t> form, std::vector<Tensor> inputs,
                                  std::vector<double> scalars, std::vector<int64_t> aux_dtypes,
                                  Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                                  std::optional<Tensor> scale_b, std::optional<Tensor> offs, double alpha,
                                  std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row,
                                  std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                                  std::optional<Tensor> c, bool batch_invariant, bool use_fast_accum,
                                  int64_t b_rows, std::optional<std::string> kernel, ScalarType out_dtype);
int64_t gemm_generated_load(Tensor const& cubin, std::vector<int64_t> form, std::vector<Tensor> inputs,
                            std::vector<double> scalars, std::vector<int64_t> aux_dtypes, Tensor const& a,
                            Tensor const& b, std::optional<Tensor> scale_a, std::optional<Tensor> scale_b,
                            std::optional<Tensor> offs, double alpha, std::optional<Tensor> alpha_groups,
                            std::optional<Tensor> alpha_row, std::optional<Tensor> alpha_col,
                            std::optional<Tensor> bias, std::optional<Tensor> c, bool batch_invariant,
                            bool use_fast_accum, int64_t b_rows, std::optional<std::string> kernel,
                            ScalarType out_dtype);
std::vector<Tensor> gemm_generated(int64_t handle, std::vector<int64_t> form, std::vector<Tensor> inputs,
                                   std::vector<double> scalars, std::vector<int64_t> aux_dtypes,
                                   Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                                   std::optional<Tensor> scale_b, std::optional<Tensor> offs, double alpha,
                                   std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row,
                                   std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                                   std::optional<Tensor> c, bool batch_invariant, bool use_fast_accum,
                                   int64_t b_rows, std::optional<std::string> kernel, ScalarType out_dtype);

}  // namespace fp4gemm_torch
