// The tile scheduler of the mixed-input kernel: which tiles, and which part of k of them,
// a worker computes, and where a tile of a grouped product lies.
#pragma once

#include "cute/numeric/math.hpp"
#include "cutlass/fast_math.h"
#include "cutlass_evt/kernel/mixed_input_dynamic_scheduler.hpp"
#include "cutlass_evt/kernel/mixed_input_plan.hpp"
#include "cutlass_evt/load_after_wait.hpp"
#include "cutlass_evt/mainloop/mixed_input.hpp"
#include "cutlass_evt/prefix_sum.hpp"

namespace cutlass_evt {

/// The work of one worker, which is a CTA or a cluster: an iterator over spans of the stages along k of
/// tiles. Tiles are numbered through the groups, those along the rows of a weight first. There are three
/// modes:
///   static    worker w computes the tiles w, w + active, w + 2 active, ...
///   stream-K  all stages of all tiles are one sequence, of which each worker computes one run
///   dynamic   a worker computes the tile of its number, then tiles whose numbers it fetches from a counter
struct MixedInputSchedule {
  MixedInputPlan plan;
  cutlass::FastDivmod steps;  // stages along k of one tile
  int worker;                 // negative: the CTA has no work
  int64_t next, end;  // in tiles or, for stream-K, in stages of the sequence; next < 0: to be resolved
  MixedInputDynamicScheduler dynamic;
  uint64_t requested;  // the request for the tile after the current one

  /// The stages begin .. end - 1 of one tile.
  struct Span {
    int tile;
    int begin, end;
  };

  /// cta is the index of the CTA or cluster in the grid. Worker numbers descend with it, for two reasons.
  /// The first part of a tile waits for the parts of the workers after it, which have lower CTA indices: the
  /// hardware starts CTAs in the order of their indices, which no CUDA rule promises, so those run or have
  /// run, and the wait ends. And CTAs without work are the last of the grid: they start on the SMs where the
  /// previous kernel ended last, and the next kernel, which starts there early, does not inherit the delay.
  ///
  /// The dynamic scheduler is ignored where every worker has one tile at most, and for stream-K.
  CUTLASS_DEVICE MixedInputSchedule(MixedInputPlan const& plan, cutlass::FastDivmod const& steps, int cta,
                                    MixedInputDynamicScheduler const& dynamic)
      : plan(plan),
        steps(steps),
        worker(plan.active - 1 - cta),
        next(0),
        end(0),
        dynamic{plan.split || plan.tiles == plan.active ? nullptr : dynamic.counter, dynamic.nonce},
        requested(0) {
    if (worker >= 0) {
      next = plan.split ? plan.first_step(worker) : worker;
      end = plan.split ? plan.first_step(worker + 1) : plan.tiles;
    }
  }

  /// One thread of the grid must call this before it calls get_next().
  CUTLASS_DEVICE void open() const {
    if (dynamic.counter != nullptr) {
      dynamic.open();
    }
  }

  /// The number of workers that have the further parts of the tile whose first part is `span`. They are the
  /// workers that follow this one.
  CUTLASS_DEVICE int num_other_parts(Span const& span) const {
    int64_t const tile_end = (int64_t{span.tile} + 1) * steps.divisor;
    int count = 0;
    while (span.end < steps.divisor && plan.first_step(worker + 1 + count) < tile_end) {
      ++count;
    }
    return count;
  }

  /// Whether the worker has stage `step` of any tile. Only a schedule that is not dynamic knows this.
  CUTLASS_DEVICE bool has_step(int step) const {
    if (!plan.split) {
      return true;
    }
    int tile, first;
    steps(tile, first, static_cast<int>(next));
    return (step >= first ? step - first : step + steps.divisor - first) < end - next;
  }

  /// Sets span to the next one and returns true, or returns false where there is none.
  CUTLASS_DEVICE bool get_next(Span& span) {
    // A worker makes one request with each tile, plan.tiles in all; the last of them end the workers' loops.
    if (dynamic.counter != nullptr && next < 0) {
      next = plan.active + dynamic.resolve(requested, plan.tiles);
    }
    if (next >= end) {
      return false;
    }
    if (plan.split) {
      steps(span.tile, span.begin, static_cast<int>(next));
      span.end = static_cast<int>(cute::min(int64_t{steps.divisor}, span.begin + (end - next)));
      next += span.end - span.begin;
      return true;
    }
    span = {static_cast<int>(next), 0, steps.divisor};
    if (dynamic.counter == nullptr) {
      next += plan.active;
    } else {
      next = -1;
      requested = dynamic.request();  // its latency is hidden by the loads of the current tile
    }
    return true;
  }
};

/// The groups of rows of X. A dense product has one group, and offs is null.
struct MixedInputGroupEnds {
  int m;
  int num_groups;
  int const* offs;  // (num_groups) cumulative ends, on the device
};

/// Finds the group and the rows of a tile. Config is a MixedInputConfig, which has the tile's tokens and the
/// size of the table.
template <class Config>
struct MixedInputGroups {
  using TileCoord = MixedInputTileCoord;
  using Rows = TileCoord::Rows;

