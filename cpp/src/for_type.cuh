// Calls of templates by the type of a tensor.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// Calls f with a value of the type that dtype stands for.
template <class F>
void for_type(fp4gemm_dtype_t dtype, F const& f) {
  switch (dtype) {
    case FP4GEMM_BF16: f(__nv_bfloat16{}); break;
    case FP4GEMM_FP16: f(__half{}); break;
    case FP4GEMM_FP32: f(float{}); break;
  }
}

}  // namespace fp4gemm
