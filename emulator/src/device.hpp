// The devices that the emulator stands for: their limits by compute capability, and the PTX that runs on
// them.
#pragma once

#include <string>

#include "types.hpp"

namespace ptxemu {

/// Limits by compute capability (CUDA C++ Programming Guide, "Technical Specifications per Compute
/// Capability").
struct Device {
  u32 block_shared_bytes;  // largest shared memory of a CTA, static and dynamic
  u32 sm_shared_bytes;
  u32 sm_threads, sm_blocks;  // resident on an SM
  u32 l2_bytes;
  u32 cluster_ctas;  // the largest cluster that the emulator models for the device
};

/// The device of a compute capability, 10 * major + minor. 12.x: clusters of one CTA, which CUTLASS's kernels
/// use there because the device has no TMA multicast.
Device const& device_of(int compute_capability);

/// Whether the device is of compute capability 12.x.
inline bool is_sm120(int compute_capability) { return compute_capability / 10 == 12; }

struct Instruction;

/// The architecture that the .target directive of a PTX file names, such as sm_120f.
struct Target {
  int number = 0;   // 120; 0 if the file has no target
  char suffix = 0;  // 'a', 'f', or 0

  static Target parse(std::string const& ptx);
  std::string name() const;
  /// An `a` target runs on its own compute capability, an `f` target on those of its family from its own on,
  /// and a target without a suffix on every later one.
  bool runs_on(int compute_capability) const;
  /// Whether devices of the target execute the instruction as far as the emulator models it: 12.x has
  /// neither tcgen05 nor TMA multicast nor CTA pairs, and 10.x has no mma.sync with block scales.
  bool has(Instruction const& in) const;
};

}  // namespace ptxemu
