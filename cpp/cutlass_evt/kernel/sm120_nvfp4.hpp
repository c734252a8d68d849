// The SM120 kernel on prepacked NVFP4 weights: the entry point. The device code is MixedInputKernel, with the
// mma.sync consumers for every tile.
#pragma once

#include "cutlass_evt/kernel/mixed_input.hpp"
#include "cutlass_evt/mainloop/sm120_nvfp4_config.hpp"

namespace cutlass_evt {

/// The grid is one-dimensional; a CTA has Config::kThreads threads. Config is a Sm120Nvfp4Config.
template <class Config, class Epilogue, class Quantizer = MixedInputNoQuantizer>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sm120_nvfp4_gemm(__grid_constant__ MixedInputParams<Epilogue, Quantizer> const params) {
  extern __shared__ char sm120_nvfp4_shared[];
  MixedInputKernel<Config, Epilogue, Quantizer>::run(params, sm120_nvfp4_shared);
}

}  // namespace cutlass_evt
