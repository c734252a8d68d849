// SM90's kernels of groups that are ragged in k, as the grouped kernels of the table launch them.
#pragma once

#include "kernel.hpp"

namespace fp4gemm::sm90 {

/// Launches cutlass_evt/kernel/sm90_ragged_k.hpp for a grouped GEMM that is ragged in k, with D of the type
/// Out, CTA tiles of kRows x kColumns and clusters of kCluster CTAs along the rows. It needs no workspace.
/// `name` is that of the kernel in the table, for errors. Instantiated for the tiles of sm90/kernels.cuh.
template <class Out, int kRows, int kColumns, int kCluster>
fp4gemm_status_t launch_ragged_k(char const* name, Problem const& p, fp4gemm_stream_t stream);

}  // namespace fp4gemm::sm90
