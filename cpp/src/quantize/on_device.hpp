// Runs the quantizers and the kernels beside them on a device, if this build has them for it.
#pragma once

#include "device.hpp"
#include "error.hpp"
#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// Makes the device current and calls launch(properties), if this build has kernels for its compute
/// capability.
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

}  // namespace fp4gemm
