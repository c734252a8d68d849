// How a call fails: a status for the caller, and one sentence for this thread.
#pragma once

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// Keeps the sentence (printf form) for fp4gemm_last_error and returns status.
[[gnu::format(printf, 2, 3)]] fp4gemm_status_t fail(fp4gemm_status_t status, char const* format, ...);

}  // namespace fp4gemm

/// Returns from the enclosing function when an argument is wrong. The sentence names the argument, the value
/// and the wish: FP4GEMM_CHECK(k % 16 == 0, "k is %lld, must be a multiple of 16", k).
#define FP4GEMM_CHECK(condition, ...)                                      \
  do {                                                                     \
    if (!(condition)) {                                                    \
      return ::fp4gemm::fail(FP4GEMM_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
    }                                                                      \
  } while (false)

/// Returns from the enclosing function when a step of it failed; the step has left its sentence.
#define FP4GEMM_TRY(expression)                                                      \
  do {                                                                               \
    if (fp4gemm_status_t const status_ = (expression); status_ != FP4GEMM_SUCCESS) { \
      return status_;                                                                \
    }                                                                                \
  } while (false)

/// Returns from the enclosing function when a CUDA call failed.
#define FP4GEMM_CUDA(expression)                                                                         \
  do {                                                                                                   \
    if (cudaError_t const error_ = (expression); error_ != cudaSuccess) {                                \
      (void)cudaGetLastError(); /* or the next call that asks would get this error */                    \
      return ::fp4gemm::fail(FP4GEMM_ERROR_CUDA, "%s: %s (%s)", #expression, cudaGetErrorString(error_), \
                             cudaGetErrorName(error_));                                                  \
    }                                                                                                    \
  } while (false)
