// The cost model of a kernel whose time follows from its tiles: waves of tiles, each as long as the slower of
// its tensor-core work and its operand traffic. Architectures fill in their figures.
#pragma once

#include "kernel.hpp"
#include "select.hpp"

namespace fp4gemm {

/// Figures of one SM of an architecture.
struct Machine {
  double macs_per_clock;     // dense tensor-core rate on the operand type
  double bytes_per_element;  // of an operand, block scales included
  double bytes_per_clock;    // operand traffic from L2 that an SM sustains
  double clocks_per_tile;    // prologue and epilogue, which overlap with nothing
  int two_sm_tile_m;         // tiles of so many rows are shared by two SMs; 0: no tiles are
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// True for a grouped GEMM whose groups differ in k.
inline bool is_ragged_k(Selection const& wanted) {
  return wanted.num_groups > 0 && wanted.ragged == FP4GEMM_RAGGED_K;
}

/// The expected time of a kernel in clocks of one SM. The host does not know the sizes of groups: it assumes
/// that all are equal.
double tile_clocks(Machine const& machine, fp4gemm_kernel_info_t const& kernel, int num_sms,
                   Selection const& wanted);

}  // namespace fp4gemm
