// The configuration of the kernel on prepacked NVFP4 weights for SM120 (compute capability 12.0 and 12.1).
//
// SM120 has bulk copies, TMA, mbarriers, ldmatrix and mma.sync, and so the whole design of SM90's kernel with
// the consumers that SM90 uses for eight tokens. It lacks wgmma, setmaxnreg is not needed, a cluster has one
// CTA, and an SM has less than half of the shared memory.
#pragma once

#include "cutlass_evt/mainloop/mixed_input_config.hpp"

namespace cutlass_evt {

/// What SM120 has, for MixedInputConfig.
struct Sm120Nvfp4Machine {
  static constexpr bool kHasWgmma = false;
  static constexpr bool kHasClusters = false;
  static constexpr int kSharedPerCta = 101376;  // bytes
  static constexpr int kSharedPerSm = 102400;   // bytes, of which each CTA needs 1024 for the system
};

/// The parameters are those of MixedInputConfig. Warpgroups here are only groups of four warps, which have 64
/// weight rows and synchronise in the epilogue.
template <class Element, int RowGroups, int DepthGroups, int Tokens, int Chunks, int CtasPerSm>
struct Sm120Nvfp4Config
    : MixedInputConfig<Element, RowGroups, DepthGroups, Tokens, 1, Chunks, CtasPerSm, Sm120Nvfp4Machine> {
  static_assert(Tokens <= 64, "with more tokens the FP4 tensor cores are faster");
};

}  // namespace cutlass_evt
