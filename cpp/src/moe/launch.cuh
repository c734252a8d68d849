// How the kernels for mixtures of experts are launched: overlapping with the kernel before.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace fp4gemm {

/// Launches a kernel with the parameters. With `overlaps`, it may start while its predecessor on the stream
/// still runs (programmatic dependent launch), so it must execute griddepcontrol.wait before it reads what
/// its predecessor writes, or writes what that one uses.
template <class Params>
cudaError_t launch_waiting(void (*kernel)(Params), Params const& params, int64_t ctas, int threads,
                           size_t shared_bytes, bool overlaps, cudaStream_t stream) {
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = static_cast<unsigned>(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = overlaps ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace fp4gemm
