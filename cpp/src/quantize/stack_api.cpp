// The C interface of the quantization of stacks: checks of its arguments, and the launch on the given device.
#include "fp4gemm/stacks.h"

#include "check.hpp"
#include "quantize/on_device.hpp"
#include "quantize/quantize.hpp"
#include "quantize/stacks.hpp"

namespace fp4gemm {
namespace {

fp4gemm_status_t quantize_stack(fp4gemm_quantize_args_t const* args, int num_matrices, int device,
                                fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_quantize(args));
  FP4GEMM_TRY(check_size("num_matrices", num_matrices, 1, 1));
  FP4GEMM_CHECK(num_matrices * args->m <= Rules::kMaxSize,
                "num_matrices: %d of %lld rows, must be at most %lld rows", num_matrices, ll(args->m),
                ll(Rules::kMaxSize));
  if (args->offs != nullptr) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "offs: is %p, must be null for a stack",
                static_cast<void const*>(args->offs));
  }
  if (args->block_rows == 1 && (is_wanted(args->row) || !is_wanted(args->column))) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "block_rows: is 1, which requires column without row for a stack; fp4gemm_quantize quantizes "
                "the rows of all matrices");
  }
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_quantize_stack(*args, num_matrices, properties, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_quantize_stack(fp4gemm_quantize_args_t const* args, int num_matrices, int device,
                                        fp4gemm_stream_t stream) {
  return fp4gemm::quantize_stack(args, num_matrices, device, stream);
}

}  // extern "C"
