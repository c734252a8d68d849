// Device properties, read once, and the current device.
#include "device.hpp"

#include <cuda_runtime_api.h>

#include <atomic>

#include "error.hpp"

namespace fp4gemm {
namespace {

// arch << 16 | num_sms of each device, 0 until read. Immutable after the first read, so relaxed races write
// equal values.
constexpr int kMaxCachedDevices = 64;
std::atomic<uint32_t> cached_properties[kMaxCachedDevices];

fp4gemm_status_t read_properties(int device, DeviceProperties* properties) {
  int major = 0;
  int minor = 0;
  FP4GEMM_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  FP4GEMM_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  FP4GEMM_CUDA(cudaDeviceGetAttribute(&properties->num_sms, cudaDevAttrMultiProcessorCount, device));
  properties->arch = 10 * major + minor;
  return FP4GEMM_SUCCESS;
}

}  // namespace

fp4gemm_status_t device_properties(int device, DeviceProperties* properties) {
  FP4GEMM_CHECK(device >= 0, "device: is %d, must be a CUDA device ordinal", device);
  if (device < kMaxCachedDevices) {
    if (uint32_t const packed = cached_properties[device].load(std::memory_order_relaxed); packed != 0) {
      *properties = {static_cast<int>(packed >> 16), static_cast<int>(packed & 0xFFFF)};
      return FP4GEMM_SUCCESS;
    }
  }
  FP4GEMM_TRY(read_properties(device, properties));
  if (device < kMaxCachedDevices) {
    uint32_t const packed =
        static_cast<uint32_t>(properties->arch) << 16 | static_cast<uint32_t>(properties->num_sms);
    cached_properties[device].store(packed, std::memory_order_relaxed);
  }
  return FP4GEMM_SUCCESS;
}

DeviceGuard::DeviceGuard(int device) {
  auto const enter = [&]() -> fp4gemm_status_t {
    int current = -1;
    FP4GEMM_CUDA(cudaGetDevice(&current));
    if (current != device) {
      FP4GEMM_CUDA(cudaSetDevice(device));
      previous_ = current;
    }
    return FP4GEMM_SUCCESS;
  };
  status_ = enter();
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) {
    cudaSetDevice(previous_);
  }
}

}  // namespace fp4gemm
