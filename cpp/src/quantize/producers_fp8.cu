// The FP8 cast fused with the computation of its input: SiLU(gate) * up, and RMS norm.
#include "quantize/rows_fp8.cuh"

namespace fp4gemm {

void launch_silu_fp8(Fp8Launch const& launch) {
  for_half_type(launch.params.input.dtype,
                [&](auto type) { launch_fp8<SiluAndMulLoader<decltype(type)>, 2>(launch); });
}

void launch_norm_fp8(Fp8Launch const& launch) {
  for_half_type(launch.params.input.dtype,
                [&](auto type) { launch_fp8<RmsNormLoader<decltype(type)>, 4>(launch); });
}

}  // namespace fp4gemm
