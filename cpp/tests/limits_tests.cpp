// Host tests of what the kernels of SM100 and SM120 cannot address: refused before a tensor map is made.
#include "block_scale_limits.hpp"
#include "checks.hpp"

namespace {

void check(int64_t m, int64_t n, int64_t k, char const* text) {
  fp4gemm::Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  fp4gemm_status_t const status = fp4gemm::block_scale_limits::check_problem(problem);
  if (text == nullptr) {
    CHECK(status == FP4GEMM_SUCCESS, "%s", fp4gemm_last_error());
  } else {
    expect_error(text, status, FP4GEMM_ERROR_NOT_SUPPORTED, text);
  }
}

}  // namespace

int main() {
  int64_t const k = int64_t{1} << 28;  // a row of 128-row tiles has 2^31 bytes of scales
  check(1, 8, k - 64, nullptr);
  check(1, 8, k, "a: (1, 268435456) has 2147483648 bytes of block scales, must have at most 2147483647");
  // One matrix of A, or of B, has 2^31 bytes of scales.
  int64_t const rows = int64_t{1} << 20;
  check(rows - 128, rows - 128, 32768, nullptr);
  check(rows, 8, 32768, "a: (1048576, 32768) has 2147483648 bytes");
  check(8, rows, 32768, "b: (1048576, 32768) has 2147483648 bytes");
  check(INT32_MAX, 8, int64_t{1} << 30, "a: ");
  return report();
}
