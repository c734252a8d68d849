// The FP8 cast fused with the computation of its input: SiLU(gate) * up, and RMS norm.
#include "quantize/rows_fp8.cuh"

namespace fp4gemm {

void launch_silu_fp8(Fp8Launch const& launch) {
  if (launch.dtype == FP4GEMM_BF16) {
    launch_fp8<SiluAndMulLoader<__nv_bfloat16>, 2>(launch);
  } else {
    launch_fp8<SiluAndMulLoader<__half>, 2>(launch);
  }
}

void launch_norm_fp8(Fp8Launch const& launch) {
  if (launch.dtype == FP4GEMM_BF16) {
    launch_fp8<RmsNormLoader<__nv_bfloat16>, 4>(launch);
  } else {
    launch_fp8<RmsNormLoader<__half>, 4>(launch);
  }
}

}  // namespace fp4gemm
