// A GEMM kernel as data: what it is, and how to launch it.
#pragma once

#include <cstdint>

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// D (m, n) = epilogue(A (m, k) @ B (n, k)^T) on one device, operands in the form that the kernel's tensor
/// cores multiply.
struct DenseProblem {
  int64_t m = 0, n = 0, k = 0;
  void const* a = nullptr;
  void const* scale_a = nullptr;  // null for fp16 operands
  void const* b = nullptr;
  void const* scale_b = nullptr;
  fp4gemm_vector_t alpha_row{};  // data null: absent
  fp4gemm_vector_t alpha_col{};
  float alpha = 1.0f;
  float const* bias = nullptr;
  void* d = nullptr;
  int64_t d_row_stride = 0;  // elements
  int device = 0;
  int num_sms = 0;
};

struct Kernel {
  fp4gemm_kernel_info_t info;
  fp4gemm_format_t operand;
  /// Bytes of workspace beside the decoded operands.
  size_t (*workspace_bytes)(DenseProblem const&);
  fp4gemm_status_t (*launch)(DenseProblem const&, void* workspace, fp4gemm_stream_t);
};

/// A list of kernels that lives as long as the library.
struct KernelList {
  Kernel const* data;
  int size;
};

}  // namespace fp4gemm
