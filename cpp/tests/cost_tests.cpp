// Host tests of the evaluator of policies, on policies and kernels made up here. They need no kernel that was
// built: a build without CUDA runs them too.
#include "cost.hpp"

#include <cmath>
#include <limits>

#include "checks.hpp"
#include "figures.hpp"

namespace {

using namespace fp4gemm;

Kernel kernel_of(Operands operands, int tile_m, int tile_n, int tile_k) {
  Kernel kernel{};
  kernel.info.tile_m = tile_m;
  kernel.info.tile_n = tile_n;
  kernel.info.tile_k = tile_k;
  kernel.info.cluster_m = kernel.info.cluster_n = 1;
  kernel.operands = operands;
  return kernel;
}

Selection dense(int64_t m, int64_t n, int64_t k, fp4gemm_format_t a = FP4GEMM_FORMAT_NVFP4,
                fp4gemm_format_t b = FP4GEMM_FORMAT_NVFP4) {
  return {m, n, k, 0, FP4GEMM_RAGGED_M, FP4GEMM_BF16, a, b, false, false};
}

void check_clocks(char const* what, double got, double wanted) {
  CHECK(std::abs(got - wanted) <= 1e-12 * wanted, "%s: %.17g clocks, must be %.17g", what, got, wanted);
}

/// Tiles of 128x128, 1024 MACs a clock: 16 clocks for each of k, and 100 for the tile.
Policy tile_policy() {
  Policy policy;
  policy.has_fp4 = true;
  policy.tiles.macs_per_clock = 1024;
  policy.tiles.bytes_per_element = 0.5625;
  policy.tiles.bytes_per_clock = 1000;
  policy.tiles.clocks_per_tile = 100;
  policy.conversions.clocks_per_launch = 5000;
  policy.conversions.bytes_per_clock = 10;
  return policy;
}

void test_tiles() {
  Policy policy = tile_policy();
  Kernel const kernel = kernel_of(Operands::kNvfp4, 128, 128, 128);
  check_clocks("a wave", estimate_clocks(policy, kernel, 4, dense(256, 256, 512)), 512 * 16 + 100);
  check_clocks("two waves", estimate_clocks(policy, kernel, 3, dense(256, 256, 512)), 2 * (512 * 16 + 100));
  check_clocks("MXFP8, which takes twice as long",
               estimate_clocks(policy, kernel_of(Operands::kMxfp8, 128, 128, 128), 4,
                               dense(256, 256, 512, FP4GEMM_FORMAT_MXFP8, FP4GEMM_FORMAT_MXFP8)),
               2 * 512 * 16 + 100);
  Selection grouped = dense(512, 128, 512);
  grouped.num_groups = 4;  // of 128 rows
  check_clocks("groups", estimate_clocks(policy, kernel, 4, grouped), 512 * 16 + 100);
  grouped.ragged = FP4GEMM_RAGGED_K;  // each has all 512 rows and 128 of k
  check_clocks("groups along k", estimate_clocks(policy, kernel, 16, grouped), 128 * 16 + 100);
  policy.tiles.bytes_per_clock = 4.5;  // 256 rows and columns of 0.5625 bytes in 32 clocks
  check_clocks("traffic", estimate_clocks(policy, kernel, 4, dense(256, 256, 512)), 512 * 32 + 100);
  policy.tiles.two_sm_tile_m = 256;
  Kernel pair = kernel_of(Operands::kNvfp4, 256, 256, 128);
  pair.info.cluster_m = 2;  // each SM has 128 rows and loads half of the columns
  policy.tiles.bytes_per_clock = 1000;
  check_clocks("a pair of SMs", estimate_clocks(policy, pair, 4, dense(512, 256, 512)), 512 * 32 + 100);
}

/// No kernel is faster than the memory from which the weights are read; beside it, `exposed` of the work
/// counts.
void test_memory_bound() {
  Policy policy = tile_policy();
  policy.weight_bytes_per_clock = 0.5625;
  policy.tiles.exposed = 0.25;
  Kernel const kernel = kernel_of(Operands::kNvfp4, 128, 128, 128);
  double const work = 128 * 16 + 100;
  check_clocks("bound", estimate_clocks(policy, kernel, 4, dense(1, 512, 128)), 128 * 128 + 0.25 * work);
  Selection grouped = dense(1, 512, 128);
  grouped.num_groups = 2;  // one of them has a token
  check_clocks("groups", estimate_clocks(policy, kernel, 8, grouped), 64 * 128 + 0.25 * work);
  policy.weight_bytes_per_clock = 1e9;
  check_clocks("no bound", estimate_clocks(policy, kernel, 4, dense(1, 512, 128)), 1.25 * work);
}

/// One launch decodes both operands; prepacking is a launch more.
void test_conversions() {
  Policy policy = tile_policy();
  Kernel const fp16 = kernel_of(Operands::kFp16, 128, 128, 64);
  Selection const decoded = dense(128, 128, 512, FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_FP16);
  double const plain = estimate_clocks(policy, fp16, 1, decoded);
  check_clocks("none", plain, 512 * 16 + 100);
  check_clocks("both", estimate_clocks(policy, fp16, 1, dense(128, 128, 512)),
               plain + 5000 + 2 * 128 * 512 * 2.5625 / 10);
  policy.prepacked.derived.macs_per_clock = policy.prepacked.derived.decoded_per_clock = 1;
  policy.prepacked.derived.bytes_per_clock = 1;
  policy.prepacked.derived.fixed_clocks = 10;
  policy.has_fp4 = false;
  Kernel const prepacked = kernel_of(Operands::kPrepacked, 8, 64, 512);
  double const ready =
      estimate_clocks(policy, prepacked, 1, dense(8, 64, 512, FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_PREPACKED));
  check_clocks("derived", ready, 64 * (8 + 1) * 512 + 10);
  check_clocks("prepack", estimate_clocks(policy, prepacked, 1, dense(8, 64, 512, FP4GEMM_FORMAT_FP16)),
               ready + 5000 + 64 * 512 * 1.125 / 10);
  check_clocks("decode and prepack", estimate_clocks(policy, prepacked, 1, dense(8, 64, 512)),
               ready + 10000 + (8 * 512 * 2.5625 + 64 * 512 * 1.125) / 10);
  policy.has_fp4 = true;
  CHECK(std::isinf(estimate_clocks(policy, prepacked, 1, dense(8, 64, 512))),
        "two NVFP4 operands are converted although tensor cores multiply them");
}

/// Measured figures: tiles of few tokens, turns of a worker, CTAs that share an SM, and splitting along k.
void test_measured() {
  Policy policy;
  policy.prepacked.clocks_per_us = 1000;
  policy.prepacked.room_us = 0.5;
  policy.prepacked.shared_split_us = 0.25;
  MeasuredFigures figures{};
  figures.fixed_us = 2;
  figures.chunk_us = 0.5;
  figures.split_us = 1;
  figures.tile_us = 3;
  figures.ctas_per_sm = 2;
  figures.shared_chunk_us = 0.75;
  figures.small[0] = {16, 0.25};
  Kernel kernel = kernel_of(Operands::kPrepacked, 32, 128, 128);
  kernel.figures = &figures;
  auto const clocks = [&](int num_sms, int64_t m, int64_t n, int64_t k, bool invariant = false) {
    Selection wanted = dense(m, n, k, FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_PREPACKED);
    wanted.batch_invariant = invariant;
    return estimate_clocks(policy, kernel, num_sms, wanted);
  };
  check_clocks("a tile", clocks(1, 32, 128, 640), (2 + 10 * 0.5) * 1000);
  check_clocks("few tokens", clocks(1, 16, 128, 640), (2 + 10 * 0.25) * 1000);
  check_clocks("room", clocks(2, 32, 128, 640), (2 - 0.5 + 10 * 0.5) * 1000);
  check_clocks("shared", clocks(1, 32, 256, 640), (2 + 10 * 0.75) * 1000);
  check_clocks("turns", clocks(1, 32, 512, 640), (2 + 2 * 10 * 0.75 + 3) * 1000);
  // 2 of 4 SMs have a tile of 128 steps; 4 share the 256 steps, 64 each.
  check_clocks("split", clocks(4, 32, 256, 16384), (2 + 1 + 128 * 0.5) * 1000);
  check_clocks("not split", clocks(4, 32, 256, 16384, true), (2 - 0.5 + 256 * 0.5) * 1000);
  // 3 tiles, and 4 CTAs on 2 SMs: 4 share the 384 steps, 96 each.
  check_clocks("split and shared", clocks(2, 32, 384, 16384), (2 + 1 + 0.25 + 192 * 0.75) * 1000);
}

/// Estimates that differ by rounding alone tie.
void test_ties() {
  double const infinity = std::numeric_limits<double>::infinity();
  CHECK(!is_cheaper(0.3, 0.1 + 0.2) && 0.3 < 0.1 + 0.2, "rounding decides");
  CHECK(!is_cheaper(1, 1) && !is_cheaper(2, 1) && is_cheaper(1, 1 + 1e-9), "is_cheaper does not compare");
  CHECK(is_cheaper(1, infinity) && !is_cheaper(infinity, infinity), "an infinite estimate is cheaper");
}

}  // namespace

int main() {
  test_tiles();
  test_memory_bound();
  test_conversions();
  test_measured();
  test_ties();
  return report();
}
