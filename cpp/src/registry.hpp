// The table of GEMM kernels that this build holds.
#pragma once

#include "kernel.hpp"

namespace fp4gemm {

int kernel_count();

/// The kernel of that index, or null for one outside of [0, kernel_count()).
Kernel const* kernel_at(int index);

/// The kernel of that name, or null.
Kernel const* find_kernel(char const* name);

}  // namespace fp4gemm
