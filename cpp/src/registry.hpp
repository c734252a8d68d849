// The table of GEMM kernels that this build holds.
#pragma once

#include "kernel.hpp"

namespace fp4gemm {

/// The lists that make up the table, each of one architecture and never empty; ends with null.
KernelList const* const* kernel_lists();

int kernel_count();

/// index in [0, kernel_count()).
Kernel const& kernel_at(int index);

/// The kernel of that name, or null.
Kernel const* find_kernel(char const* name);

}  // namespace fp4gemm
