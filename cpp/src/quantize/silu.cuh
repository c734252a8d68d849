// SiLU of bf16 and fp16 elements, as eager torch has it.
#pragma once

#include "quantize/cast.cuh"

namespace fp4gemm {

/// g * (1 / (1 + exp(-g))), -0 where exp overflows. The result rounds to the same bf16 or fp16 as the exact
/// value for each of the 2^16 values of g (tested). The factors 1/4 keep the reciprocal a normal number.
__device__ inline float silu(float g) {
  float const quarter = fminf(__fmaf_rn(expf(-g), 0.25f, 0.25f), kFloatMax);  // of 1 + exp(-g)
  return __fmul_rn(__fmul_rn(g, 0.25f), bounded_reciprocal(quarter));
}

}  // namespace fp4gemm
