// The cost model of SM90's kernels. Its figures were fitted to an H200.
#include "cost.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cutlass_evt/kernel/sm90_nvfp4_plan.hpp"
#include "sm90/arch.hpp"
#include "sm90/figures.hpp"

namespace fp4gemm::sm90 {
namespace {

constexpr Machine kMachine{2048, 2.0, 42, 1200, 0};

constexpr double kClocksPerUs = 1755;  // of an H200 under load

// The kernels on packed operands (sm90/packed.cuh) need, for each element of B, either the clocks of loading
// and decoding it or those of the work on the tile's tokens, whichever are more.
constexpr double kPackedClocks = 0.058;
constexpr double kPackedBaseClocks = 0.025;
constexpr double kPackedClocksPerToken = 0.0025;

// The time of converting an operand.
constexpr double kConvertClocks = 5000;       // one more launch
constexpr double kDecodeBytes = 2.5625;       // an element: NVFP4 in, fp16 out
constexpr double kPrepackBytes = 1.125;       // an element: NVFP4 in, prepacked out
constexpr double kConvertBytesPerClock = 17;  // of device memory, for each SM

// Splitting tiles along k costs more where CTAs share an SM: they do not advance alike.
constexpr double kSharedSplitUs = 1.0;

// A launch that leaves half of the SMs idle ends earlier by this: the next kernel starts on the others.
constexpr double kRoomUs = 0.8;

/// Clocks of converting the operands to what the kernel reads.
double conversion_clocks(Operands operands, int num_sms, Selection const& wanted) {
  double const k = static_cast<double>(wanted.k);
  double const elements_a = static_cast<double>(wanted.m) * k;
  double const elements_b = static_cast<double>(is_ragged_k(wanted) ? 1 : std::max(1, wanted.num_groups)) *
                            static_cast<double>(wanted.n) * k;
  bool const quantized_b = wanted.format_b == FP4GEMM_FORMAT_NVFP4;
  double bytes = 0;
  int launches = 0;
  if (operands != Operands::kNvfp4 && wanted.format_a == FP4GEMM_FORMAT_NVFP4) {
    bytes += elements_a * kDecodeBytes;
    launches = 1;
  }
  if (operands == Operands::kFp16 && quantized_b) {
    bytes += elements_b * kDecodeBytes;
    launches = 1;  // both in one
  } else if (is_prepacked(operands) && quantized_b) {
    bytes += elements_b * kPrepackBytes;
    ++launches;
  }
  return launches * kConvertClocks + bytes / (kConvertBytesPerClock * num_sms);
}

/// The tiles along the tokens of a group: how many there are, and the time of 64 of k of one of them.
struct TokenTiles {
  double count;
  double chunk_us;    // on average
  double longest_us;  // at most
};

/// The tiles of a group of `mean` tokens or, where groups differ, the average over groups from fewer to more
/// tokens. If tokens draw their group at random, the standard deviation of the sizes is sqrt(mean), which
/// groups from mean - sqrt(3 * mean) to mean + sqrt(3 * mean) have too. Routers are less even than that: here
/// sizes differ from the mean by up to sqrt(5 * mean), between a quarter and half of the mean.
TokenTiles token_tiles(MeasuredFigures const& figures, int tile_tokens, double mean, bool differ) {
  int const sizes = differ ? 8 : 1;
  double const most_difference = std::clamp(std::sqrt(5 / mean), 0.25, 0.5);  // relative
  TokenTiles all{0, 0, 0};
  for (int i = 0; i < sizes; ++i) {
    double const share = differ ? 1 + most_difference * ((2 * i + 1.0) / sizes - 1) : 1.0;
    int64_t const tokens = std::max<int64_t>(1, std::llround(mean * share));
    int64_t const whole = (tokens - 1) / tile_tokens;
    double const last_us = figures.chunk_us_of(tokens - whole * tile_tokens);
    all.count += static_cast<double>(whole + 1);
    all.chunk_us += static_cast<double>(whole) * figures.chunk_us + last_us;
    all.longest_us = std::max(all.longest_us, whole > 0 ? figures.chunk_us : last_us);
  }
  all.chunk_us /= all.count;
  all.count /= sizes;
  return all;
}

/// The time of a kernel on prepacked weights, from its measured figures and its schedule.
double prepacked_clocks(Kernel const& row, int num_sms, Selection const& wanted) {
  using namespace cutlass_evt;
  fp4gemm_kernel_info_t const& kernel = row.info;
  MeasuredFigures const& figures = *row.figures;
  // If tokens draw their group at random, some groups have no token.
  double const groups =
      wanted.num_groups > 1
          ? std::max(1.0,
                     wanted.num_groups * (1 - std::exp(-static_cast<double>(wanted.m) / wanted.num_groups)))
          : 1.0;
  int64_t const row_tiles = divide_up(wanted.n, int64_t{kernel.tile_n} * kernel.cluster_n);
  TokenTiles const a_group =
      token_tiles(figures, kernel.tile_m, static_cast<double>(wanted.m) / groups, wanted.num_groups > 1);
  double const tiles = groups * a_group.count * static_cast<double>(row_tiles);
  int const ctas = ctas_on_an_sm(row_tiles, most_token_tiles(wanted.m, wanted.num_groups, kernel.tile_m),
                                 num_sms, figures.ctas_per_sm);
  bool const shared = ctas > 1;
  double const workers = std::max(1, num_sms / kernel.cluster_n * ctas);
  double const waves = std::ceil(tiles / workers);
  double const chunks = static_cast<double>(divide_up(wanted.k, 64));
  // The rule of Sm90Nvfp4Plan, for expected numbers of tiles.
  double const steps = static_cast<double>(divide_up(wanted.k, kernel.tile_k));
  double const sharing = std::min(workers, std::floor(tiles * steps / least_split_steps(kernel.tile_k)));
  double const least_saved = least_saved_steps(kernel.tile_m, kernel.tile_n, kernel.tile_k);
  bool const splits =
      !wanted.batch_invariant && splitting_pays<double>(tiles, steps, waves, workers, sharing, least_saved);
  double const turns = splits ? longest_part(tiles * steps, sharing) / steps : waves;
  double const a_turn = a_group.chunk_us * (shared ? figures.shared_chunk_us / figures.chunk_us : 1);
  double const least = splits ? 0 : a_group.longest_us;  // of a worker
  double const split_us = splits ? figures.split_us + (shared ? kSharedSplitUs : 0) : 0;
  double const active = (splits ? sharing : std::min(tiles, workers)) * kernel.cluster_n;
  double const room_us = active * 2 <= num_sms ? kRoomUs : 0;
  double const us = figures.fixed_us - room_us + split_us + std::max(turns * a_turn, least) * chunks +
                    (waves - 1) * figures.tile_us;
  return us * kClocksPerUs;
}

/// The time of a kernel that reads both operands packed (sm90/packed.cuh).
double packed_clocks(fp4gemm_kernel_info_t const& kernel, int num_sms, Selection const& wanted) {
  double const tiles =
      static_cast<double>(divide_up(wanted.m, kernel.tile_m) * divide_up(wanted.n, kernel.tile_n));
  if (tiles > INT32_MAX) {
    return std::numeric_limits<double>::infinity();  // more than a grid can have
  }
  double const clocks_per_element =
      std::max(kPackedClocks, kPackedBaseClocks + kPackedClocksPerToken * kernel.tile_m);
  // Several CTAs share an SM, so the number of waves is not rounded up.
  double const waves = std::max(1.0, tiles / num_sms);
  return waves * kernel.tile_n * static_cast<double>(wanted.k) * clocks_per_element +
         kMachine.clocks_per_tile;
}

}  // namespace

double estimate_clocks(Kernel const& kernel, int num_sms, Selection const& wanted) {
  if (kernel.operands == Operands::kNvfp4) {
    return packed_clocks(kernel.info, num_sms, wanted);
  }
  double const clocks = is_prepacked(kernel.operands) ? prepacked_clocks(kernel, num_sms, wanted)
                                                      : tile_clocks(kMachine, kernel.info, num_sms, wanted);
  return clocks + conversion_clocks(kernel.operands, num_sms, wanted);
}

}  // namespace fp4gemm::sm90
