// How the tiles of a product on prepacked NVFP4 weights are divided among workers. The header needs neither
// CUTLASS nor a CUDA compiler: the kernel selection and the host tests evaluate the plan that the kernel
// uses.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace cutlass_evt {

/// Stream-K is used where whole tiles would leave more than this part of the workers' time idle, and where
/// the longest part, in whole stages, is shorter by as much.
constexpr int kIdlePercent = 8;
/// A worker's part must have at least this extent along k, not counting the lead.
constexpr int kLeastSplitDepth = 1024;

/// kLeastSplitDepth in stages, rounded up.
constexpr int least_split_steps(int step_depth) { return (kLeastSplitDepth + step_depth - 1) / step_depth; }

/// Splitting must shorten the longest part by this extent along k. It is what the exchange of sums and the
/// further pieces of tiles cost, in time of the mainloop (H200; bench/notes/hopper_tried.md).
constexpr int least_saved_depth(int tile_tokens, int tile_rows) {
  return tile_rows > 64 ? 1024 : tile_tokens > 8 ? 2048 : 1088;
}

/// least_saved_depth in stages, rounded up.
constexpr int least_saved_steps(int tile_tokens, int tile_rows, int step_depth) {
  return (least_saved_depth(tile_tokens, tile_rows) + step_depth - 1) / step_depth;
}

/// The tiles along the tokens. For a grouped product, whose group sizes the host does not know, this is the
/// largest number that m tokens can have. num_groups is 0 for a dense product.
constexpr int64_t most_token_tiles(int64_t m, int num_groups, int tile_tokens) {
  return num_groups > 0 ? m / tile_tokens + num_groups : (m + tile_tokens - 1) / tile_tokens;
}

/// How many CTAs the launch puts on each SM: all that fit, where there are more tiles than SMs. Otherwise
/// one, which leaves room for the kernel that follows, so that it starts early.
constexpr int ctas_on_an_sm(int64_t row_tiles, int64_t token_tiles, int num_sms, int ctas_that_fit) {
  return row_tiles * token_tiles > num_sms ? ctas_that_fit : 1;
}

/// The stages of the longest part if all_steps are divided evenly.
constexpr int64_t longest_part(int64_t all_steps, int64_t workers) {
  return (all_steps + workers - 1) / workers;
}
inline double longest_part(double all_steps, double workers) { return std::ceil(all_steps / workers); }

/// Whether splitting tiles along k pays: `waves` turns of whole tiles would leave workers idle, more workers
/// (`sharing`) would share the steps than have whole tiles, and the longest part is shorter than those turns,
/// by least_saved steps at least. Number is an integer, or a floating-point type for expected numbers of
/// tiles; Wide holds products of two.
template <class Wide, class Number>
constexpr bool splitting_pays(Number tiles, Number steps, Number waves, Number workers, Number sharing,
                              Number least_saved) {
  Wide const whole = Wide{waves} * steps;
  return Wide{tiles} * 100 < Wide{waves} * workers * (100 - kIdlePercent) &&
         sharing > std::min(tiles, workers - 1) &&
         longest_part(Wide{tiles} * steps, Wide{sharing}) * 100 <= whole * (100 - kIdlePercent) &&
         longest_part(Wide{tiles} * steps, Wide{sharing}) + least_saved <= whole;
}

/// How tiles are divided among workers, which are CTAs or clusters. Each tile has the same number of stages
/// ("steps") along k. The host makes the plan where it knows the number of tiles, because its divisions would
/// otherwise delay the start of the kernel.
struct MixedInputPlan {
  int tiles;
  int active;  // workers that have work
  // True for stream-K: the stages of all tiles form one sequence, and each worker has one run of it.
  // Otherwise a worker has whole tiles.
  bool split;
  // tiles * steps divided by active, and 2^32 / active, rounded up
  int64_t quotient;
  int remainder;
  uint32_t reciprocal;
  // The parts of a tile where every tile has the same number (split-K), otherwise 1. The worker of the first
  // part sums all of them; its part is `lead` stages longer than the others, so that their sums have arrived
  // when it is done.
  int parts, lead;
  uint32_t parts_reciprocal;

  MixedInputPlan() = default;

  /// steps: stages along k of a tile. least_steps: stages that a part must have, not counting lead_steps.
  /// least_saved: stages by which splitting must shorten the longest part. may_split: false where the bits of
  /// D must not depend on the number of tiles.
  constexpr MixedInputPlan(int tiles, int steps, int num_workers, int least_steps, int least_saved,
                           int lead_steps, bool may_split)
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
      // Every worker gets at least one stage: the worker that sums a tile waits for each one between the
      // tile's first and last part.
      int const most_workers = std::min(num_workers, static_cast<int>(all_steps) / least_steps);
      split = splitting_pays<int64_t>(tiles, steps, waves, num_workers, most_workers, least_saved);
      if (split) {
        // Equal parts of every tile where that keeps nearly as many workers busy: no worker then has parts of
        // two tiles.
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

  /// Stream-K: the first stage of a worker's run, tiles * steps * worker / active rounded down. The lead
  /// moves it up where a second or further part of a tile begins. Fewer than 2^10 workers keep the products
  /// of the reciprocals exact.
  constexpr int64_t first_step(int worker) const {
    int const product = remainder * worker;
    int const part = worker - parts * over(worker, parts_reciprocal);
    int const later = part > 0 ? over(lead * (parts - part), parts_reciprocal) : 0;
    return quotient * worker + over(product, reciprocal) + later;
  }

 private:
  static constexpr uint32_t reciprocal_of(int divisor) {
    return divisor > 1 ? 0xFFFFFFFFu / static_cast<uint32_t>(divisor) + 1 : 0;  // 0 stands for 2^32
  }

  /// number / divisor for the divisor of that reciprocal.
  static constexpr int over(int number, uint32_t reciprocal) {
    return reciprocal != 0 ? static_cast<int>(uint64_t{reciprocal} * static_cast<uint32_t>(number) >> 32)
                           : number;
  }
};

}  // namespace cutlass_evt
