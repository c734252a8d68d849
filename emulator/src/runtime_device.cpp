// Replacement CUDA runtime: errors, the device, streams, events, and the driver's entry points.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>

#include "machine.hpp"
#include "queue.hpp"
#include "runtime.hpp"

namespace ptxemu {

namespace {

thread_local cudaError_t last_error = cudaSuccess;

}  // namespace

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) {
    last_error = error;
  }
  return error;
}

cudaError_t synchronize(cudaError_t otherwise) {
  int const error = LaunchQueue::instance().flush();
  return remember(error != 0 ? static_cast<cudaError_t>(error) : otherwise);
}

}  // namespace ptxemu

using namespace ptxemu;

extern "C" {

// Errors. A queued launch has not failed yet: its error appears at the next call that waits for it.
cudaError_t cudaGetLastError() {
  int const asynchronous = LaunchQueue::instance().error(false);
  cudaError_t const error = last_error != cudaSuccess ? last_error : static_cast<cudaError_t>(asynchronous);
  last_error = cudaSuccess;
  return error;
}
cudaError_t cudaPeekAtLastError() {
  int const asynchronous = LaunchQueue::instance().error(false);
  return last_error != cudaSuccess ? last_error : static_cast<cudaError_t>(asynchronous);
}
char const* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDeviceFunction:
      return "no such kernel in the emulator's PTX; see ptxemu_last_error()";
    case cudaErrorLaunchFailure: return "the emulator stopped the kernel; see ptxemu_last_error()";
    default: return "error";
  }
}
char const* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "cudaSuccess";
    case cudaErrorInvalidValue: return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation: return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidDeviceFunction: return "cudaErrorInvalidDeviceFunction";
    case cudaErrorLaunchFailure: return "cudaErrorLaunchFailure";
    case cudaErrorInvalidDevice: return "cudaErrorInvalidDevice";
    default: return "cudaErrorUnknown";
  }
}

// The device: there is one, number 0.
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : remember(cudaErrorInvalidDevice); }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  ptxemu_options const& options = Session::instance().options;
  Device const& limits = device_of(options.compute_capability);
  if (device != 0) {
    return remember(cudaErrorInvalidDevice);
  }
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = options.num_sms; break;
    case cudaDevAttrComputeCapabilityMajor: *value = options.compute_capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = options.compute_capability % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(limits.block_shared_bytes); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(limits.sm_shared_bytes);
      break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = static_cast<int>(limits.sm_threads); break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = static_cast<int>(limits.sm_blocks); break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7FFFFFFF; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrL2CacheSize: *value = static_cast<int>(limits.l2_bytes); break;
    case cudaDevAttrClockRate: *value = 1965000; break;
    case cudaDevAttrClusterLaunch:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrMemoryPoolsSupported:
    case cudaDevAttrUnifiedAddressing: *value = 1; break;
    default: *value = 0; break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (device != 0) {
    return remember(cudaErrorInvalidDevice);
  }
  ptxemu_options const& options = Session::instance().options;
  Device const& limits = device_of(options.compute_capability);
  *properties = {};
  std::strcpy(properties->name, "PTX emulator");
  properties->major = options.compute_capability / 10;
  properties->minor = options.compute_capability % 10;
  properties->multiProcessorCount = options.num_sms;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = limits.block_shared_bytes;
  properties->sharedMemPerMultiprocessor = limits.sm_shared_bytes;
  properties->regsPerBlock = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = static_cast<int>(limits.sm_threads);
  properties->l2CacheSize = static_cast<int>(limits.l2_bytes);
  properties->totalGlobalMem = 192ull << 30;
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return synchronize(); }
cudaError_t cudaDeviceReset() { return synchronize(); }
cudaError_t cudaDriverGetVersion(int* version) {
  *version = Session::instance().options.driver_version;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}

// Streams: all are one stream, which executes in order. Waiting for one waits for all launches.
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  static char streams[1];
  *stream = reinterpret_cast<cudaStream_t>(streams);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  return cudaStreamCreate(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return synchronize(); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return synchronize(); }
cudaError_t cudaStreamQuery(cudaStream_t) { return synchronize(); }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return synchronize(); }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  static char events[1];
  *event = reinterpret_cast<cudaEvent_t>(events);
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return cudaEventCreate(event); }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return synchronize(); }
cudaError_t cudaEventRecordWithFlags(cudaEvent_t, cudaStream_t, unsigned) { return synchronize(); }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return synchronize(); }
cudaError_t cudaEventQuery(cudaEvent_t) { return synchronize(); }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;  // the emulator does not model time
  return synchronize();
}

// The driver's entry points. CUTLASS asks for cuTensorMapEncodeTiled alone.
cudaError_t cudaGetDriverEntryPointByVersion(char const* symbol, void** function, unsigned,
                                             unsigned long long, cudaDriverEntryPointQueryResult* result) {
  bool const known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  if (result != nullptr) {
    *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return known ? cudaSuccess : remember(cudaErrorSymbolNotFound);
}
cudaError_t cudaGetDriverEntryPoint(char const* symbol, void** function, unsigned long long flags,
                                    cudaDriverEntryPointQueryResult* result) {
  return cudaGetDriverEntryPointByVersion(symbol, function, 0, flags, result);
}
CUresult cuDriverGetVersion(int* version) {
  *version = Session::instance().options.driver_version;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult, char const** text) {
  *text = "driver error";
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, char const** text) {
  *text = "CUDA_ERROR";
  return CUDA_SUCCESS;
}

}  // extern "C"
