// What launches of GEMM kernels share: overlap with the kernel before, and large shared memory.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

namespace fp4gemm {

/// The kernel may start while its predecessor on the stream still runs (programmatic dependent launch).
inline cudaLaunchAttribute overlapping_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

/// Lifts a kernel's shared memory limit, once a device; idempotent, so that a race does no harm. `prepared`
/// is the kernel's own.
inline cudaError_t allow_shared_memory(void const* kernel, int bytes, int device,
                                       std::atomic<uint64_t>& prepared) {
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return cudaSuccess;
  }
  cudaError_t const error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) {
    prepared.fetch_or(bit, std::memory_order_relaxed);
  }
  return error;
}

}  // namespace fp4gemm
