// The cost model behind the selection of a kernel.
#include "select.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "registry.hpp"

namespace fp4gemm {
namespace {

/// Figures of one architecture's multiprocessor. SM90's were fitted to an H200; SM100's follow from published
/// peaks and have not been measured by us.
struct Machine {
  double macs_per_clock;     // dense tensor-core rate on the operand type
  double bytes_per_element;  // of an operand, block scales included
  double bytes_per_clock;    // operand traffic from L2 that a multiprocessor sustains
  double clocks_per_tile;    // prologue and epilogue that nothing hides
};

constexpr Machine kSm90{2048, 2.0, 42, 1200};
constexpr Machine kSm100{16384, 0.5625, 80, 1500};

// SM90's kernels on packed operands (sm90/packed.cuh) take, for each element of B, the clocks of loading and
// unpacking it or those of the tokens' share in the work, which grows with the tile. Fitted to an H200.
constexpr double kPackedClocks = 0.058;
constexpr double kPackedBaseClocks = 0.025;
constexpr double kPackedClocksPerToken = 0.0025;

// What the other kernels need before they can start on packed operands.
constexpr double kDecodeClocks = 5000;       // one more launch
constexpr double kDecodeBytes = 2.5625;      // an element: packed in, fp16 out
constexpr double kDecodeBytesPerClock = 17;  // of device memory, for each multiprocessor

Machine const& machine_of(int kernel_arch) { return kernel_arch >= 100 ? kSm100 : kSm90; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

double packed_sm90_clocks(fp4gemm_kernel_info_t const& kernel, int num_sms, int64_t m, int64_t n, int64_t k) {
  double const tiles = static_cast<double>(ceil_div(m, kernel.tile_m) * ceil_div(n, kernel.tile_n));
  if (tiles > INT32_MAX) {
    return std::numeric_limits<double>::infinity();  // more than a grid can have
  }
  double const clocks_per_element =
      std::max(kPackedClocks, kPackedBaseClocks + kPackedClocksPerToken * kernel.tile_m);
  double const waves =
      std::max(1.0, tiles / num_sms);  // several tiles share a multiprocessor, so that no wave is rounded up
  return waves * kernel.tile_n * static_cast<double>(k) * clocks_per_element + kSm90.clocks_per_tile;
}

}  // namespace

bool serves(int kernel_arch, int device_arch) {
  switch (kernel_arch) {
    case 90: return device_arch == 90;
    case 100: return device_arch == 100 || device_arch == 103;
    default: return false;
  }
}

double estimate_clocks(Kernel const& row, int num_sms, int64_t m, int64_t n, int64_t k,
                       fp4gemm_format_t format) {
  fp4gemm_kernel_info_t const& kernel = row.info;
  if (kernel.arch == 90 && row.operand == FP4GEMM_FORMAT_NVFP4) {
    return packed_sm90_clocks(kernel, num_sms, m, n, k);
  }
  Machine const& machine = machine_of(kernel.arch);
  int const sms_per_tile = kernel.arch >= 100 && kernel.tile_m == 256 ? 2 : 1;
  int const tiles_per_cluster = kernel.cluster_m * kernel.cluster_n / sms_per_tile;

  // Whole clusters are launched, so tiles come in multiples of the cluster.
  int64_t const tiles_m = ceil_div(m, kernel.tile_m);
  int64_t const tiles_n = ceil_div(n, kernel.tile_n);
  int64_t const clusters =
      ceil_div(tiles_m, kernel.cluster_m / sms_per_tile) * ceil_div(tiles_n, kernel.cluster_n);
  int64_t const concurrent = std::max(1, num_sms / (sms_per_tile * tiles_per_cluster));
  double const waves = static_cast<double>(ceil_div(clusters, concurrent));

  // Each multiprocessor loads its own rows of A and, of the B tile that the cluster shares, its part. A
  // cluster that is mostly outside D shares nothing.
  int const sharing = tiles_m * sms_per_tile >= kernel.cluster_m ? kernel.cluster_m : 1;
  double const rows = static_cast<double>(kernel.tile_m) / sms_per_tile;
  double const macs = rows * kernel.tile_n;
  double const bytes =
      (rows / kernel.cluster_n + static_cast<double>(kernel.tile_n) / sharing) * machine.bytes_per_element;
  double const clocks_per_k = std::max(macs / machine.macs_per_clock, bytes / machine.bytes_per_clock);
  double clocks = waves * (static_cast<double>(k) * clocks_per_k + machine.clocks_per_tile);
  if (row.operand == FP4GEMM_FORMAT_FP16 && format == FP4GEMM_FORMAT_NVFP4) {
    double const elements = static_cast<double>(m + n) * static_cast<double>(k);
    clocks += kDecodeClocks + elements * kDecodeBytes / (kDecodeBytesPerClock * num_sms);
  }
  return clocks;
}

int select_kernel(int device_arch, int num_sms, int64_t m, int64_t n, int64_t k, fp4gemm_dtype_t out_dtype,
                  fp4gemm_format_t format) {
  int best = -1;
  double best_clocks = 0;
  int first = 0;  // index of the list's first kernel
  for (KernelList const* const* list = kernel_lists(); *list != nullptr; first += (*list)->size, ++list) {
    Kernel const* const kernels = (*list)->data;
    if (kernels[0].info.out_dtype != out_dtype || !serves(kernels[0].info.arch, device_arch)) {
      continue;
    }
    for (int i = 0; i < (*list)->size; ++i) {
      if (format == FP4GEMM_FORMAT_FP16 && kernels[i].operand != FP4GEMM_FORMAT_FP16) {
        continue;
      }
      double const clocks = estimate_clocks(kernels[i], num_sms, m, n, k, format);
      if (best < 0 || clocks < best_clocks) {
        best = first + i;
        best_clocks = clocks;
      }
    }
  }
  return best;
}

}  // namespace fp4gemm
