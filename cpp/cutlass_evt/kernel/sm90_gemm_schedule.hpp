// The schedules of SM90's GEMM: which tile a cluster computes at which turn. A warp that needs tiles has a
// schedule object, and all of its lanes call find() together, with ascending indices.
#pragma once

#include "cute/numeric/math.hpp"
#include "cutlass_evt/kernel/sm90_gemm_config.hpp"
#include "cutlass_evt/load_after_wait.hpp"

namespace cutlass_evt {

/// Sets the row and the column, in tiles of a cluster, of tile number `index` of a product with so many
/// tiles. Tiles are ordered in bands of kBandTiles rows of tiles; within a band the row advances first.
template <int kBandTiles>
CUTLASS_DEVICE void sm90_gemm_place(int index, int row_tiles, int column_tiles, int* row_tile,
                                    int* column_tile) {
  int const in_band = kBandTiles * column_tiles;
  int const band = index / in_band;
  int const rows = cute::min(kBandTiles, row_tiles - band * kBandTiles);
  int const in_this = index - band * in_band;
  *column_tile = in_this / rows;
  *row_tile = band * kBandTiles + in_this - *column_tile * rows;
}

/// The sum of `mine` over the lanes of the warp up to this one.
CUTLASS_DEVICE int sm90_gemm_sum_up_to_lane(int mine) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  CUTLASS_PRAGMA_UNROLL
  for (int distance = 1; distance < 32; distance *= 2) {
    int const other = __shfl_up_sync(0xFFFFFFFFu, mine, distance);
    mine += lane >= distance ? other : 0;
  }
  return mine;
}

/// The schedule of a dense product and of groups that are ragged in m. Group g has the rows offs[g-1] to
/// offs[g] of A; a dense product is one group of all rows. Ends that are out of order or out of range are an
/// error of the caller that is not reported: they are clamped, so that every access stays within the
/// operands.
template <class Config>
class Sm90RaggedMSchedule {
 public:
  CUTLASS_DEVICE Sm90RaggedMSchedule(Sm90GemmParams const& p, int rank) : p_(p), rank_(rank) { load(); }

  /// Sets *tile to that of this CTA at a turn; false: there are no further tiles.
  CUTLASS_DEVICE bool find(int64_t index, Sm90GemmTile* tile) {
    int64_t in_groups = index - before_;  // counted from the first tile of group first_
    for (;;) {
      int64_t const all = int64_t{__shfl_sync(0xFFFFFFFFu, up_to_, 31)} * p_.column_tiles;
      if (in_groups < all) {
        break;
      }
      if (first_ + 32 >= p_.num_groups) {
        return false;
      }
      in_groups -= all;
      before_ += all;
      first_ += 32;
      load();
    }
    // The first lane whose group, or one before it, has the tile.
    int const lane = __ffs(__ballot_sync(0xFFFFFFFFu, int64_t{up_to_} * p_.column_tiles > in_groups)) - 1;
    int const row_tiles = __shfl_sync(0xFFFFFFFFu, row_tiles_, lane);
    int const tiles_before = __shfl_sync(0xFFFFFFFFu, up_to_, lane) - row_tiles;
    int const begin = __shfl_sync(0xFFFFFFFFu, begin_, lane);
    int const end = __shfl_sync(0xFFFFFFFFu, end_, lane);
    int row_tile, column_tile;
    sm90_gemm_place<Config::kBandTiles>(static_cast<int>(in_groups - int64_t{tiles_before} * p_.column_tiles),
                                        row_tiles, p_.column_tiles, &row_tile, &column_tile);
    tile->group = first_ + lane;
    tile->matrix = tile->group;
    tile->plane = 0;
    tile->row = begin + (row_tile * Config::kCluster + rank_) * Config::kRows;
    tile->column = column_tile * Config::kColumns;
    tile->end = end;
    tile->first_step = 0;
    tile->steps = p_.steps;
    return true;
  }

