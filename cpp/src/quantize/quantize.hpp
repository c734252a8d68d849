// The launchers of the quantize, dequantize and decode kernels. Arguments have been checked; the device is
// current.
#pragma once

#include "device.hpp"
#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

fp4gemm_status_t launch_quantize(fp4gemm_quantize_args_t const& args, DeviceProperties const& properties,
                                 fp4gemm_stream_t stream);

fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const& args,
                                              fp4gemm_stream_t stream);

fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const& args,
                                          fp4gemm_stream_t stream);

fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const& args, fp4gemm_stream_t stream);

fp4gemm_status_t launch_mxfp8_quantize(fp4gemm_mxfp8_args_t const& args, fp4gemm_stream_t stream);

fp4gemm_status_t launch_mxfp8_dequantize(fp4gemm_mxfp8_args_t const& args, fp4gemm_stream_t stream);

/// One operand to decode: y (rows, k) fp16 = e2m1 value x block scale.
struct DecodeJob {
  int64_t rows = 0;
  uint8_t const* codes = nullptr;
  uint8_t const* scales = nullptr;  // swizzled
  void* y = nullptr;
};

/// Decodes both operands, of equal k, in one launch; a job with no rows is skipped.
fp4gemm_status_t launch_decode(DecodeJob const& first, DecodeJob const& second, int64_t k,
                               fp4gemm_stream_t stream);

}  // namespace fp4gemm
