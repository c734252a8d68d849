// How the tiles of a product on prepacked NVFP4 weights are shared out among workers. Needs neither CUTLASS
// nor a CUDA compiler, so that the selection and the host tests see what the kernel does.
#pragma once

#include <algorithm>
#include <cstdint>

namespace cutlass_evt {

/// Splitting pays where whole tiles would leave more than this part of the machine idle, and where the
/// longest part, in whole steps, is shorter by as much;
constexpr int kIdlePercent = 8;
/// ... and where a worker has at least this much of k, but for the lead.
constexpr int kLeastSplitDepth = 1024;

/// 1024 of k, or more where steps are longer.
constexpr int least_split_steps(int step_depth) { return (kLeastSplitDepth + step_depth - 1) / step_depth; }

/// Tiles of tokens of a product; of groups, whose sizes the host does not know, at most. num_groups 0: dense.
constexpr int64_t most_token_tiles(int64_t m, int num_groups, int tile_tokens) {
  return num_groups > 0 ? m / tile_tokens + num_groups : (m + tile_tokens - 1) / tile_tokens;
}

/// Of all steps, shared out evenly.
constexpr int64_t longest_part(int64_t all_steps, int64_t workers) {
  return (all_steps + workers - 1) / workers;
}

/// How the tiles are shared out among workers: CTAs, or clusters of them. Made on the host where the number
/// of tiles is known there, since a kernel would otherwise begin with divisions.
struct Sm90Nvfp4Plan {
  int tiles;
  int active;  // workers that have any
  bool split;  // a worker has a run of steps of k, all tiles' one after the other; else whole tiles in turn
  // tiles * steps / active, and the reciprocal of active, times 2^32
  int64_t quotient;
  int remainder;
  uint32_t reciprocal;
  // Where every tile has as many parts, that many, else 1. The first part, whose worker adds up the others',
  // is `lead` steps longer than they are: so their sums have arrived when it is done.
  int parts, lead;
  uint32_t parts_reciprocal;

  Sm90Nvfp4Plan() = default;

  /// steps: along k, of a tile, of which a worker that shares tiles has least_steps or more without the
  /// lead.
  constexpr Sm90Nvfp4Plan(int tiles, int steps, int num_workers, int least_steps, int lead_steps,
                          bool may_split)
      : tiles(tiles),
        active(std::min(tiles, num_workers)),
        split(false),
        quotient(0),
        remainder(0),
        reciprocal(0),
        parts(1),
        lead(0),
        parts_reciprocal(0) {
    int64_t const all_steps = int64_t{tiles} * steps;
    if (may_split && all_steps <= INT32_MAX) {
      int const waves = (tiles + num_workers - 1) / num_workers;
      // Each has at least one step: who adds parts up counts on everybody in between.
      int const most_workers = std::min(num_workers, static_cast<int>(all_steps) / least_steps);
      split = int64_t{tiles} * 100 < int64_t{waves} * num_workers * (100 - kIdlePercent) &&
              most_workers > std::min(tiles, num_workers - 1) &&
              longest_part(all_steps, most_workers) * 100 <= int64_t{waves} * steps * (100 - kIdlePercent);
      if (split) {
        // Equal parts of every tile, where they keep nearly as many busy: nobody then has two.
        int const whole = tiles * (most_workers / tiles);
        active = int64_t{whole} * 100 >= int64_t{most_workers} * (100 - kIdlePercent) ? whole : most_workers;
        if (active == whole) {
          parts = whole / tiles;
          lead = std::min(lead_steps, steps / (2 * parts));
        }
      }
    }
    parts_reciprocal = reciprocal_of(parts);
    int const divisor = std::max(active, 1);
    quotient = split ? static_cast<int>(all_steps) / divisor : 0;
    remainder = split ? static_cast<int>(all_steps) % divisor : 0;
    reciprocal = split ? reciprocal_of(divisor) : 0;
  }

  /// Of a worker's run, where tiles are split: tiles * steps * worker / active, and later by a part of the
  /// lead where a tile's second part begins or a further one. The products of the reciprocals are exact:
  /// fewer than 2^10 workers.
  constexpr int64_t first_step(int worker) const {
    int const product = remainder * worker;
    int const part = worker - parts * over(worker, parts_reciprocal);
    int const later = part > 0 ? over(lead * (parts - part), parts_reciprocal) : 0;
    return quotient * worker + over(product, reciprocal) + later;
  }

 private:
  static constexpr uint32_t reciprocal_of(int divisor) {
    return divisor > 1 ? 0xFFFFFFFFu / static_cast<uint32_t>(divisor) + 1 : 0;  // 0: of 1
  }

  static constexpr int over(int number, uint32_t reciprocal) {
    return reciprocal != 0 ? static_cast<int>(uint64_t{reciprocal} * static_cast<uint32_t>(number) >> 32)
                           : number;
  }
};

}  // namespace cutlass_evt
