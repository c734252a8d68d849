// The evaluator of policies, one model for each kind of operands that a kernel reads.
#include "cost.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cutlass_evt/kernel/mixed_input_plan.hpp"
#include "figures.hpp"
#include "quantize/sizes.hpp"

namespace fp4gemm {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Bytes for each element of an operand: what the formats have, and what a conversion reads and writes.
constexpr double kNvfp4Bytes = 0.5625;  // a code and its part of a block scale
constexpr double kFp16Bytes = 2;
// Elements of MXFP8 are about twice as long as those of NVFP4, to which the figures of a policy with FP4
// tensor cores belong, and an SM multiplies half as many in a clock, also where B is MXFP4.
constexpr double kMxfp8Share = 2;
constexpr double kDecodeBytes = kNvfp4Bytes + kFp16Bytes;
constexpr double kPrepackBytes = 2 * kNvfp4Bytes;

/// True for a grouped GEMM whose groups differ in k.
bool is_ragged_k(Selection const& wanted) {
  return wanted.num_groups > 0 && wanted.ragged == FP4GEMM_RAGGED_K;
}

/// The matrices of B. Groups that are ragged in k have parts of one matrix.
double num_matrices(Selection const& wanted) {
  return is_ragged_k(wanted) ? 1 : std::max(1, wanted.num_groups);
}

/// The groups that have tokens, at most: a group without tokens reads no weights.
double most_groups_with_tokens(Selection const& wanted) {
  return std::min(num_matrices(wanted), static_cast<double>(std::max<int64_t>(1, wanted.m)));
}

// ---- device memory ----

/// The least time in which the SMs read the weights of a problem once.
double weight_clocks(Policy const& policy, int num_sms, Selection const& wanted) {
  if (policy.weight_bytes_per_clock == 0) {
    return 0;
  }
  return most_groups_with_tokens(wanted) * static_cast<double>(wanted.n) * static_cast<double>(wanted.k) *
         kNvfp4Bytes * (wanted.format_b == FP4GEMM_FORMAT_MXFP8 ? kMxfp8Share : 1) /
         (policy.weight_bytes_per_clock * num_sms);
}

/// The time of work that overlaps with reading the weights, except for the part `exposed`. Among kernels that
/// reach the bound of the memory, the one with the least other work then is the cheapest.
double overlapped(double work, double weights, double exposed) {
  return std::max(work, weights) + exposed * work;
}

/// The time of converting the operands to what the kernel reads.
double conversion_clocks(ConversionPolicy const& policy, Operands operands, int num_sms,
                         Selection const& wanted) {
  double const k = static_cast<double>(wanted.k);
  double const elements_a = static_cast<double>(wanted.m) * k;
  double const elements_b = num_matrices(wanted) * static_cast<double>(wanted.n) * k;
  bool const quantized_b = wanted.format_b == FP4GEMM_FORMAT_NVFP4;
  double bytes = 0;
  int launches = 0;
  if (operands != Operands::kNvfp4 && wanted.format_a == FP4GEMM_FORMAT_NVFP4) {
    bytes += elements_a * kDecodeBytes;
    launches = 1;
  }
  if (operands == Operands::kFp16 && quantized_b) {
    bytes += elements_b * kDecodeBytes;
    launches = 1;  // one launch decodes both operands
  } else if (is_prepacked(operands) && quantized_b) {
    bytes += elements_b * kPrepackBytes;
    ++launches;
  }
  return launches == 0 ? 0 : launches * policy.clocks_per_launch + bytes / (policy.bytes_per_clock * num_sms);
}

// ---- kernels that compute tiles in waves ----

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

/// The time of the tiles without the bound of device memory. All groups are assumed to be equal.
double tile_clocks(TilePolicy const& policy, Kernel const& row, int num_sms, Selection const& wanted) {
  fp4gemm_kernel_info_t const& kernel = row.info;
  int64_t const groups = std::max(1, wanted.num_groups);
  bool const ragged_k = is_ragged_k(wanted);
  int64_t const m = ragged_k ? wanted.m : ceil_div(wanted.m, groups);  // of one group
  double const k = static_cast<double>(ragged_k ? ceil_div(wanted.k, groups) : wanted.k);

  Orientation const size = oriented(kernel, m, wanted.n);
  int const sms_per_tile = size.tile_m == policy.two_sm_tile_m ? 2 : 1;
  int const tiles_per_cluster = size.cluster_m * size.cluster_n / sms_per_tile;

  // Whole clusters are launched, so tiles come in multiples of the cluster.
  int64_t const tiles_m = ceil_div(size.m, size.tile_m);
  int64_t const tiles_n = ceil_div(size.n, size.tile_n);
  int64_t const clusters =
      groups * ceil_div(tiles_m, size.cluster_m / sms_per_tile) * ceil_div(tiles_n, size.cluster_n);
  int64_t const concurrent = std::max(1, num_sms / (sms_per_tile * tiles_per_cluster));
  double const waves = static_cast<double>(ceil_div(clusters, concurrent));

  // Each SM loads its own rows of A and its part of the B tile that the cluster shares. A cluster that is
  // mostly outside D shares nothing.
  int const sharing = tiles_m * sms_per_tile >= size.cluster_m ? size.cluster_m : 1;
  double const rows = static_cast<double>(size.tile_m) / sms_per_tile;
  double const macs = rows * size.tile_n;
  double const bytes =
      (rows / size.cluster_n + static_cast<double>(size.tile_n) / sharing) * policy.bytes_per_element;
  bool const multiplies_e4m3 = row.operands == Operands::kMxfp8 || row.operands == Operands::kMxfp8Mxfp4;
  double const clocks_per_k = std::max(macs / policy.macs_per_clock, bytes / policy.bytes_per_clock) *
                              (multiplies_e4m3 ? kMxfp8Share : 1);
  return waves * (k * clocks_per_k + policy.clocks_per_tile);
}

// ---- kernels that read packed operands without FP4 tensor cores ----

double packed_clocks(Policy const& policy, fp4gemm_kernel_info_t const& kernel, int num_sms,
                     Selection const& wanted) {
  double const tiles =
      static_cast<double>(ceil_div(wanted.m, kernel.tile_m) * ceil_div(wanted.n, kernel.tile_n));
  if (tiles > INT32_MAX) {
    return kInfinity;  // more than a grid can have
  }
  double const clocks_per_element = std::max(
      policy.packed.clocks, policy.packed.base_clocks + policy.packed.clocks_per_token * kernel.tile_m);
  // Several CTAs share an SM, so the number of waves is not rounded up.
  double const waves = std::max(1.0, tiles / num_sms);
  return waves * kernel.tile_n * static_cast<double>(wanted.k) * clocks_per_element +
         policy.tiles.clocks_per_tile;
}

// ---- kernels on prepacked weights ----

/// The tokens of a problem as tiles of a kernel, and what a tile costs. Times are in a unit that the model
/// chooses; a product advances by `depth` equal pieces of k.
struct TokenTiles {
  double groups;      // with tokens
  double of_a_group;  // tiles along the tokens, on average
  double depth;
  double piece;          // the time of one piece of a tile, on average
  double longest_piece;  // at least this, for a worker that has whole tiles
  bool can_split;        // tiles along k, if that pays
};

/// Times of a launch, in the same unit.
struct LaunchTimes {
  double clocks_per_unit;
  double fixed, split, tile;  // as MeasuredFigures has them
  int ctas_per_sm;
  double shared;        // by which a piece takes longer where CTAs share an SM
  double shared_split;  // in addition to `split`, there
  double room;
};

/// From the measured figures of a kernel, in microseconds. A piece is 64 of k.
///
/// Where there are groups, the result is an average over groups from fewer to more tokens. If tokens draw
/// their group at random, some groups have no token, and the standard deviation of the sizes is sqrt(mean),
/// which groups from mean - sqrt(3 * mean) to mean + sqrt(3 * mean) have too. Routers are less even than
/// that: here sizes differ from the mean by up to sqrt(5 * mean), between a quarter and half of the mean.
TokenTiles measured_tiles(MeasuredFigures const& figures, fp4gemm_kernel_info_t const& kernel,
                          Selection const& wanted) {
  bool const differ = wanted.num_groups > 1;
  double const groups =
      differ ? std::max(1.0, wanted.num_groups *
                                 (1 - std::exp(-static_cast<double>(wanted.m) / wanted.num_groups)))
             : 1.0;
  double const mean = static_cast<double>(wanted.m) / groups;
  int const sizes = differ ? 8 : 1;
  double const most_difference = std::clamp(std::sqrt(5 / mean), 0.25, 0.5);  // relative
  TokenTiles all{groups, 0, static_cast<double>(ceil_div(wanted.k, 64)), 0, 0, true};
  for (int i = 0; i < sizes; ++i) {
    double const share = differ ? 1 + most_difference * ((2 * i + 1.0) / sizes - 1) : 1.0;
    int64_t const tokens = std::max<int64_t>(1, std::llround(mean * share));
    int64_t const whole = (tokens - 1) / kernel.tile_m;
    double const last_us = figures.chunk_us_of(tokens - whole * kernel.tile_m);
    all.of_a_group += static_cast<double>(whole + 1);
    all.piece += static_cast<double>(whole) * figures.chunk_us + last_us;
    all.longest_piece = std::max(all.longest_piece, whole > 0 ? figures.chunk_us : last_us);
  }
  all.piece /= all.of_a_group;
  all.of_a_group /= sizes;
  return all;
}

LaunchTimes measured_launch(MeasuredFigures const& figures, PrepackedPolicy const& policy) {
  return {policy.clocks_per_us,   figures.fixed_us,    figures.split_us,
          figures.tile_us,        figures.ctas_per_sm, figures.shared_chunk_us / figures.chunk_us,
          policy.shared_split_us, policy.room_us};
}

/// From the sizes of a tile, in clocks: the tensor cores, the decoding of the weights and the traffic from
/// L2. A piece is an element of k. All groups are assumed to be equal, and tiles of groups to be whole along
/// k.
TokenTiles derived_tiles(DerivedPolicy const& policy, Kernel const& row, Selection const& wanted) {
  fp4gemm_kernel_info_t const& kernel = row.info;
  double const groups = most_groups_with_tokens(wanted);
  double const m = std::ceil(static_cast<double>(wanted.m) / groups);  // of a group
  // A tile multiplies all of its tokens, or half of them where no more are present.
  double const tokens = m <= kernel.tile_m / 2 && kernel.tile_m > 8 ? kernel.tile_m / 2 : kernel.tile_m;
  double const rows = kernel.tile_n;
  double const decoded =
      row.operands == Operands::kPrepackedBf16 ? policy.decoded_bf16_per_clock : policy.decoded_per_clock;
  double const piece = std::max(rows * (tokens / policy.macs_per_clock + 1 / decoded),
                                (rows * kNvfp4Bytes + tokens * kFp16Bytes) / policy.bytes_per_clock);
  return {groups, std::ceil(m / kernel.tile_m), static_cast<double>(wanted.k), piece,
          0,      wanted.num_groups == 0};
}

LaunchTimes derived_launch(DerivedPolicy const& policy) {
  return {1.0, policy.fixed_clocks, policy.split_clocks, policy.tile_clocks, 1, 1, 0, 0};
}

/// How a kernel divides its tiles among the workers, by the rule of its plan, for expected numbers of tiles.
struct Schedule {
  double waves;    // of whole tiles
  bool splits;     // tiles along k (stream-K)
  double turns;    // tiles that the busiest worker computes, or parts of tiles
  double sharing;  // workers that have work
};

Schedule schedule_of(fp4gemm_kernel_info_t const& kernel, double tiles, double workers, int64_t k,
                     bool can_split) {
  using namespace cutlass_evt;
  double const waves = std::ceil(tiles / workers);
  double const steps = static_cast<double>(ceil_div(k, kernel.tile_k));
  double const sharing = std::min(workers, std::floor(tiles * steps / least_split_steps(kernel.tile_k)));
  double const least_saved = least_saved_steps(kernel.tile_m, kernel.tile_n, kernel.tile_k);
  if (can_split && splitting_pays<double>(tiles, steps, waves, workers, sharing, least_saved)) {
    return {waves, true, longest_part(tiles * steps, sharing) / steps, sharing};
  }
  return {waves, false, waves, std::min(tiles, workers)};
}

double prepacked_clocks(Policy const& policy, Kernel const& row, int num_sms, Selection const& wanted) {
  fp4gemm_kernel_info_t const& kernel = row.info;
  PrepackedPolicy const& prepacked = policy.prepacked;
  bool const is_measured = row.figures != nullptr;
  TokenTiles const tokens = is_measured ? measured_tiles(*row.figures, kernel, wanted)
                                        : derived_tiles(prepacked.derived, row, wanted);
  LaunchTimes const launch =
      is_measured ? measured_launch(*row.figures, prepacked) : derived_launch(prepacked.derived);

  int64_t const row_tiles = ceil_div(wanted.n, int64_t{kernel.tile_n} * kernel.cluster_n);
  double const tiles = tokens.groups * tokens.of_a_group * static_cast<double>(row_tiles);
  int const ctas = cutlass_evt::ctas_on_an_sm(
      row_tiles, cutlass_evt::most_token_tiles(wanted.m, wanted.num_groups, kernel.tile_m), num_sms,
      launch.ctas_per_sm);
  bool const shared = ctas > 1;
  double const workers = std::max(1, num_sms / kernel.cluster_n * ctas);
  Schedule const schedule =
      schedule_of(kernel, tiles, workers, wanted.k, tokens.can_split && !wanted.batch_invariant);

  double const piece = tokens.piece * (shared ? launch.shared : 1);
  double const least = schedule.splits ? 0 : tokens.longest_piece;
  double const work = std::max(schedule.turns * piece, least) * tokens.depth;
  double const weights = weight_clocks(policy, num_sms, wanted) / launch.clocks_per_unit;
  double const split = schedule.splits ? launch.split + (shared ? launch.shared_split : 0) : 0;
  double const room = schedule.sharing * kernel.cluster_n * 2 <= num_sms ? launch.room : 0;
  return (launch.fixed - room + split + overlapped(work, weights, prepacked.exposed) +
          (schedule.waves - 1) * launch.tile) *
         launch.clocks_per_unit;
}

}  // namespace

double estimate_clocks(Policy const& policy, Kernel const& kernel, int num_sms, Selection const& wanted) {
  if (is_prepacked(kernel.operands)) {
    if (policy.has_fp4 && wanted.format_a == FP4GEMM_FORMAT_NVFP4 &&
        wanted.format_b == FP4GEMM_FORMAT_NVFP4) {
      return kInfinity;  // FP4 tensor cores need no conversion
    }
    return prepacked_clocks(policy, kernel, num_sms, wanted) +
           conversion_clocks(policy.conversions, kernel.operands, num_sms, wanted);
  }
  if (kernel.operands == Operands::kNvfp4 && !policy.has_fp4) {
    return packed_clocks(policy, kernel.info, num_sms, wanted);
  }
  double const work = tile_clocks(policy.tiles, kernel, num_sms, wanted);
  return overlapped(work, weight_clocks(policy, num_sms, wanted), policy.tiles.exposed) +
         conversion_clocks(policy.conversions, kernel.operands, num_sms, wanted);
}

}  // namespace fp4gemm
