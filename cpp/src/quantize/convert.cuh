// Conversion of results from fp32, and vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace fp4gemm {

/// x rounded once to T.
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/// N elements that are loaded and stored by one instruction, if they have 16 bytes or fewer.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Chunk {
  T elements[N];
};

}  // namespace fp4gemm
