// NVFP4 operands of block-scaled tensor cores: packed e2m1 codes, and an e4m3 scale for each 16 of k.
#pragma once

#include "cute/util/type_traits.hpp"
#include "cutlass/float_subbyte.h"
#include "cutlass/gemm/dispatch_policy.hpp"

namespace cutlass_evt {

/// A format of operands. Its members:
///   ElementA, ElementB        CUTLASS's names of the values of A and of B with their scales
///   kAlignmentA, kAlignmentB  elements in 16 bytes, on which rows begin; more where TMA wants more
///   Sm100Schedule             CUTLASS's mainloop schedule on SM100, by whether a kernel is grouped and
///                             whether two SMs share a tile
/// The number of elements that share a scale follows from the mainloop (BlockScaledOperands).
struct Nvfp4 {
  using ElementA = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  using ElementB = ElementA;
  static constexpr int kAlignmentA = 32;
  static constexpr int kAlignmentB = kAlignmentA;

  template <bool kGrouped, bool kTwoSm>
  using Sm100Schedule = cute::conditional_t<
      kGrouped,
      cute::conditional_t<kTwoSm, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100,
                          cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100>,
      cute::conditional_t<kTwoSm, cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100,
                          cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100>>;
};

}  // namespace cutlass_evt
