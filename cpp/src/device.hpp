// What the library asks of a CUDA device; needs no CUDA headers.
#pragma once

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

struct DeviceProperties {
  int arch = 0;  // 10 * major + minor of the compute capability
  int num_sms = 0;

  /// True if kernels may be launched with the programmatic attribute (griddepcontrol).
  bool can_overlap_launches() const { return arch >= 90; }
};

/// Reads the properties of a device; they are kept after the first read.
fp4gemm_status_t device_properties(int device, DeviceProperties* properties);

/// Makes a device current for as long as the guard lives, by its primary context. No context is created on
/// the device that was current before.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(DeviceGuard const&) = delete;
  DeviceGuard& operator=(DeviceGuard const&) = delete;

  fp4gemm_status_t status() const { return status_; }

 private:
  int pushed_ = -1;  // the device whose context was pushed; -1: the device was current already
  fp4gemm_status_t status_ = FP4GEMM_SUCCESS;
};

}  // namespace fp4gemm
