// MXFP8 tokens and MXFP4 weights of block-scaled tensor cores: A has e4m3 values, B has packed e2m1 codes,
// and both have an e8m0 scale, which is a power of two, for each 32 of k.
#pragma once

#include "cutlass_evt/operands/mxfp4.hpp"
#include "cutlass_evt/operands/mxfp8.hpp"

namespace cutlass_evt {

/// The members are those of Nvfp4 (operands/nvfp4.hpp). The instruction is that of MXFP8. It reads codes that
/// TMA has spread in shared memory, 16 of them over 16 bytes, and TMA does so for whole multiples of 128
/// codes.
struct Mxfp8Mxfp4 {
  using ElementA = Mxfp8::ElementA;
  using ElementB = Mxfp4::ElementB;
  static constexpr int kAlignmentA = Mxfp8::kAlignmentA;
  static constexpr int kAlignmentB = 128;

  template <bool kGrouped, bool kTwoSm>
  using Sm100Schedule = Mxfp8::Sm100Schedule<kGrouped, kTwoSm>;
};

}  // namespace cutlass_evt
