// The configuration of the kernel on prepacked NVFP4 weights for SM90 (compute capability 9.0), for which it
// was written.
#pragma once

#include "cutlass_evt/mainloop/mixed_input_config.hpp"

namespace cutlass_evt {

/// What SM90 has, for MixedInputConfig.
struct Sm90Nvfp4Machine {
  static constexpr bool kHasWgmma = true;
  static constexpr bool kHasClusters = true;
  static constexpr int kSharedPerCta = 232448;  // bytes
  static constexpr int kSharedPerSm = 233472;   // bytes, of which each CTA needs 1024 for the system
};

/// The parameters are those of MixedInputConfig.
template <class Element, int RowGroups, int DepthGroups, int Tokens, int ClusterSize, int Chunks,
          int CtasPerSm, int PartTokens = 0>
using Sm90Nvfp4Config = MixedInputConfig<Element, RowGroups, DepthGroups, Tokens, ClusterSize, Chunks,
                                         CtasPerSm, Sm90Nvfp4Machine, PartTokens>;

}  // namespace cutlass_evt
