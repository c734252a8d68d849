// What the operators that multiply share: operands and vectors as the C interface has them, and the call.
#pragma once

#include <optional>

#include "fp4gemm/casts.h"
#include "tensors.hpp"

namespace fp4gemm_torch {

/// Whether the values of an operand are e4m3: FP8 tokens, or those of MXFP8, which have scales.
inline bool is_fp8(Tensor const& tokens) { return tokens.scalar_type() == ScalarType::Float8_e4m3fn; }

/// The type of prepacked bytes tells their order: Char for FP8 tokens, Byte for all others.
inline bool is_in_order_of_fp8(Tensor const& packed) { return packed.scalar_type() == ScalarType::Char; }

/// The bytes of a prepacked weight (n, k) in the order that the type of `packed` tells.
inline int64_t prepacked_bytes(Tensor const& packed, int64_t n, int64_t k) {
  return is_in_order_of_fp8(packed) ? fp4gemm_prepacked_fp8_bytes(n, k) : fp4gemm_prepacked_bytes(n, k);
}

/// Refuses prepacked bytes in the order for other tokens. fp8: the tokens are FP8.
inline void check_order(char const* name, Tensor const& packed, bool fp8) {
  ScalarType const wanted = fp8 ? ScalarType::Char : ScalarType::Byte;
  STD_TORCH_CHECK(packed.scalar_type() == wanted, name, ": dtype is ", name_of(packed.scalar_type()),
                  ", must be ", name_of(wanted), ", the type of weights that are prepacked for ",
                  fp8 ? "FP8 tokens" : "tokens that are not FP8");
}

inline fp4gemm_operand_t prepacked_operand(char const* name, Tensor const& data, bool fp8, int32_t device) {
  check_order(name, data, fp8);
  check_contiguous(name, data, data.scalar_type(), device);
  return {data.const_data_ptr(), nullptr, fp8 ? FP4GEMM_FORMAT_PREPACKED_FP8 : FP4GEMM_FORMAT_PREPACKED};
}

inline void check_fast_accum(bool use_fast_accum, bool fp8) {
  STD_TORCH_CHECK(!use_fast_accum || fp8, "use_fast_accum: is True, must be False unless the tokens are FP8");
}

/// Codes or e4m3 values with scales of scale_rows rows, before padding; of a stack of `matrices` matrices
/// unless that is 0. may_be_mxfp4: codes with scales in e8m0 are MXFP4; else they are refused.
inline fp4gemm_operand_t packed_operand(char const* name, char const* scale_name, Tensor const& codes,
                                        Tensor const& scales, int64_t matrices, int64_t scale_rows, int64_t k,
                                        int32_t device, bool may_be_mxfp4 = false) {
  if (is_fp8(codes)) {
    check_contiguous(name, codes, ScalarType::Float8_e4m3fn, device);
    check_stacked_scales(scale_name, scales, matrices, scale_rows, k, device, ScalarType::Float8_e8m0fnu);
    return {codes.const_data_ptr(), scales.const_data_ptr(), FP4GEMM_FORMAT_MXFP8};
  }
  check_contiguous(name, codes, ScalarType::Byte, device);
  if (may_be_mxfp4 && scales.scalar_type() == ScalarType::Float8_e8m0fnu) {
    check_stacked_scales(scale_name, scales, matrices, scale_rows, k, device, ScalarType::Float8_e8m0fnu);
    return {codes.const_data_ptr(), scales.const_data_ptr(), FP4GEMM_FORMAT_MXFP4};
  }
  check_stacked_scales(scale_name, scales, matrices, scale_rows, k, device);
  return {codes.const_data_ptr(), scales.const_data_ptr(), FP4GEMM_FORMAT_NVFP4};
}

/// An fp32 vector of `length` numbers (or one), or in a grouped GEMM one such vector for each group.
inline fp4gemm_vector_t vector_of(char const* name, std::optional<Tensor> const& t, int64_t num_groups,
                                  int64_t length, int32_t device) {
  if (!t.has_value()) {
    return {nullptr, 0, 0};
  }
  int64_t const dims = t->dim();
  if (num_groups == 0) {
    check_dims(name, *t, 1);
  }
  STD_TORCH_CHECK(dims == 1 || dims == 2, name, ": has ", dims, " dimensions, must have 1, or 2 for groups");
  int64_t const numel = t->size(dims - 1);
  STD_TORCH_CHECK(numel == 1 || numel == length, name, ": last size is ", numel, ", must be 1 or ", length);
  STD_TORCH_CHECK(dims == 1 || t->size(0) == num_groups, name, ": first size is ", t->size(0), ", must be ",
                  num_groups);
  check_contiguous(name, *t, ScalarType::Float, device);
  return {static_cast<float const*>(t->const_data_ptr()), numel, dims == 2 ? numel : 0};
}

/// Checks a weight (n, k), codes or MXFP8 values with scales or, where rows is not 0, prepacked, and returns
/// n. Its parts are arguments that begin with `name`. The dtype of the data and the scales are left to the
/// caller.
///
/// @param fp8 The tokens are FP8, so that prepacked bytes are in their order.
/// @param x The name of the operand that has the same k.
inline int64_t check_weight(char const* name, Tensor const& data, std::optional<Tensor> const& scales,
                            int64_t rows, int64_t e4m3_max, int64_t k, bool fp8, char const* x) {
  STD_TORCH_CHECK(e4m3_max == 448 || e4m3_max == 256, name, "_e4m3_max: is ", e4m3_max,
                  ", must be 448 or 256");
  STD_TORCH_CHECK(rows >= 0 && rows <= INT32_MAX, name, "_rows: is ", rows, ", must be between 0 and ",
                  INT32_MAX);
  if (rows == 0) {
    STD_TORCH_CHECK(scales.has_value(), name, "_scales: is None, must be given unless ", name,
                    " is prepacked");
    check_dims(name, data, 2);
    int64_t const own_k = (is_fp8(data) ? 1 : 2) * data.size(1);
    STD_TORCH_CHECK(own_k == k, name, ": k is ", own_k, ", must be ", k, " as of ", x);
    return data.size(0);
  }
  STD_TORCH_CHECK(!scales.has_value(), name, "_scales: must be None for a prepacked ", name);
  check_order(name, data, fp8);
  check_dims(name, data, 1);
  int64_t const bytes = prepacked_bytes(data, rows, k);
  STD_TORCH_CHECK(data.size(0) == bytes, name, ": has ", data.size(0), " bytes, must have ", bytes,
                  ", prepacked (", rows, ", ", k, ")");
  return rows;
}

/// What a product makes of its activations, as its parameter `scaling` says it: a fp4gemm_quantize_a_t, and
/// the options of the cast in the bits above it; or MXFP8, which is no fp4gemm_quantize_a_t.
struct InputCast {
  static constexpr int64_t kMxfp8 = 128;

