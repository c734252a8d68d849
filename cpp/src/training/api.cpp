// The C interface of the kernels of training: checks, and the launches on the given device.
#include "check.hpp"
#include "quantize/on_device.hpp"
#include "training/training.hpp"

namespace fp4gemm {
namespace {

fp4gemm_status_t check_rows(char const* name, void const* x, char const* stride_name, int64_t row_stride,
                            fp4gemm_swiglu_args_t const& args) {
  FP4GEMM_TRY(check_row_stride(stride_name, row_stride, args.f, dtype_bytes(args.dtype)));
  return check_buffer(name, x, args.m * args.f);
}

/// What both directions read.
fp4gemm_status_t check_swiglu(fp4gemm_swiglu_args_t const* args) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_size("f", args->f, kSwigluStep, kSwigluStep, Rules::kMaxK));
  FP4GEMM_CHECK(args->dtype == FP4GEMM_BF16 || args->dtype == FP4GEMM_FP16,
                "dtype: is %d, must be FP4GEMM_BF16 or FP4GEMM_FP16", static_cast<int>(args->dtype));
  FP4GEMM_TRY(check_rows("gate", args->gate, "gate_row_stride", args->gate_row_stride, *args));
  FP4GEMM_TRY(check_rows("up", args->up, "up_row_stride", args->up_row_stride, *args));
  return check_buffer("weights", args->weights, 0, sizeof(float));
}

fp4gemm_status_t swiglu(fp4gemm_swiglu_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_swiglu(args));
  FP4GEMM_TRY(check_buffer("y", args->y, args->m * args->f));
  return on_device(
      device, [&](DeviceProperties const& properties) { return launch_swiglu(*args, properties, stream); });
}

fp4gemm_status_t swiglu_backward(fp4gemm_swiglu_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_swiglu(args));
  FP4GEMM_TRY(check_rows("dy", args->dy, "dy_row_stride", args->dy_row_stride, *args));
  FP4GEMM_TRY(check_buffer("dgate", args->dgate, args->m * args->f));
  FP4GEMM_TRY(check_buffer("dup", args->dup, args->m * args->f));
  FP4GEMM_TRY(
      check_buffer("dweights", args->dweights, args->weights != nullptr ? args->m : 0, sizeof(float)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_swiglu_backward(*args, properties, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_swiglu(fp4gemm_swiglu_args_t const* args, int device, fp4gemm_stream_t stream) {
  return fp4gemm::swiglu(args, device, stream);
}

fp4gemm_status_t fp4gemm_swiglu_backward(fp4gemm_swiglu_args_t const* args, int device,
                                         fp4gemm_stream_t stream) {
  return fp4gemm::swiglu_backward(args, device, stream);
}

}  // extern "C"
