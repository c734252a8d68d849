// The SM90 kernel on prepacked NVFP4 weights: the entry point. The device code is MixedInputKernel.
#pragma once

#include "cutlass_evt/kernel/mixed_input.hpp"
#include "cutlass_evt/mainloop/sm90_nvfp4_config.hpp"

namespace cutlass_evt {

/// The grid is one-dimensional, a multiple of the cluster; a CTA has Config::kThreads threads. Config is a
/// Sm90Nvfp4Config.
template <class Config, class Epilogue, class Quantizer = MixedInputNoQuantizer>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sm90_nvfp4_gemm(__grid_constant__ MixedInputParams<Epilogue, Quantizer> const params) {
  extern __shared__ char sm90_nvfp4_shared[];
  MixedInputKernel<Config, Epilogue, Quantizer>::run(params, sm90_nvfp4_shared);
}

}  // namespace cutlass_evt
