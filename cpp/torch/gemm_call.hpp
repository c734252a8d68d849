// What the operators that multiply share: operands and vectors as the C interface has them, and the call.
#pragma once

#include <optional>

#include "tensors.hpp"

namespace fp4gemm_torch {

inline fp4gemm_operand_t prepacked_operand(char const* name, Tensor const& data, int32_t device) {
  check_contiguous(name, data, ScalarType::Byte, device);
  return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_PREPACKED};
}

/// Codes with scales of scale_rows rows, before padding; of a stack of `matrices` matrices unless that is 0.
inline fp4gemm_operand_t packed_operand(char const* name, char const* scale_name, Tensor const& codes,
                                        Tensor const& scales, int64_t matrices, int64_t scale_rows, int64_t k,
                                        int32_t device) {
  check_contiguous(name, codes, ScalarType::Byte, device);
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

/// Runs the call in a workspace from torch's allocator.
inline void call_gemm(fp4gemm_gemm_args_t const& args, int32_t device) {
  size_t bytes = 0;
  check_status(fp4gemm_gemm_workspace_bytes(&args, device, &bytes));
  std::optional<Tensor> workspace;
  void* data = nullptr;
  if (bytes > 0) {
    workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, device);
    data = workspace->mutable_data_ptr();
  }
  check_status(fp4gemm_gemm(&args, data, bytes, device, current_stream(device)));
}

}  // namespace fp4gemm_torch
