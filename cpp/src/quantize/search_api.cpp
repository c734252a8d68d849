// The C interface of the scale search: checks of its arguments, and the launch on the given device.
#include "check.hpp"
#include "quantize/on_device.hpp"
#include "quantize/scale_search.hpp"

namespace fp4gemm {
namespace {

fp4gemm_status_t quantize_searched(fp4gemm_quantize_searched_args_t const* args, int device,
                                   fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_size("k", args->k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("x_dtype", args->x_dtype));
  FP4GEMM_TRY(check_row_stride("x_row_stride", args->x_row_stride, args->k, dtype_bytes(args->x_dtype)));
  FP4GEMM_TRY(check_buffer("x", args->x, args->m * args->k));
  FP4GEMM_TRY(check_scaling(args->scaling));
  FP4GEMM_CHECK(args->block_rows == 1 || args->block_rows == 16, "block_rows: is %d, must be 1 or 16",
                args->block_rows);
  bool const per_row = args->scaling == FP4GEMM_SCALING_ROW;
  if (per_row && args->block_rows == 16) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "%s",
                "block_rows: is 16, which requires FP4GEMM_SCALING_TENSOR");
  }
  FP4GEMM_CHECK(args->e4m3_max == 448 || args->e4m3_max == 256, "e4m3_max: is %d, must be 448 or 256",
                args->e4m3_max);
  FP4GEMM_TRY(check_flag("fp8_operand", args->fp8_operand));
  FP4GEMM_TRY(check_buffer("importance", args->importance, 0, sizeof(float)));
  FP4GEMM_TRY(check_buffer("codes", args->codes, args->m * args->k / 2));
  FP4GEMM_TRY(check_buffer("scales", args->scales, args->m * args->k / 16));
  FP4GEMM_TRY(check_buffer("amax_given", args->amax_given, 0, sizeof(float)));
  int64_t const num_amaxes = args->amax_given != nullptr ? 0 : per_row ? args->m : 1;
  FP4GEMM_TRY(check_buffer("amax", args->amax, num_amaxes, sizeof(float)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_quantize_searched(*args, properties, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_quantize_searched(fp4gemm_quantize_searched_args_t const* args, int device,
                                           fp4gemm_stream_t stream) {
  return fp4gemm::quantize_searched(args, device, stream);
}

}  // extern "C"
