// The cost model of SM120's kernels on prepacked weights. Its figures follow from published peaks and from
// counting instructions (bench/notes/sm120_decode.md); this project has measured none of them.
#include "sm120/prepacked_cost.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cost.hpp"
#include "cutlass_evt/kernel/sm90_nvfp4_plan.hpp"

namespace fp4gemm::sm120 {
namespace {

// For each SM and clock. The device memory and the rate of fp16 with fp32 sums are those of an RTX 5090 (170
// SMs, 2.41 GHz, 1792 GB/s, 209.5 TFLOP/s). An RTX PRO 6000 multiplies twice as fast; a DGX Spark reads half
// as fast.
constexpr double kMemoryBytes = 4.4;
constexpr double kMacs = 256;
constexpr double kL2Bytes = 32;  // of weights and tokens together
constexpr double kDecoded = 56;  // weights to fp16; see the table of instructions
constexpr double kDecodedToBf16 = 34;
// The part of the work on a tile that does not overlap with reading the weights.
constexpr double kExposed = 0.2;

constexpr double kWeightBytes = 0.5625;  // an element
constexpr double kTokenBytes = 2;

constexpr double kFixedClocks = 4000;    // of a launch: its start, the first loads and the last epilogue
constexpr double kSplitClocks = 3000;    // of the exchange of sums between CTAs
constexpr double kTileClocks = 1500;     // of each further tile of a CTA: its epilogue
constexpr double kConvertClocks = 5000;  // of one more launch
constexpr double kDecodeBytes = 2.5625;  // an element of A: NVFP4 in, fp16 out
constexpr double kPrepackBytes = 1.125;  // an element of B: NVFP4 in, prepacked out

/// The matrices of B. Groups that are ragged in k have parts of one matrix.
double num_matrices(Selection const& wanted) {
  return is_ragged_k(wanted) ? 1 : std::max(1, wanted.num_groups);
}

/// The groups that have tokens, at most.
double num_groups(Selection const& wanted) {
  return std::min(num_matrices(wanted), static_cast<double>(std::max<int64_t>(1, wanted.m)));
}

}  // namespace

double weight_clocks(int num_sms, Selection const& wanted) {
  // A group without tokens reads no weights.
  return num_groups(wanted) * static_cast<double>(wanted.n) * static_cast<double>(wanted.k) * kWeightBytes /
         (kMemoryBytes * num_sms);
}

double prepacked_clocks(Kernel const& row, int num_sms, Selection const& wanted) {
  using namespace cutlass_evt;
  if (wanted.format_a == FP4GEMM_FORMAT_NVFP4 && wanted.format_b == FP4GEMM_FORMAT_NVFP4) {
    return std::numeric_limits<double>::infinity();  // FP4 tensor cores need no conversion
  }
  fp4gemm_kernel_info_t const& kernel = row.info;
  double const k = static_cast<double>(wanted.k);
  double const groups = num_groups(wanted);
  double const m = std::ceil(static_cast<double>(wanted.m) / groups);  // of a group
  double const token_tiles = std::ceil(m / kernel.tile_m);
  double const tiles = groups * token_tiles * static_cast<double>(divide_up(wanted.n, kernel.tile_n));

  // The rule of Sm90Nvfp4Plan.
  double const steps = static_cast<double>(divide_up(wanted.k, kernel.tile_k));
  double const workers = num_sms;
  double const waves = std::ceil(tiles / workers);
  double const sharing = std::min(workers, std::floor(tiles * steps / least_split_steps(kernel.tile_k)));
  double const least_saved = least_saved_steps(kernel.tile_m, kernel.tile_n, kernel.tile_k);
  bool const splits = !wanted.batch_invariant && wanted.num_groups == 0 &&
                      splitting_pays<double>(tiles, steps, waves, workers, sharing, least_saved);
  double const turns = splits ? longest_part(tiles * steps, sharing) / steps : waves;

  // A tile multiplies all of its tokens, or half of them where no more are present.
  double const tokens = m <= kernel.tile_m / 2 && kernel.tile_m > 8 ? kernel.tile_m / 2 : kernel.tile_m;
  double const rows = kernel.tile_n;
  double const decoded = row.operands == Operands::kPrepackedBf16 ? kDecodedToBf16 : kDecoded;
  double const clocks_per_k = std::max(rows * (tokens / kMacs + 1 / decoded),
                                       (rows * kWeightBytes + tokens * kTokenBytes) / kL2Bytes);
  double const work = turns * k * clocks_per_k;
  double const clocks = std::max(work, weight_clocks(num_sms, wanted)) + kExposed * work;

  double bytes = 0;
  int launches = 0;
  if (wanted.format_a == FP4GEMM_FORMAT_NVFP4) {
    bytes += static_cast<double>(wanted.m) * k * kDecodeBytes;
    ++launches;
  }
  if (wanted.format_b == FP4GEMM_FORMAT_NVFP4) {
    bytes += num_matrices(wanted) * static_cast<double>(wanted.n) * k * kPrepackBytes;
    ++launches;
  }
  return clocks + kFixedClocks + (splits ? kSplitClocks : 0) + (waves - 1) * kTileClocks +
         launches * kConvertClocks + bytes / (kMemoryBytes * num_sms);
}

}  // namespace fp4gemm::sm120
