// Which tiles of a product on prepacked NVFP4 weights a CTA takes, and where the groups' tiles lie.
#pragma once

#include "cute/numeric/math.hpp"
#include "cutlass/fast_math.h"
#include "cutlass_evt/kernel/sm90_nvfp4_plan.hpp"
#include "cutlass_evt/kernel/sm90_nvfp4_tickets.hpp"
#include "cutlass_evt/mainloop/sm90_nvfp4.hpp"
#include "cutlass_evt/prefix_sum.hpp"

namespace cutlass_evt {

/// Which tiles a worker takes, and which steps of k of them. Tiles are counted through the groups, along the
/// rows of the weight first.
struct Sm90Nvfp4Schedule {
  Sm90Nvfp4Plan plan;
  cutlass::FastDivmod steps;  // along k, of a tile
  int worker;
  int64_t next, end;  // tiles or, where they are split, steps
  Sm90Nvfp4Tickets tickets;
  uint64_t ticket;  // of the tile after the one that was taken last

  struct Item {
    int tile;
    int begin, end;
  };

  /// Workers count down: a tile's first part, whose worker adds the others', belongs to a later CTA than they
  /// do, and the hardware starts CTAs in order. So nobody waits for one that cannot run. CTAs without work
  /// are the last ones: they start where the kernel before this one ended last, and the next kernel, which
  /// starts there early, does not inherit the delay.
  ///
  /// With tickets, workers that are given whole tiles, and not all tiles at once, draw those after their
  /// first.
  CUTLASS_DEVICE Sm90Nvfp4Schedule(Sm90Nvfp4Plan const& plan, cutlass::FastDivmod const& steps, int cta,
                                   Sm90Nvfp4Tickets const& tickets)
      : plan(plan),
        steps(steps),
        worker(plan.active - 1 - cta),
        next(0),
        end(0),
        tickets{plan.split || plan.tiles == plan.active ? nullptr : tickets.counter, tickets.nonce},
        ticket(0) {
    if (worker >= 0) {
      next = plan.split ? plan.first_step(worker) : worker;
      end = plan.split ? plan.first_step(worker + 1) : plan.tiles;
    }
  }

  /// One CTA calls it, before it takes anything.
  CUTLASS_DEVICE void open() const {
    if (tickets.counter != nullptr) {
      tickets.open();
    }
  }

  /// How many workers after this one, whose item is a tile's first part, have the tile's further parts.
  CUTLASS_DEVICE int others(Item const& item) const {
    int64_t const tile_end = (int64_t{item.tile} + 1) * steps.divisor;
    int count = 0;
    while (item.end < steps.divisor && plan.first_step(worker + 1 + count) < tile_end) {
      ++count;
    }
    return count;
  }

  CUTLASS_DEVICE bool take(Item& item) {
    if (tickets.counter != nullptr && next < 0) {
      next = plan.active + tickets.number(ticket, plan.tiles);
    }
    if (next >= end) {
      return false;
    }
    if (plan.split) {
      steps(item.tile, item.begin, static_cast<int>(next));
      item.end = static_cast<int>(cute::min(int64_t{steps.divisor}, item.begin + (end - next)));
      next += item.end - item.begin;
      return true;
    }
    item = {static_cast<int>(next), 0, steps.divisor};
    if (tickets.counter == nullptr) {
      next += plan.active;
    } else {
      next = -1;
      ticket = tickets.draw();  // which arrives while the tile is fetched
    }
    return true;
  }
};

/// The groups of rows of X; one group, offs null: a dense product.
struct Sm90Nvfp4GroupEnds {
  int m;
  int num_groups;
  int const* offs;  // (num_groups) cumulative ends, on the device
};

template <class Config>
struct Sm90Nvfp4Groups {
  using Place = Sm90Nvfp4Place;
  using Rows = Place::Rows;

  // Ends that are out of order or out of range would be an error of the caller; they must not lead outside of
  // the buffers.
  CUTLASS_DEVICE static Rows rows_of(Sm90Nvfp4GroupEnds const& p, int group) {
    int const begin = group > 0 ? cute::min(cute::max(__ldg(p.offs + group - 1), 0), p.m) : 0;
    int const end = cute::min(cute::max(__ldg(p.offs + group), 0), p.m);
    return {begin, cute::max(end - begin, 0)};
  }

  CUTLASS_DEVICE static int token_tiles(int tokens) {
    return (tokens + Config::kTokens - 1) / Config::kTokens;
  }

  /// One run of groups an entry of the table.
  CUTLASS_DEVICE static int groups_per_entry(Sm90Nvfp4GroupEnds const& p) {
    return (p.num_groups + Config::kMaxTable - 1) / Config::kMaxTable;
  }

  /// table[i] = token tiles of all groups before entry i, and the last entry their number; every thread of
  /// the CTA must call this.
  ///
  /// Ends that are out of order can claim more tiles than the tokens have, more than 32 bits hold. The sums
  /// stop at what ascending ends can claim: so the table ascends, and its last entry times the row tiles fits
  /// in 32 bits, which the host checked for that number.
  CUTLASS_DEVICE static void fill_table(Sm90Nvfp4GroupEnds const& p, int* table) {
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
    __syncthreads();
  }

  /// Of a dense product.
  CUTLASS_DEVICE static Place only_place_of(Sm90Nvfp4GroupEnds const& p, cutlass::FastDivmod const& row_tiles,
                                            int tile) {
    int token_tile;
    Place place;
    row_tiles(token_tile, place.row_tile, tile);
    place.group = 0;
    place.rows = {0, p.m};
    place.token = token_tile * Config::kTokens;
    return place;
  }

  CUTLASS_DEVICE static Place place_of(Sm90Nvfp4GroupEnds const& p, int const* table,
                                       cutlass::FastDivmod const& row_tiles, int tile) {
    if (p.offs == nullptr) {
      return only_place_of(p, row_tiles, tile);
    }
    int token_tile;
    Place place;
    row_tiles(token_tile, place.row_tile, tile);
    int const per_entry = groups_per_entry(p);
    int low = 0;
    int high = (p.num_groups + per_entry - 1) / per_entry;
    while (high - low > 1) {  // table[low] <= token_tile < table[high]
      int const middle = (low + high) / 2;
      (table[middle] <= token_tile ? low : high) = middle;
    }
    place.group = low * per_entry;
    int before = table[low];
    place.rows = rows_of(p, place.group);
    while (token_tile - before >= token_tiles(place.rows.size) && place.group + 1 < p.num_groups) {
      before += token_tiles(place.rows.size);
      place.rows = rows_of(p, ++place.group);
    }
    place.token = (token_tile - before) * Config::kTokens;
    return place;
  }
};

}  // namespace cutlass_evt
