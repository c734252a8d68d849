// What kernels on swizzled block scales cannot address: those of SM100 and SM120.
#pragma once

#include <cstdint>

#include "error.hpp"
#include "kernel.hpp"
#include "quantize/sizes.hpp"

namespace fp4gemm::block_scale_limits {

/// CUTLASS keeps the strides of the block scales, from one tile of 128 rows to the next and from one matrix
/// to the next, as 32-bit numbers of bytes. A stride that overflowed would make the tensor map invalid, and a
/// kernel launch cannot report that.
constexpr int64_t kMaxScaleBytes = INT32_MAX;

inline fp4gemm_status_t check_scales(char const* name, int64_t rows, int64_t k) {
  int64_t const bytes = scale_rows_of(rows) * round_up(ceil_div(k, kBlock), kScaleWord);
  if (bytes > kMaxScaleBytes) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "%s: (%lld, %lld) has %lld bytes of block scales, must have at most %lld", name,
                static_cast<long long>(rows), static_cast<long long>(k), static_cast<long long>(bytes),
                static_cast<long long>(kMaxScaleBytes));
  }
  return FP4GEMM_SUCCESS;
}

/// Groups may have all rows of A, and with groups that are ragged in k the whole of k.
inline fp4gemm_status_t check_problem(Problem const& problem) {
  FP4GEMM_TRY(check_scales("a", problem.m, problem.k));
  return check_scales("b", problem.n, problem.k);
}

}  // namespace fp4gemm::block_scale_limits
