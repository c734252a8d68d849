// The properties of a device, which are read once, and the current device.
#include "device.hpp"

#include <atomic>

#include "driver.hpp"
#include "error.hpp"

namespace fp4gemm {
namespace {

// arch << 16 | num_sms of each device, 0 until read. Threads that read the properties at the same time write
// equal values, so relaxed order is enough.
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

/// What a DeviceGuard calls.
struct Driver {
  decltype(&cuDeviceGet) device_get = driver_function<decltype(&cuDeviceGet)>("cuDeviceGet");
  decltype(&cuDevicePrimaryCtxRetain) retain =
      driver_function<decltype(&cuDevicePrimaryCtxRetain)>("cuDevicePrimaryCtxRetain");
  decltype(&cuDevicePrimaryCtxRelease) release =
      driver_function<decltype(&cuDevicePrimaryCtxRelease)>("cuDevicePrimaryCtxRelease");
  decltype(&cuCtxPushCurrent) push = driver_function<decltype(&cuCtxPushCurrent)>("cuCtxPushCurrent");
  decltype(&cuCtxPopCurrent) pop = driver_function<decltype(&cuCtxPopCurrent)>("cuCtxPopCurrent");

  bool is_complete() const {
    return device_get != nullptr && retain != nullptr && release != nullptr && push != nullptr &&
           pop != nullptr;
  }
};

Driver const& driver() {
  static Driver const found;
  return found;
}

/// Makes the primary context of a device current.
fp4gemm_status_t push_context(int device) {
  if (!driver().is_complete()) {
    return fail(FP4GEMM_ERROR_CUDA, "device: the driver lacks the functions that make device %d current",
                device);
  }
  CUdevice handle = 0;
  CUcontext context = nullptr;
  CUresult result = driver().device_get(&handle, device);
  if (result == CUDA_SUCCESS) {
    result = driver().retain(&context, handle);
  }
  if (result == CUDA_SUCCESS) {
    result = driver().push(context);
    if (result != CUDA_SUCCESS) {
      driver().release(handle);
    }
  }
  if (result != CUDA_SUCCESS) {
    return fail(FP4GEMM_ERROR_CUDA, "device: %d could not be made current (CUresult %d)", device,
                static_cast<int>(result));
  }
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

// cudaSetDevice would not do: since CUDA 12 it creates the context of the device that it is given, so that
// going back to a device which the process does not use would allocate hundreds of megabytes there.
DeviceGuard::DeviceGuard(int device) {
  auto const enter = [&]() -> fp4gemm_status_t {
    int current = -1;
    FP4GEMM_CUDA(cudaGetDevice(&current));
    if (current != device) {
      FP4GEMM_TRY(push_context(device));
      pushed_ = device;
    }
    return FP4GEMM_SUCCESS;
  };
  status_ = enter();
}

DeviceGuard::~DeviceGuard() {
  CUdevice handle = 0;
  CUcontext context = nullptr;
  if (pushed_ >= 0 && driver().pop(&context) == CUDA_SUCCESS &&
      driver().device_get(&handle, pushed_) == CUDA_SUCCESS) {
    driver().release(handle);
  }
}

}  // namespace fp4gemm
