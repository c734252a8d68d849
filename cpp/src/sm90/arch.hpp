// What the files of SM90 (Hopper, compute capability 9.0) share on the host.
#pragma once

#include "kernel.hpp"
#include "select.hpp"

namespace fp4gemm::sm90 {

constexpr int kArch = 90;

/// The cost model: the expected time of a kernel of SM90 in clocks of one SM.
double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted);

/// Whether a kernel quantizes the A of a problem while its first weights are on their way: with few tokens,
/// where that is faster than a launch of the quantizer.
bool quantizes_a(Kernel const& kernel, Problem const& problem);

}  // namespace fp4gemm::sm90
