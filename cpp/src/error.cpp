// The text of this thread's last error, and the names of the statuses.
#include "error.hpp"

#include <cstdarg>
#include <cstdio>

namespace fp4gemm {
namespace {
thread_local char last_error[512] = "";
}  // namespace

fp4gemm_status_t fail(fp4gemm_status_t status, char const* format, ...) {
  std::va_list args;
  va_start(args, format);
  std::vsnprintf(last_error, sizeof(last_error), format, args);
  va_end(args);
  return status;
}
}  // namespace fp4gemm

extern "C" {

char const* fp4gemm_last_error(void) { return fp4gemm::last_error; }

char const* fp4gemm_status_string(fp4gemm_status_t status) {
  switch (status) {
    case FP4GEMM_SUCCESS: return "success";
    case FP4GEMM_ERROR_INVALID_ARGUMENT: return "invalid argument";
    case FP4GEMM_ERROR_NOT_SUPPORTED: return "not supported";
    case FP4GEMM_ERROR_WORKSPACE: return "workspace error";
    case FP4GEMM_ERROR_CUDA: return "CUDA error";
    case FP4GEMM_ERROR_NOT_LOADED: return "not loaded";
  }
  return "unknown status";
}

}  // extern "C"