  fp4gemm_quantize_a_t quantize_a = FP4GEMM_QUANTIZE_A_NONE;
  fp4gemm_cast_t cast = FP4GEMM_CAST_INIT;
  bool is_mxfp8 = false;

  explicit InputCast(int64_t scaling) : is_mxfp8(scaling == kMxfp8) {
    if (is_mxfp8) {
      return;
    }
    STD_TORCH_CHECK(scaling >= 0 && scaling < kMxfp8, "scaling: is ", scaling,
                    ", must be 0, 1, 2 or 3, with options of the cast below 128, or 128");
    quantize_a = static_cast<fp4gemm_quantize_a_t>(scaling & 3);
    int64_t const four_over_six = scaling >> 2 & 3;
    STD_TORCH_CHECK(four_over_six <= FP4GEMM_FOUR_OVER_SIX_MSE, "scaling: is ", scaling,
                    ", must have 0, 1 or 2 for four over six in the bits of 4 and 8");
    cast.four_over_six = static_cast<fp4gemm_four_over_six_t>(four_over_six);
    cast.fast_error = (scaling & 16) != 0 ? 1 : 0;
    cast.e4m3_max = (scaling & 32) != 0 ? 256 : 448;
    cast.encode = (scaling & 64) != 0 ? FP4GEMM_ENCODE_TE_PER_TOKEN : FP4GEMM_ENCODE_TE;
  }
};

/// Runs the call in a workspace from torch's allocator. The kernel is selected twice, for the query and for
/// the launch; the library remembers the result. The workspace is released while the kernels may still run:
/// the allocator gives its memory to later work of the same stream alone.
inline void call_gemm(fp4gemm_gemm_args_t const& args, int32_t device,
                      fp4gemm_cast_t const& cast = FP4GEMM_CAST_INIT) {
  size_t bytes = 0;
  check_status(fp4gemm_gemm_with_cast_workspace_bytes(&args, &cast, device, &bytes));
  std::optional<Tensor> workspace;
  void* data = nullptr;
  if (bytes > 0) {
    workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, device);
    data = workspace->mutable_data_ptr();
  }
  check_status(fp4gemm_gemm_with_cast(&args, &cast, data, bytes, device, current_stream(device)));
}

}  // namespace fp4gemm_torch
