// What the kernels for weighted sums of rows share: loads and stores of eight columns, and the sum over
// slots.
#pragma once

#include <cuda_runtime.h>

#include "for_type.cuh"
#include "fp4gemm/fp4gemm.h"
#include "launch.hpp"
#include "moe/moe.hpp"
#include "quantize/convert.cuh"

namespace fp4gemm {

constexpr int kCombineThreads = 128;
constexpr int kCombineBatch = 8;  // slots whose rows a thread loads at a time

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// The weights of the slots.
struct SlotWeights {
  void const* weights;  // null: all are 1
  fp4gemm_dtype_t dtype;

  __device__ float at(int64_t slot) const {
    if (weights == nullptr) {
      return 1.0f;
    }
    switch (dtype) {
      case FP4GEMM_BF16: return to_float(static_cast<__nv_bfloat16 const*>(weights)[slot]);
      case FP4GEMM_FP16: return to_float(static_cast<__half const*>(weights)[slot]);
      default: return static_cast<float const*>(weights)[slot];
    }
  }
};

/// The ids of the experts of the slots.
struct SlotIds {
  void const* ids;
  bool are_64_bits;

  __device__ int64_t at(int64_t slot) const {
    return are_64_bits ? static_cast<int64_t const*>(ids)[slot] : static_cast<int32_t const*>(ids)[slot];
  }
};

/// Eight neighbouring columns, loaded and stored 16 bytes at a time.
template <class T>
struct alignas(16) Columns {
  T elements[kCombineStep];
};

/// Stores eight sums, each rounded once.
template <class Out>
__device__ void store_columns(Out* out, float const (&sums)[kCombineStep]) {
  Columns<Out> result;
#pragma unroll
  for (int j = 0; j < kCombineStep; ++j) {
    result.elements[j] = from_float<Out>(sums[j]);
  }
  *reinterpret_cast<Columns<Out>*>(out) = result;
}

/// Adds the weighted rows of a token's slots to sums, in ascending order. The rows of a batch of slots are
/// loaded before the first of them is added.
///
/// @tparam T The type of the rows.
/// @tparam ColumnsOf A function: the eight columns of the row of a slot, or null if the slot has none.
template <class T, class ColumnsOf>
__device__ void add_slots(float (&sums)[kCombineStep], SlotWeights const& weights_of, int64_t token,
                          int top_k, ColumnsOf const& columns_of) {
#pragma unroll 1
  for (int first = 0; first < top_k; first += kCombineBatch) {
    Columns<T> rows[kCombineBatch];
    float weights[kCombineBatch];
    bool has[kCombineBatch];
#pragma unroll
    for (int i = 0; i < kCombineBatch; ++i) {
      int64_t const slot = token * top_k + first + i;
      T const* const row = first + i < top_k ? columns_of(slot) : nullptr;
      has[i] = row != nullptr;
      if (has[i]) {
        rows[i] = *reinterpret_cast<Columns<T> const*>(row);
        weights[i] = weights_of.at(slot);
      }
    }
#pragma unroll
    for (int i = 0; i < kCombineBatch; ++i) {
      if (has[i]) {
#pragma unroll
        for (int j = 0; j < kCombineStep; ++j) {
          sums[j] = __fadd_rn(sums[j], __fmul_rn(weights[i], to_float(rows[i].elements[j])));
        }
      }
    }
  }
}

/// The columns that a thread of a CTA has: kCombineThreads * kCombineStep of a token for each CTA.
struct CombineTile {
  int64_t token;
  int64_t column;

  __device__ explicit CombineTile(int ctas_per_token) {
    token = blockIdx.x / ctas_per_token;
    int const part =
        static_cast<int>(blockIdx.x % ctas_per_token) * kCombineThreads + static_cast<int>(threadIdx.x);
    column = int64_t{part} * kCombineStep;
  }
};

/// launch_waiting with the threads of these kernels.
template <class Params>
cudaError_t launch_combine_kernel(void (*kernel)(Params), Params const& params, int64_t ctas, bool overlaps,
                                  cudaStream_t stream) {
  return launch_waiting(kernel, {static_cast<unsigned>(ctas), kCombineThreads}, overlaps, stream, params);
}

}  // namespace fp4gemm
