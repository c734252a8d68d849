// The launchers of the kernels for mixtures of experts. Arguments have been checked; the device is current.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

constexpr int kMaxExperts = 2048;   // so that the counters of a CTA fit in its shared memory
constexpr int kMaxRouteWarps = 32;  // of a CTA
constexpr int kMaxRouteSteps = 8;   // slots that a thread holds in registers
constexpr int kCombineStep = 8;     // d is a multiple of it: a thread has 8 neighbouring columns

/// How the slots of all tokens are shared out to CTAs, and these to warps. Each warp has consecutive slots.
struct RoutePlan {
  int counting_warps;  // of a CTA, each with counters of its own for all experts
  int threads;         // of a CTA; at least 32 * counting_warps
  int steps;           // slots of each thread of a counting warp
  int ctas;

  int slots() const { return counting_warps * 32 * steps; }  // of a CTA

  /// The counts of every CTA, (ctas, num_experts); a single CTA needs none.
  int64_t workspace_bytes(int num_experts) const {
    return ctas > 1 ? int64_t{ctas} * num_experts * static_cast<int64_t>(sizeof(int)) : 0;
  }
};

RoutePlan route_plan(int64_t num_slots, int num_experts);

fp4gemm_status_t launch_route(fp4gemm_route_args_t const& args, DeviceProperties const& properties,
                              void* workspace, fp4gemm_stream_t stream);

fp4gemm_status_t launch_combine(fp4gemm_combine_args_t const& args, DeviceProperties const& properties,
                                fp4gemm_stream_t stream);

fp4gemm_status_t launch_zero_outside_groups(int64_t m, int64_t row_bytes, void* x, int32_t const* offs,
                                            int num_groups, DeviceProperties const& properties,
                                            fp4gemm_stream_t stream);

}  // namespace fp4gemm
