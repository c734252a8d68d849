// What the files of SM90 (Hopper, compute capability 9.0) share on the host.
#pragma once

#include "kernel.hpp"
#include "select.hpp"

namespace fp4gemm::sm90 {

constexpr int kArch = 90;

/// The cost model: the expected time of a kernel of SM90 in clocks of one SM.
double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted);

}  // namespace fp4gemm::sm90
