// The functions of the driver, which the library does not link.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fp4gemm {

/// A function of the driver as it is since a version of CUDA; null where the driver has none.
template <class Function>
Function driver_function(char const* name, unsigned version = 11080) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  cudaError_t const error =
      cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result);
  bool const found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
  return found ? reinterpret_cast<Function>(function) : nullptr;
}

}  // namespace fp4gemm
