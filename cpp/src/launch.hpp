// How the library launches its kernels: overlapping with the kernel before where the device can, in clusters,
// and with large shared memory.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "error.hpp"

namespace fp4gemm {

/// The CTAs of a launch.
struct Ctas {
  dim3 grid;
  int threads;              // of a CTA
  size_t shared_bytes = 0;  // dynamic shared memory of a CTA
  dim3 cluster{0, 0, 0};    // CTAs of a cluster; 0: launched without clusters
};

/// Launches a kernel with the arguments. With `overlaps`, it may start while its predecessor on the stream
/// still runs (programmatic dependent launch), so it must execute griddepcontrol.wait before it reads what
/// its predecessor writes, or writes what that one uses. Devices before 9.0 cannot overlap launches.
///
/// The arguments are converted to the types of the kernel's parameters, and copied by the CUDA runtime alone:
/// the parameters of a GEMM have up to 4 KB.
template <class... Params>
cudaError_t launch_waiting(void (*kernel)(Params...), Ctas const& ctas, bool overlaps, cudaStream_t stream,
                           std::common_type_t<Params> const&... params) {
  // An attribute that is not wanted is left out, since it is refused by devices that do not have it.
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (ctas.cluster.x > 0) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {ctas.cluster.x, ctas.cluster.y, ctas.cluster.z};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = ctas.grid;
  config.blockDim = static_cast<unsigned>(ctas.threads);
  config.dynamicSmemBytes = ctas.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  void* pointers[] = {const_cast<void*>(static_cast<void const*>(&params))...};
  return cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(kernel), pointers);
}

/// Raises a kernel's limit of dynamic shared memory, once for each device. Without it a launch may have 48
/// KB. `prepared` has a bit for each device on which the limit of this kernel was raised. Two threads may
/// both raise it; the second call changes nothing.
template <class... Params>
fp4gemm_status_t allow_shared_memory(void (*kernel)(Params...), int bytes, int device,
                                     std::atomic<uint64_t>& prepared) {
  uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
  if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CUDA(cudaFuncSetAttribute(reinterpret_cast<void const*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  prepared.fetch_or(bit, std::memory_order_relaxed);
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