  /// The rows of a group. Ends that are out of order or out of range are an error of the caller that is not
  /// reported; the clamps keep every row within X and D.
  CUTLASS_DEVICE static Rows rows_of(MixedInputGroupEnds const& p, int group) {
    int const begin = group > 0 ? cute::min(cute::max(load_after_wait(p.offs + group - 1), 0), p.m) : 0;
    int const end = cute::min(cute::max(load_after_wait(p.offs + group), 0), p.m);
    return {begin, cute::max(end - begin, 0)};
  }

  CUTLASS_DEVICE static int token_tiles(int tokens) {
    return (tokens + Config::kTokens - 1) / Config::kTokens;
  }

  /// Groups for each entry of the table: 1, or more where there are more groups than entries.
  CUTLASS_DEVICE static int groups_per_entry(MixedInputGroupEnds const& p) {
    return (p.num_groups + Config::kMaxTable - 1) / Config::kMaxTable;
  }

  /// table[i] = token tiles of all groups before entry i, and the last entry their number; every thread of
  /// the CTA must call this.
  ///
  /// Ends that are out of order can claim more tiles than the tokens have, more than 32 bits hold. The sums
  /// stop at what ascending ends can claim: so the table ascends, and its last entry times the row tiles fits
  /// in 32 bits, which the host checked for that number.
  CUTLASS_DEVICE static void fill_table(MixedInputGroupEnds const& p, int* table) {
    int const per_entry = groups_per_entry(p);
    int const entries = (p.num_groups + per_entry - 1) / per_entry;
    int* const warp_sums = table + Config::kMaxTable + 1;
    SaturatingAdd const add{static_cast<int>(most_token_tiles(p.m, p.num_groups, Config::kTokens))};
    int carry = 0;
    for (int base = 0; base < entries; base += Config::kThreads) {
      int const entry = base + static_cast<int>(threadIdx.x);
      int sum = 0;
      if (entry < entries) {
        for (int g = entry * per_entry; g < cute::min((entry + 1) * per_entry, p.num_groups); ++g) {
          sum = add(sum, token_tiles(rows_of(p, g).size));
        }
      }
      int total;
      int const up_to = inclusive_sum<Config::kThreads>(sum, warp_sums, &total, add);
      if (entry < entries) {
        table[entry + 1] = add(carry, up_to);
      }
      carry = add(carry, total);
    }
    if (threadIdx.x == 0) {
      table[0] = 0;
    }
    __syncthreads();  // the table is complete for every thread
  }

  /// Products whose tokens are quantized are always dense.
  CUTLASS_DEVICE static bool is_dense(MixedInputGroupEnds const& p) {
    return Config::kQuantizes || p.offs == nullptr;
  }

  /// The coordinate of a tile of a dense product.
  CUTLASS_DEVICE static TileCoord dense_tile_coord(MixedInputGroupEnds const& p,
                                                   cutlass::FastDivmod const& row_tiles, int tile) {
    int token_tile;
    TileCoord coord;
    if constexpr (Config::kTogether > 1) {
      int const all = Config::kTogether * row_tiles.divisor;
      int const first = tile / all * Config::kTogether;
      int const wide = cute::min(int{Config::kTogether}, token_tiles(p.m) - first);
      coord.row_tile = tile % all / wide;
      token_tile = first + tile % all % wide;
    } else {
      row_tiles(token_tile, coord.row_tile, tile);
    }
    coord.group = 0;
    coord.rows = {0, p.m};
    coord.token = token_tile * Config::kTokens;
    return coord;
  }

  /// The coordinate of a tile: a binary search in the table that fill_table made, then a walk through the
  /// groups of one entry.
  CUTLASS_DEVICE static TileCoord tile_coord(MixedInputGroupEnds const& p, int const* table,
                                             cutlass::FastDivmod const& row_tiles, int tile) {
    if (is_dense(p)) {
      return dense_tile_coord(p, row_tiles, tile);
    }
    int token_tile;
    TileCoord coord;
    row_tiles(token_tile, coord.row_tile, tile);
    int const per_entry = groups_per_entry(p);
    int low = 0;
    int high = (p.num_groups + per_entry - 1) / per_entry;
    while (high - low > 1) {  // table[low] <= token_tile < table[high]
      int const middle = (low + high) / 2;
      (table[middle] <= token_tile ? low : high) = middle;
    }
    coord.group = low * per_entry;
    int before = table[low];
    coord.rows = rows_of(p, coord.group);
    while (token_tile - before >= token_tiles(coord.rows.size) && coord.group + 1 < p.num_groups) {
      before += token_tiles(coord.rows.size);
      coord.rows = rows_of(p, ++coord.group);
    }
    coord.token = (token_tile - before) * Config::kTokens;
    return coord;
  }
};

}  // namespace cutlass_evt
