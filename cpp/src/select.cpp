// The cost model behind the selection of a kernel.
#include "select.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>

#include "architecture.hpp"
#include "cutlass_evt/kernel/sm90_nvfp4_plan.hpp"
#include "sm90/measured.hpp"

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

constexpr double kClocksPerUs = 1755;  // of an H200 under load

constexpr Machine kSm90{2048, 2.0, 42, 1200};
constexpr Machine kSm100{16384, 0.5625, 80, 1500};

// SM90's kernels on packed operands (sm90/packed.cuh) take, for each element of B, the clocks of loading and
// unpacking it or those of the tokens' share in the work, which grows with the tile. Fitted to an H200.
constexpr double kPackedClocks = 0.058;
constexpr double kPackedBaseClocks = 0.025;
constexpr double kPackedClocksPerToken = 0.0025;

// What converting an operand takes.
constexpr double kConvertClocks = 5000;       // one more launch
constexpr double kDecodeBytes = 2.5625;       // an element: packed in, fp16 out
constexpr double kPrepackBytes = 1.125;       // an element: packed in, prepacked out
constexpr double kConvertBytesPerClock = 17;  // of device memory, for each multiprocessor

Machine const& machine_of(int kernel_arch) { return kernel_arch >= 100 ? kSm100 : kSm90; }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Clocks of making the operands what the kernel reads.
double conversion_clocks(Operands operands, int num_sms, Selection const& wanted) {
  bool const ragged_k = wanted.num_groups > 0 && wanted.ragged == FP4GEMM_RAGGED_K;
  double const k = static_cast<double>(wanted.k);
  double const elements_a = static_cast<double>(wanted.m) * k;
  double const elements_b =
      static_cast<double>(ragged_k ? 1 : std::max(1, wanted.num_groups)) * static_cast<double>(wanted.n) * k;
  bool const packed_b = wanted.format_b == FP4GEMM_FORMAT_NVFP4;
  double bytes = 0;
  int launches = 0;
  if (operands != Operands::kNvfp4 && wanted.format_a == FP4GEMM_FORMAT_NVFP4) {
    bytes += elements_a * kDecodeBytes;
    launches = 1;
  }
  if (operands == Operands::kFp16 && packed_b) {
    bytes += elements_b * kDecodeBytes;
    launches = 1;  // both in one
  } else if (is_prepacked(operands) && packed_b) {
    bytes += elements_b * kPrepackBytes;
    ++launches;
  }
  return launches * kConvertClocks + bytes / (kConvertBytesPerClock * num_sms);
}

/// Tiles of tokens of a group: how many, and what 64 of k of one of them take.
struct TokenTiles {
  double count;
  double chunk_us;    // on average
  double longest_us;  // at most
};

/// Of a group of `mean` tokens or, where groups differ, of groups from half of that to half as many again.
TokenTiles token_tiles(PrepackedFigures const& figures, double mean, bool differ) {
  int const sizes = differ ? 8 : 1;
  TokenTiles all{0, 0, 0};
  for (int i = 0; i < sizes; ++i) {
    double const share = differ ? 0.5 + (i + 0.5) / sizes : 1.0;
    int64_t const tokens = std::max<int64_t>(1, std::llround(mean * share));
    int64_t const whole = (tokens - 1) / figures.tile_m;
    double const last_us = figures.chunk_us_of(tokens - whole * figures.tile_m);
    all.count += static_cast<double>(whole + 1);
    all.chunk_us += static_cast<double>(whole) * figures.chunk_us + last_us;
    all.longest_us = std::max(all.longest_us, whole > 0 ? figures.chunk_us : last_us);
  }
  all.chunk_us /= all.count;
  all.count /= sizes;
  return all;
}

/// What a prepacked kernel takes, from its measured figures and the way in which it shares out its tiles.
double prepacked_clocks(Kernel const& row, int num_sms, Selection const& wanted) {
  fp4gemm_kernel_info_t const& kernel = row.info;
  PrepackedFigures const figures =
      prepacked_figures(kernel.tile_m, kernel.tile_n, kernel.tile_k, row.operands);
  // Of groups that draw their tokens, some have none.
  double const groups =
      wanted.num_groups > 1
          ? std::max(1.0,
                     wanted.num_groups * (1 - std::exp(-static_cast<double>(wanted.m) / wanted.num_groups)))
          : 1.0;
  double const row_tiles = static_cast<double>(ceil_div(wanted.n, int64_t{kernel.tile_n} * kernel.cluster_n));
  TokenTiles const a_group =
      token_tiles(figures, static_cast<double>(wanted.m) / groups, wanted.num_groups > 1);
  double const tiles = groups * a_group.count * row_tiles;
  // A multiprocessor, by several CTAs: as the launch decides, which knows the number of groups alone.
  int64_t const at_most = cutlass_evt::most_token_tiles(wanted.m, wanted.num_groups, kernel.tile_m);
  bool const shared = figures.ctas_per_sm > 1 && row_tiles * static_cast<double>(at_most) > num_sms;
  double const workers = std::max(1, num_sms / kernel.cluster_n * (shared ? figures.ctas_per_sm : 1));
  double const waves = std::ceil(tiles / workers);
  double const chunks = static_cast<double>(ceil_div(wanted.k, 64));
  // As Sm90Nvfp4Plan has it, for numbers of tiles that are expectations.
  using namespace cutlass_evt;
  double const steps = static_cast<double>(ceil_div(wanted.k, int64_t{kernel.tile_k}));
  double const sharing = std::min(workers, std::floor(tiles * steps / least_split_steps(kernel.tile_k)));
  double const longest = std::ceil(tiles * steps / std::max(1.0, sharing));
  bool const splits = !wanted.batch_invariant && tiles * 100 < waves * workers * (100 - kIdlePercent) &&
                      sharing > std::min(tiles, workers - 1) &&
                      longest * 100 <= waves * steps * (100 - kIdlePercent);
  double const turns = splits ? longest / steps : waves;
  double const a_turn = a_group.chunk_us * (shared ? figures.shared_chunk_us / figures.chunk_us : 1);
  double const least = splits ? 0 : a_group.longest_us;  // of a worker
  double const split_us = splits ? figures.split_us + (shared ? kSharedSplitUs : 0) : 0;
  double const us =
      figures.fixed_us + split_us + std::max(turns * a_turn, least) * chunks + (waves - 1) * figures.tile_us;
  return us * kClocksPerUs;
}

