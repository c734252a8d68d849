// The launcher of the kernel that swizzles block scales. Arguments have been checked; the device is current.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "fp4gemm/scales.h"

namespace fp4gemm {

/// Scales in plain order, and where they go; scales.h has the meaning of each field.
struct SwizzleJob {
  int num_matrices;
  int64_t rows;
  int64_t columns;
  uint8_t const* compact;
  int64_t row_stride;
  uint8_t* swizzled;
};

fp4gemm_status_t launch_swizzle_scales(SwizzleJob const& job, DeviceProperties const& properties,
                                       fp4gemm_stream_t stream);

}  // namespace fp4gemm
