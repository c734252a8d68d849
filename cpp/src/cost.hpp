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

/// True if an estimate is less than another one by more than rounding. Kernels whose estimates are equal in
/// exact arithmetic then tie on every machine: the last bit of a sum depends on its order, and on whether the
/// compiler contracts a product and a sum, as it does for aarch64.
constexpr bool is_cheaper(double clocks, double than) { return clocks < than * (1 - 1e-12); }

}  // namespace fp4gemm
