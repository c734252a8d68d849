// The arguments of fp4gemm_gemm: what follows from them, and the checks of them.
#pragma once

#include "activation.hpp"
#include "check.hpp"
#include "cutlass_evt/epilogue/generated_arguments.hpp"
#include "fp4gemm/generated.h"

namespace fp4gemm {

/// The arguments of a GEMM, with the formula that is compiled at run time if it has one.
struct GemmArgs : fp4gemm_gemm_args_t {
  fp4gemm_generated_t const* generated = nullptr;
  int num_residual_channels = 0;  // columns of A that its quantization appends

  GemmArgs() = default;
  GemmArgs(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const* of = nullptr)
      : fp4gemm_gemm_args_t(args), generated(of) {}
};

inline bool is_grouped(GemmArgs const& args) { return args.num_groups > 0; }
inline bool is_ragged_m(GemmArgs const& args) { return is_grouped(args) && args.ragged == FP4GEMM_RAGGED_M; }
inline bool is_ragged_k(GemmArgs const& args) { return is_grouped(args) && args.ragged == FP4GEMM_RAGGED_K; }
inline int64_t num_b(GemmArgs const& args) { return is_ragged_m(args) ? args.num_groups : 1; }
inline bool is_gated(GemmArgs const& args) { return is_gated(args.activation); }
/// Whether D has half as many columns as the product.
inline bool halves_columns(GemmArgs const& args) {
  return args.generated == nullptr ? is_gated(args)
                                   : args.generated->takes_pairs != 0 && args.generated->num_results == 1;
}
inline int64_t columns_of_d(GemmArgs const& args) { return halves_columns(args) ? args.n / 2 : args.n; }
inline int64_t num_d(GemmArgs const& args) { return is_ragged_k(args) ? args.num_groups : 1; }
inline bool quantizes_a(GemmArgs const& args) { return args.quantize_a != FP4GEMM_QUANTIZE_A_NONE; }
inline bool quantizes_a_to_fp8(GemmArgs const& args) { return args.quantize_a == FP4GEMM_QUANTIZE_A_FP8; }
/// Whether the call multiplies FP8 tokens.
inline bool multiplies_fp8(GemmArgs const& args) {
  return quantizes_a_to_fp8(args) || args.a.format == FP4GEMM_FORMAT_E4M3;
}
/// The columns of A before it is quantized.
inline int64_t columns_of_a(GemmArgs const& args) { return args.k - args.num_residual_channels; }
inline int64_t a_row_stride(GemmArgs const& args) {
  return args.a_row_stride > 0 ? args.a_row_stride : columns_of_a(args);
}
inline char const* activation_name(GemmArgs const& args) { return activation_info(args.activation)->name; }

/// The type of the values of A that is to be quantized; its format has been checked.
inline fp4gemm_dtype_t a_dtype(GemmArgs const& args) {
  return args.a.format == FP4GEMM_FORMAT_BF16   ? FP4GEMM_BF16
         : args.a.format == FP4GEMM_FORMAT_FP16 ? FP4GEMM_FP16
                                                : FP4GEMM_FP32;
}

/// The arguments of the epilogue as the kernels have them.
cutlass_evt::EpilogueArguments epilogue_of(GemmArgs const& args);

/// What a formula reads and writes beside the terms of epilogue_of, and the types of the elements.
cutlass_evt::GeneratedInputs generated_inputs_of(GemmArgs const& args);
cutlass_evt::GeneratedTypes generated_types_of(GemmArgs const& args);

/// Checks the numbers of a formula, and the fields of the arguments that it excludes.
fp4gemm_status_t check_generated(GemmArgs const& args);

/// Refuses a number that names no activation, with a list of those that exist.
fp4gemm_status_t check_activation(fp4gemm_activation_t activation);

/// Checks sizes, formats and types: all that the plan depends on. The pointers are checked later, since the
/// query of the workspace needs none.
fp4gemm_status_t check_gemm_problem(GemmArgs const& args);

/// Checks the pointers, vectors and strides of arguments that check_gemm_problem accepted.
fp4gemm_status_t check_gemm_pointers(GemmArgs const& args);

}  // namespace fp4gemm