double packed_sm90_clocks(fp4gemm_kernel_info_t const& kernel, int num_sms, Selection const& wanted) {
  auto const [m, n, k] = std::tuple(wanted.m, wanted.n, wanted.k);
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

/// The sizes of D, tile and cluster as a kernel sees them.
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

// The rows for which a batch-invariant kernel is chosen, whatever their number is.
constexpr int64_t kInvariantRows = 256;

}  // namespace

bool suits(Kernel const& kernel, Selection const& wanted) {
  bool const ragged_k = wanted.num_groups > 0 && wanted.ragged == FP4GEMM_RAGGED_K;
  return kernel.info.out_dtype == wanted.out_dtype && kernel.is_gated == wanted.is_gated &&
         kernel.is_grouped == (wanted.num_groups > 0) &&
         takes(kernel.operands, wanted.format_a, wanted.format_b) &&
         !(ragged_k && is_prepacked(kernel.operands));
}

double estimate_clocks(Kernel const& row, int num_sms, Selection const& wanted) {
  fp4gemm_kernel_info_t const& kernel = row.info;
  if (kernel.arch == 90 && row.operands == Operands::kNvfp4) {
    return packed_sm90_clocks(kernel, num_sms, wanted);
  }
  if (is_prepacked(row.operands)) {
    return prepacked_clocks(row, num_sms, wanted) + conversion_clocks(row.operands, num_sms, wanted);
  }
  Machine const& machine = machine_of(kernel.arch);
  int64_t const groups = std::max(1, wanted.num_groups);
  bool const ragged_k = wanted.num_groups > 0 && wanted.ragged == FP4GEMM_RAGGED_K;
  int64_t const m = ragged_k ? wanted.m : ceil_div(wanted.m, groups);  // of one group
  double const k = static_cast<double>(ragged_k ? ceil_div(wanted.k, groups) : wanted.k);

  // In the kernel's own terms: a swapped one has the columns of D for rows.
  Orientation const size = oriented(kernel, m, wanted.n);
  int const sms_per_tile = kernel.arch >= 100 && size.tile_m == 256 ? 2 : 1;
  int const tiles_per_cluster = size.cluster_m * size.cluster_n / sms_per_tile;

  // Whole clusters are launched, so tiles come in multiples of the cluster.
  int64_t const tiles_m = ceil_div(size.m, size.tile_m);
  int64_t const tiles_n = ceil_div(size.n, size.tile_n);
  int64_t const clusters =
      groups * ceil_div(tiles_m, size.cluster_m / sms_per_tile) * ceil_div(tiles_n, size.cluster_n);
  int64_t const concurrent = std::max(1, num_sms / (sms_per_tile * tiles_per_cluster));
  double const waves = static_cast<double>(ceil_div(clusters, concurrent));

  // Each multiprocessor loads its own rows of A and, of the B tile that the cluster shares, its part. A
  // cluster that is mostly outside D shares nothing.
  int const sharing = tiles_m * sms_per_tile >= size.cluster_m ? size.cluster_m : 1;
  double const rows = static_cast<double>(size.tile_m) / sms_per_tile;
  double const macs = rows * size.tile_n;
  double const bytes =
      (rows / size.cluster_n + static_cast<double>(size.tile_n) / sharing) * machine.bytes_per_element;
  double const clocks_per_k = std::max(macs / machine.macs_per_clock, bytes / machine.bytes_per_clock);
  return waves * (k * clocks_per_k + machine.clocks_per_tile) +
         conversion_clocks(row.operands, num_sms, wanted);
}

int select_kernel(int device_arch, int num_sms, Selection const& asked) {
  Selection wanted = asked;
  if (wanted.batch_invariant) {
    wanted.m = kInvariantRows * std::max(1, wanted.num_groups);
  }
  int best = -1;
  double best_clocks = 0;
  int index = 0;
  Architecture const* const served = architecture_of(device_arch);
  for (Architecture const* const* arch = architectures(); *arch != nullptr; ++arch) {
    if (*arch != served) {
      index += (*arch)->num_kernels();
      continue;
    }
    for (KernelList const* const* list = served->lists; *list != nullptr; ++list) {
      for (int i = 0; i < (*list)->size; ++i, ++index) {
        Kernel const& kernel = (*list)->data[i];
        if (!suits(kernel, wanted)) {
          continue;
        }
        double const clocks = estimate_clocks(kernel, num_sms, wanted);
        if (best < 0 || clocks < best_clocks) {
          best = index;
          best_clocks = clocks;
        }
      }
    }
  }
  return best;
}

}  // namespace fp4gemm
