// How GEMM kernels are launched: in clusters, with large shared memory, overlapping with the kernel before.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "error.hpp"

namespace fp4gemm {

struct Launch {
  void const* kernel;
  dim3 grid, block;
  dim3 cluster{0, 0, 0};  // 0: launched without clusters
  size_t shared_bytes = 0;
};

/// Launches a kernel with these arguments. It may start while its predecessor on the stream still runs
/// (programmatic dependent launch), so it must execute griddepcontrol.wait before it reads what its
/// predecessor writes, or writes what that one uses.
template <class... Args>
fp4gemm_status_t launch_overlapping(Launch const& launch, fp4gemm_stream_t stream, Args&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {launch.cluster.x, launch.cluster.y, launch.cluster.z};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.block;
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = launch.cluster.x > 0 ? 2 : 1;
  void* pointers[] = {&args...};
  FP4GEMM_CUDA(cudaLaunchKernelExC(&config, launch.kernel, pointers));
  return FP4GEMM_SUCCESS;
}

/// Raises a kernel's limit of dynamic shared memory, once for each device. `prepared` has a bit for each
/// device on which the limit of this kernel was raised. Two threads may both raise it; the second call
/// changes nothing.
inline fp4gemm_status_t allow_shared_memory(void const* kernel, int bytes, int device,
                                            std::atomic<uint64_t>& prepared) {
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  prepared.fetch_or(bit, std::memory_order_relaxed);
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
