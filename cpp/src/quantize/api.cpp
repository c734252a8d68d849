// The C interface of quantize, dequantize and decode: checks, then a launch on the device asked for.
#include "check.hpp"
#include "device.hpp"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

/// Calls launch(properties) with the device current, if its capability has an image.
template <class Launch>
fp4gemm_status_t on_device(int device, Launch const& launch) {
  DeviceProperties properties;
  FP4GEMM_TRY(device_properties(device, &properties));
  if (fp4gemm_quantize_supported(properties.arch) == 0) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "device: %d has compute capability %d.%d, for which this build (%s) has no quantize kernels; "
                "build fp4gemm with that architecture in FP4GEMM_CUDA_ARCHS",
                device, properties.arch / 10, properties.arch % 10, fp4gemm_built_archs());
  }
  DeviceGuard const guard(device);
  FP4GEMM_TRY(guard.status());
  return launch(properties);
}

fp4gemm_status_t quantize(fp4gemm_quantize_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_size("k", args->k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("x_dtype", args->x_dtype));
  FP4GEMM_TRY(check_scaling(args->scaling));
  FP4GEMM_TRY(check_row_stride("x_row_stride", args->x_row_stride, args->k, dtype_bytes(args->x_dtype)));
  bool const per_row = args->scaling == FP4GEMM_SCALING_ROW;
  FP4GEMM_TRY(check_buffer("x", args->x, args->m * args->k));
  FP4GEMM_TRY(check_buffer("codes", args->codes, args->m * args->k / 2));
  FP4GEMM_TRY(check_buffer("scales", args->scales, args->m * args->k / 16));
  FP4GEMM_TRY(check_buffer("amax", args->amax, per_row ? args->m : 1, sizeof(float)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_quantize(*args, properties.num_sms, stream);
  });
}

fp4gemm_status_t dequantize(fp4gemm_dequantize_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_size("m", args->m, 0, 1));
  FP4GEMM_TRY(check_size("k", args->k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("y_dtype", args->y_dtype));
  FP4GEMM_TRY(check_scaling(args->scaling));
  FP4GEMM_CHECK(args->e4m3_max == 448 || args->e4m3_max == 256, "e4m3_max: is %d, must be 448 or 256",
                args->e4m3_max);
  FP4GEMM_TRY(check_buffer("codes", args->codes, args->m * args->k / 2));
  FP4GEMM_TRY(check_buffer("scales", args->scales, args->m * args->k / 16));
  FP4GEMM_TRY(
      check_buffer("amax", args->amax, args->scaling == FP4GEMM_SCALING_ROW ? args->m : 1, sizeof(float)));
  FP4GEMM_TRY(check_buffer("y", args->y, args->m * args->k));
  return on_device(device, [&](DeviceProperties const&) { return launch_dequantize(*args, stream); });
}

fp4gemm_status_t decode(DecodeJob const& job, int64_t k, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_size("m", job.rows, 0, 1));
  FP4GEMM_TRY(check_size("k", k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK));
  FP4GEMM_TRY(check_buffer("codes", job.codes, job.rows * k / 2));
  FP4GEMM_TRY(check_buffer("scales", job.scales, job.rows * k / 16));
  FP4GEMM_TRY(check_buffer("y", job.y, job.rows * k));
  return on_device(device, [&](DeviceProperties const&) { return launch_decode(job, {}, k, stream); });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

void fp4gemm_padded_scale_shape(int64_t rows, int64_t k, int64_t* scale_rows, int64_t* scale_cols) {
  *scale_rows = (rows + 127) / 128 * 128;
  *scale_cols = ((k + 15) / 16 + 3) / 4 * 4;
}

int fp4gemm_quantize_supported(int arch) {
#ifdef FP4GEMM_WITH_SM80
  if (arch >= 80 && arch < 90) {
    return 1;
  }
#endif
#ifdef FP4GEMM_WITH_SM90
  if (arch >= 90) {  // newer ones through the portable code that goes with the image
    return 1;
  }
#endif
#ifdef FP4GEMM_WITH_SM100
  if (arch == 100 || arch == 103) {
    return 1;
  }
#endif
  (void)arch;
  return 0;
}

fp4gemm_status_t fp4gemm_quantize(fp4gemm_quantize_args_t const* args, int device, fp4gemm_stream_t stream) {
  return fp4gemm::quantize(args, device, stream);
}

fp4gemm_status_t fp4gemm_dequantize(fp4gemm_dequantize_args_t const* args, int device,
                                    fp4gemm_stream_t stream) {
  return fp4gemm::dequantize(args, device, stream);
}

fp4gemm_status_t fp4gemm_decode(int64_t m, int64_t k, uint8_t const* codes, uint8_t const* scales, void* y,
                                int device, fp4gemm_stream_t stream) {
  return fp4gemm::decode({m, codes, scales, y}, k, device, stream);
}

}  // extern "C"
