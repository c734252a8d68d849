// Which kernel serves a problem: a pure function of the device's figures, the shape and the table.
#pragma once

#include "kernel.hpp"

namespace fp4gemm {

/// What a kernel is wanted for.
struct Selection {
  int64_t m, n, k;
  int num_groups;  // 0: dense
  fp4gemm_ragged_t ragged;
  fp4gemm_dtype_t out_dtype;
  fp4gemm_format_t format_a, format_b;
  bool batch_invariant;  // choose without a look at m
  bool is_gated;
};

/// True if the kernel does what is wanted, on a device that it runs on.
bool suits(Kernel const& kernel, Selection const& wanted);

/// What the GEMM is expected to take on a device, in clocks of one multiprocessor: from measured figures for
/// kernels on prepacked weights (sm90/measured.hpp); otherwise the waves of tiles, each as long as the slower
/// of its tensor-core work and its operand traffic; and the conversion of operands that the kernel does not
/// read as they are. The sizes of groups are not known to the host: averages stand for them. For comparing
/// kernels of one architecture only.
double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted);

/// The index of the cheapest kernel that serves the device, is of the mode, takes the operands and writes
/// that type, the earlier one on a tie, or -1. Kernels on packed operands do not take decoded ones.
int select_kernel(int device_arch, int num_sms, Selection const& wanted);

}  // namespace fp4gemm
