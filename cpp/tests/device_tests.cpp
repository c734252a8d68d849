// Host tests of DeviceGuard on a simulated CUDA runtime and driver: making a device current creates no
// context on the device that was current before, and every context that is pushed or retained is given back.
#include "device.hpp"

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <vector>

#include "checks.hpp"

namespace {

constexpr int kDevices = 3;

/// As CUDA 12 and newer: without a current context the runtime uses `device`, and cudaSetDevice creates the
/// context of its device at once.
struct Simulation {
  int device = 0;
  bool has_context[kDevices] = {};
  int retained[kDevices] = {};
  std::vector<int> stack;  // devices of the contexts that were pushed

  int current() const { return stack.empty() ? device : stack.back(); }
};
Simulation simulation;

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1); }

CUresult simulated_device_get(CUdevice* handle, int ordinal) {
  *handle = ordinal;
  return ordinal < kDevices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
CUresult simulated_retain(CUcontext* context, CUdevice device) {
  simulation.has_context[device] = true;
  ++simulation.retained[device];
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult simulated_release(CUdevice device) {
  --simulation.retained[device];
  return CUDA_SUCCESS;
}
CUresult simulated_push(CUcontext context) {
  simulation.stack.push_back(static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1);
  return CUDA_SUCCESS;
}
CUresult simulated_pop(CUcontext* context) {
  if (simulation.stack.empty()) {
    return CUDA_ERROR_INVALID_CONTEXT;
  }
  *context = context_of(simulation.stack.back());
  simulation.stack.pop_back();
  return CUDA_SUCCESS;
}

void* simulated(std::string const& name) {
  return name == "cuDeviceGet"                 ? reinterpret_cast<void*>(&simulated_device_get)
         : name == "cuDevicePrimaryCtxRetain"  ? reinterpret_cast<void*>(&simulated_retain)
         : name == "cuDevicePrimaryCtxRelease" ? reinterpret_cast<void*>(&simulated_release)
         : name == "cuCtxPushCurrent"          ? reinterpret_cast<void*>(&simulated_push)
         : name == "cuCtxPopCurrent"           ? reinterpret_cast<void*>(&simulated_pop)
                                               : nullptr;
}

}  // namespace

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = simulation.current();
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  simulation.device = device;
  simulation.has_context[device] = true;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = 9;
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
char const* cudaGetErrorString(cudaError_t) { return ""; }
char const* cudaGetErrorName(cudaError_t) { return ""; }
cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  *function = simulated(symbol);
  *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"

namespace {

/// The tensors are on device 1 and nothing has used device 0, the current one.
void test_another_device() {
  simulation = {};
  simulation.has_context[1] = true;
  simulation.retained[1] = 1;
  {
    fp4gemm::DeviceGuard const guard(1);
    CHECK(guard.status() == FP4GEMM_SUCCESS, "%s", fp4gemm_last_error());
    CHECK(simulation.current() == 1, "device %d is current", simulation.current());
  }
  CHECK(simulation.current() == 0, "device %d is current after the guard", simulation.current());
  CHECK(!simulation.has_context[0], "the guard created a context on device 0");
  CHECK(simulation.stack.empty() && simulation.retained[1] == 1, "%d references are left",
        simulation.retained[1]);
}

void test_the_current_device() {
  simulation = {};
  simulation.device = 2;
  simulation.has_context[2] = true;
  {
    fp4gemm::DeviceGuard const guard(2);
    CHECK(simulation.current() == 2 && simulation.stack.empty(), "a context was pushed without need");
  }
  CHECK(simulation.current() == 2 && simulation.retained[2] == 0, "the state differs after the guard");
}

void test_a_missing_device() {
  simulation = {};
  {
    fp4gemm::DeviceGuard const guard(kDevices);
    expect_error("a missing device", guard.status(), FP4GEMM_ERROR_CUDA,
                 "device: 3 could not be made current");
  }
  CHECK(simulation.current() == 0 && simulation.stack.empty(), "the state differs after the guard");
}

}  // namespace

int main() {
  test_another_device();
  test_the_current_device();
  test_a_missing_device();
  return report();
}
