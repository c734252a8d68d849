// The cost model of tiles in waves.
#include "cost.hpp"

#include <algorithm>

namespace fp4gemm {
namespace {

/// The sizes of D, tile and cluster as a kernel sees them: for a swapped one the columns of D are rows.
struct Orientation {
  int64_t m, n;
  int tile_m, tile_n, cluster_m, cluster_n;
};

Orientation oriented(fp4gemm_kernel_info_t const& kernel, int64_t m, int64_t n) {
  if (kernel.is_swapped != 0) {
    return {n, m, kernel.tile_n, kernel.tile_m, kernel.cluster_n, kernel.cluster_m};
  }
  return {m, n, kernel.tile_m, kernel.tile_n, kernel.cluster_m, kernel.cluster_n};
}

}  // namespace

double tile_clocks(Machine const& machine, fp4gemm_kernel_info_t const& kernel, int num_sms,
                   Selection const& wanted) {
  int64_t const groups = std::max(1, wanted.num_groups);
  bool const ragged_k = is_ragged_k(wanted);
  int64_t const m = ragged_k ? wanted.m : divide_up(wanted.m, groups);  // of one group
  double const k = static_cast<double>(ragged_k ? divide_up(wanted.k, groups) : wanted.k);

  Orientation const size = oriented(kernel, m, wanted.n);
  int const sms_per_tile = size.tile_m == machine.two_sm_tile_m ? 2 : 1;
  int const tiles_per_cluster = size.cluster_m * size.cluster_n / sms_per_tile;

  // Whole clusters are launched, so tiles come in multiples of the cluster.
  int64_t const tiles_m = divide_up(size.m, size.tile_m);
  int64_t const tiles_n = divide_up(size.n, size.tile_n);
  int64_t const clusters =
      groups * divide_up(tiles_m, size.cluster_m / sms_per_tile) * divide_up(tiles_n, size.cluster_n);
  int64_t const concurrent = std::max(1, num_sms / (sms_per_tile * tiles_per_cluster));
  double const waves = static_cast<double>(divide_up(clusters, concurrent));

  // Each SM loads its own rows of A and its part of the B tile that the cluster shares. A cluster that is
  // mostly outside D shares nothing.
  int const sharing = tiles_m * sms_per_tile >= size.cluster_m ? size.cluster_m : 1;
  double const rows = static_cast<double>(size.tile_m) / sms_per_tile;
  double const macs = rows * size.tile_n;
  double const bytes =
      (rows / size.cluster_n + static_cast<double>(size.tile_n) / sharing) * machine.bytes_per_element;
  double const clocks_per_k = std::max(macs / machine.macs_per_clock, bytes / machine.bytes_per_clock);
  return waves * (k * clocks_per_k + machine.clocks_per_tile);
}

}  // namespace fp4gemm