 private:
  /// Loads the ends of the 32 groups from first_ on, one by each lane.
  CUTLASS_DEVICE void load() {
    int const group = first_ + static_cast<int>(threadIdx.x % 32);
    bool const exists = group < p_.num_groups;
    if (p_.offs == nullptr) {
      begin_ = 0;
      end_ = exists ? p_.m : 0;
    } else {
      begin_ = exists && group > 0 ? clamp(load_after_wait(p_.offs + group - 1)) : 0;
      end_ = exists ? cute::max(begin_, clamp(load_after_wait(p_.offs + group))) : begin_;
    }
    constexpr int kClusterRows = Config::kRows * Config::kCluster;
    row_tiles_ = (end_ - begin_ + kClusterRows - 1) / kClusterRows;
    up_to_ = sm90_gemm_sum_up_to_lane(row_tiles_);
  }

  CUTLASS_DEVICE int clamp(int end) const { return cute::min(cute::max(end, 0), p_.m); }

  Sm90GemmParams const& p_;
  int rank_;
  int first_ = 0;       // the group of lane 0
  int64_t before_ = 0;  // the tiles of all groups before it
  int begin_, end_;     // the rows of this lane's group
  int row_tiles_;       // of this lane's group
  int up_to_;           // row tiles of the groups from first_ to this lane's
};

/// The schedule of groups that are ragged in k. The columns of a group in A and B begin at a multiple of
/// group_steps steps; those between its end and the end of its last step are zero. Ends that are out of order
/// or out of range are an error of the caller that is not reported: a group for which there is no room is
/// empty, so that every access stays within the operands.
template <class Config>
class Sm90RaggedKSchedule {
 public:
  CUTLASS_DEVICE Sm90RaggedKSchedule(Sm90GemmParams const& p, int rank) : p_(p), rank_(rank) { load(); }

  /// As that of Sm90RaggedMSchedule.
  CUTLASS_DEVICE bool find(int64_t index, Sm90GemmTile* tile) {
    int const tiles_each = p_.row_tiles * p_.column_tiles;
    if (index >= int64_t{tiles_each} * p_.num_groups) {
      return false;
    }
    int const group = static_cast<int>(index) / tiles_each;
    while (group >= first_ + 32) {
      before_ += __shfl_sync(0xFFFFFFFFu, up_to_, 31);
      first_ += 32;
      load();
    }
    int const lane = group - first_;
    int const steps = __shfl_sync(0xFFFFFFFFu, steps_, lane);
    int64_t const begin = before_ + (lane > 0 ? __shfl_sync(0xFFFFFFFFu, up_to_, lane - 1) : 0);
    bool const fits = begin + steps <= p_.steps;
    int row_tile, column_tile;
    sm90_gemm_place<Config::kBandTiles>(static_cast<int>(index) - group * tiles_each, p_.row_tiles,
                                        p_.column_tiles, &row_tile, &column_tile);
    tile->group = group;
    tile->matrix = 0;
    tile->plane = group;
    tile->row = (row_tile * Config::kCluster + rank_) * Config::kRows;
    tile->column = column_tile * Config::kColumns;
    tile->end = p_.m;
    tile->first_step = fits ? static_cast<int>(begin) : 0;
    tile->steps = fits ? steps : 0;
    return true;
  }

 private:
  /// Loads the sizes of the 32 groups from first_ on, one by each lane.
  CUTLASS_DEVICE void load() {
    int const group = first_ + static_cast<int>(threadIdx.x % 32);
    bool const exists = group < p_.num_groups;
    int const begin = exists && group > 0 ? cute::max(load_after_wait(p_.offs + group - 1), 0) : 0;
    int const end = exists ? cute::max(load_after_wait(p_.offs + group), 0) : 0;
    int const size = cute::max(end - begin, 0);
    steps_ = size / Config::kDepth + (size % Config::kDepth != 0 ? 1 : 0);
    int const parts = (steps_ + p_.group_steps - 1) / p_.group_steps;
    up_to_ = sm90_gemm_sum_up_to_lane(parts * p_.group_steps);
  }

  Sm90GemmParams const& p_;
  int rank_;
  int first_ = 0;       // the group of lane 0
  int64_t before_ = 0;  // the step at which it begins
  int steps_;           // of this lane's group
  int up_to_;           // from there to the step at which the group behind this lane's begins
};

}  // namespace cutlass_evt
