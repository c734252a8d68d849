// How the library's own kernels are launched: overlapping with the kernel before, where the device can.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace fp4gemm {

/// The CTAs of a launch.
struct Ctas {
  dim3 grid;
  int threads;              // of a CTA
  size_t shared_bytes = 0;  // dynamic shared memory of a CTA
};

/// Launches a kernel with the arguments. With `overlaps`, it may start while its predecessor on the stream
/// still runs (programmatic dependent launch), so it must execute griddepcontrol.wait before it reads what
/// its predecessor writes, or writes what that one uses.
template <class... Params, class... Args>
cudaError_t launch_waiting(void (*kernel)(Params...), Ctas const& ctas, bool overlaps, cudaStream_t stream,
                           Args&&... args) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = ctas.grid;
  config.blockDim = static_cast<unsigned>(ctas.threads);
  config.dynamicSmemBytes = ctas.shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace fp4gemm
