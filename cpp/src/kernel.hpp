// A GEMM kernel as data: what it is, and how to launch it.
#pragma once

#include <cstdint>

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// A dense (num_groups 0) or grouped GEMM on one device, operands in the form that the kernel's tensor cores
/// multiply. The fields mean what they mean in fp4gemm_grouped_args_t; a dense vector has group_stride 0.
struct Problem {
  fp4gemm_ragged_t ragged = FP4GEMM_RAGGED_ROWS;
  int64_t m = 0, n = 0, k = 0;
  int num_groups = 0;
  int32_t const* offs = nullptr;
  void const* a = nullptr;
  void const* scale_a = nullptr;  // null for fp16 operands
  void const* b = nullptr;
  void const* scale_b = nullptr;
  fp4gemm_grouped_vector_t alpha_row{};  // data null: absent
  fp4gemm_grouped_vector_t alpha_col{};
  float alpha = 1.0f;
  float const* alpha_groups = nullptr;
  fp4gemm_grouped_vector_t bias{};
  fp4gemm_activation_t activation = FP4GEMM_ACTIVATION_NONE;
  void const* c = nullptr;
  int64_t c_row_stride = 0;  // elements
  float beta = 1.0f;
  void* d = nullptr;
  int64_t d_row_stride = 0;  // elements
  int device = 0;
  int num_sms = 0;
};

struct Kernel {
  fp4gemm_kernel_info_t info;
  fp4gemm_format_t operand;
  bool is_grouped;
  bool is_gated;
  /// Bytes of workspace beside the decoded operands.
  size_t (*workspace_bytes)(Problem const&);
  fp4gemm_status_t (*launch)(Problem const&, void* workspace, fp4gemm_stream_t);
};

/// A list of kernels that lives as long as the library.
struct KernelList {
  Kernel const* data;
  int size;
};

}  // namespace fp4gemm
