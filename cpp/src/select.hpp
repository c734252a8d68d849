// The selection of a kernel: a pure function of the device, the problem and the kernel table.
#pragma once

#include <tuple>

#include "kernel.hpp"

namespace fp4gemm {

/// What a kernel is to be selected for.
struct Selection {
  int64_t m, n, k;
  int num_groups;  // 0: dense
  fp4gemm_ragged_t ragged;
  fp4gemm_dtype_t out_dtype;
  fp4gemm_format_t format_a, format_b;
  bool batch_invariant;  // select without regard to m
  bool is_gated;
  bool use_fast_accum;        // of e4m3: sums may stay in the accumulators of the tensor cores
  bool is_generated = false;  // the kernel must have a form with a formula that is compiled at run time

  bool operator==(Selection const& other) const {
    auto const fields = [](Selection const& s) {
      return std::tie(s.m, s.n, s.k, s.num_groups, s.ragged, s.out_dtype, s.format_a, s.format_b,
                      s.batch_invariant, s.is_gated, s.use_fast_accum, s.is_generated);
    };
    return fields(*this) == fields(other);
  }
};

/// True if the kernel can compute the problem: it has the mode, epilogue and output type, and accepts the
/// formats.
bool suits(Kernel const& kernel, Selection const& wanted);

/// The index of the kernel that suits and is expected to need the least time on a device of compute
/// capability device_arch (10 * major + minor), the earlier one on a tie; -1 if none suits.
int select_kernel(int device_arch, int num_sms, Selection const& wanted);

}  // namespace fp4gemm
