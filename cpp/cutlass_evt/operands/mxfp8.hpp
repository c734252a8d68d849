// MXFP8 operands of block-scaled tensor cores: e4m3 values, and an e8m0 scale, which is a power of two, for
// each 32 of k.
#pragma once

#include "cute/util/type_traits.hpp"
#include "cutlass/float8.h"
#include "cutlass/gemm/dispatch_policy.hpp"

namespace cutlass_evt {

/// The members are those of Nvfp4 (operands/nvfp4.hpp).
struct Mxfp8 {
  using ElementA = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
  using ElementB = ElementA;
  static constexpr int kAlignmentA = 16;
  static constexpr int kAlignmentB = kAlignmentA;

  template <bool kGrouped, bool kTwoSm>
  using Sm100Schedule = cute::conditional_t<
      kGrouped,
      cute::conditional_t<kTwoSm, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmMxf8f6f4Sm100,
                          cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100>,
      cute::conditional_t<kTwoSm, cutlass::gemm::KernelTmaWarpSpecialized2SmMxf8f6f4Sm100,
                          cutlass::gemm::KernelTmaWarpSpecialized1SmMxf8f6f4Sm100>>;
};

}  // namespace cutlass_evt
