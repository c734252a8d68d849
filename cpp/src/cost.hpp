// The evaluator of policies: the time that a kernel is expected to need for a problem.
#pragma once

#include "kernel.hpp"
#include "policy.hpp"
#include "select.hpp"

namespace fp4gemm {

/// The expected time of a kernel, in clocks of one SM of a device with num_sms SMs, by the policy of its
/// architecture, the conversions of its operands included; infinity for a kernel that must not be selected
/// while another one suits. The host does not know the sizes of groups, and assumes a distribution of them.
///
/// A kernel reads one of four things, and each has its model:
///   kNvfp4 with FP4 tensor cores, kFp16   tiles in waves: the sizes of the tile and TilePolicy
///   kNvfp4 without FP4 tensor cores       PackedPolicy
///   kPrepacked, kPrepackedBf16            the schedule of the kernel, and its measured figures or those that
///                                         DerivedPolicy gives for its tile
double estimate_clocks(Policy const& policy, Kernel const& kernel, int num_sms, Selection const& wanted);

}  // namespace fp4gemm
