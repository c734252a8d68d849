// The limits of a CUDA grid, and launches over more CTAs than one grid holds.
#pragma once

#include <algorithm>
#include <cstdint>

#include "error.hpp"

namespace fp4gemm {

constexpr int64_t kMaxGridX = INT32_MAX;
constexpr int64_t kMaxGridY = 65535;

/// Refuses a one-dimensional grid that is longer than a launch may be; the kernel's index arithmetic assumes
/// a single launch.
inline fp4gemm_status_t check_grid(char const* kernel, int64_t ctas) {
  FP4GEMM_CHECK(ctas <= kMaxGridX, "%s: the tensor needs %lld CTAs, must be at most %lld", kernel,
                static_cast<long long>(ctas), static_cast<long long>(kMaxGridX));
  return FP4GEMM_SUCCESS;
}

/// Divides [0, total) into consecutive parts of at most `most` and calls launch(first, count) for each. A
/// kernel whose CTAs along a grid dimension may exceed its limit is launched once per part and adds `first`
/// to its CTA index.
template <class Launch>
void for_grid_parts(int64_t total, int64_t most, Launch const& launch) {
  for (int64_t first = 0; first < total; first += most) {
    launch(first, static_cast<unsigned>(std::min(total - first, most)));
  }
}

}  // namespace fp4gemm
