// How a call fails: with a status for the caller and a sentence that this thread can ask for.
#pragma once

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// Stores the sentence (as of printf) for fp4gemm_last_error and returns the status.
[[gnu::format(printf, 2, 3)]] fp4gemm_status_t fail(fp4gemm_status_t status, char const* format, ...);

}  // namespace fp4gemm

/// Returns from the enclosing function if the condition is false. The sentence names the argument, the value
/// got and the value required: FP4GEMM_CHECK(k % 16 == 0, "k: is %lld, must be a multiple of 16", k).
#define FP4GEMM_CHECK(condition, ...)                                      \
  do {                                                                     \
    if (!(condition)) {                                                    \
      return ::fp4gemm::fail(FP4GEMM_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
    }                                                                      \
  } while (false)

/// Returns from the enclosing function if a step of it failed, which has stored its sentence.
#define FP4GEMM_TRY(expression)                                                      \
  do {                                                                               \
    if (fp4gemm_status_t const status_ = (expression); status_ != FP4GEMM_SUCCESS) { \
      return status_;                                                                \
    }                                                                                \
  } while (false)

/// Returns from the enclosing function if a CUDA call failed.
#define FP4GEMM_CUDA(expression)                                                                         \
  do {                                                                                                   \
    if (cudaError_t const error_ = (expression); error_ != cudaSuccess) {                                \
      (void)cudaGetLastError(); /* so that a later call does not report this error */                    \
      return ::fp4gemm::fail(FP4GEMM_ERROR_CUDA, "%s: %s (%s)", #expression, cudaGetErrorString(error_), \
                             cudaGetErrorName(error_));                                                  \
    }                                                                                                    \
  } while (false)
