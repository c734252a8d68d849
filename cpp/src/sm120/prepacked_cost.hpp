// The cost model of SM120's kernels on prepacked weights.
#pragma once

#include "kernel.hpp"
#include "select.hpp"

namespace fp4gemm::sm120 {

/// The least time, in clocks, in which `num_sms` SMs read the weights of a product once.
double weight_clocks(int num_sms, Selection const& wanted);

/// The expected time, in clocks of one SM, of a kernel on prepacked weights, and of the conversions that it
/// needs.
double prepacked_clocks(Kernel const& kernel, int num_sms, Selection const& wanted);

}  // namespace fp4gemm::sm120
