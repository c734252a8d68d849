// MXFP4 operands of block-scaled tensor cores: packed e2m1 codes, and an e8m0 scale, which is a power of two,
// for each 32 of k.
#pragma once

#include "cute/util/type_traits.hpp"
#include "cutlass/float_subbyte.h"
#include "cutlass/gemm/dispatch_policy.hpp"

namespace cutlass_evt {

/// The members are those of Nvfp4 (operands/nvfp4.hpp).
struct Mxfp4 {
  using ElementA = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
  using ElementB = ElementA;
  static constexpr int kAlignmentA = 32;
  static constexpr int kAlignmentB = kAlignmentA;

  template <bool kGrouped, bool kTwoSm>
  using Sm100Schedule = cute::conditional_t<
      kGrouped,
      cute::conditional_t<kTwoSm, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmMxf4Sm100,
                          cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf4Sm100>,
      cute::conditional_t<kTwoSm, cutlass::gemm::KernelTmaWarpSpecialized2SmMxf4Sm100,
                          cutlass::gemm::KernelTmaWarpSpecialized1SmMxf4Sm100>>;
};

}  // namespace cutlass_evt
