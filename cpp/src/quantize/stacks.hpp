// Quantization of stacks of matrices: what stack_api.cpp calls.
#pragma once

#include "device.hpp"
#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// Checks the arguments of fp4gemm_quantize.
fp4gemm_status_t check_quantize(fp4gemm_quantize_args_t const* args);

/// Quantizes num_matrices matrices, which follow each other as their results do. args describes the first and
/// has, unless there is one, no groups, and block_rows 16 or column without row. Arguments have been checked;
/// the device is current.
fp4gemm_status_t launch_quantize_stack(fp4gemm_quantize_args_t const& args, int num_matrices,
                                       DeviceProperties const& properties, fp4gemm_stream_t stream);

}  // namespace fp4gemm
