// The epilogue of SM90's kernel of groups that are ragged in k: from the sums of a wgmma to copies of D by
// TMA.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/array.h"
#include "cutlass_evt/epilogue/scaled.hpp"
#include "cutlass_evt/kernel/sm90_ragged_k_config.hpp"

namespace cutlass_evt {

/// Where a tile of this CTA lies.
struct Sm90RaggedKTile {
  int group, row, column;
};

/// The epilogue of one consumer warp, which has 16 rows of each tile of its CTA. Warps store them without
/// waiting for each other; those of a warpgroup meet once a tile. Config is a Sm90RaggedKConfig.
template <class Config>
class Sm90RaggedKEpilogue {
 public:
  using Out = typename Config::Out;
  using Shared = typename Config::Shared;
  using Params = Sm90RaggedKParams<Out>;
  using Tile = Sm90RaggedKTile;

  CUTLASS_DEVICE Sm90RaggedKEpilogue(Params const& p, Shared& shared)
      : p_(p),
        shared_(shared),
        warp_(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        slot_(0),
        turn_(0) {}

  /// The vectors of a tile, on their way from global memory: the factors of this thread's rows r and r + 8,
  /// and those and the biases of the columns that it copies for its warpgroup.
  struct Vectors {
    static constexpr int kEach = Config::kColumns / 128;
    float by_row[2];
    float by_column[kEach], bias[kEach];
    float alpha;
  };

  CUTLASS_DEVICE Vectors fetch(Tile const& tile) const {
    Vectors vectors;
    vectors.alpha = p_.alpha_groups == nullptr ? p_.alpha : __ldg(p_.alpha_groups + tile.group);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const row = first_row(tile) + lane_ / 4 + i * 8;
      vectors.by_row[i] = p_.alpha_row.at(tile.group, row, row < p_.m, 1.0f);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vectors::kEach; ++i) {
      int const column = tile.column + thread() + i * 128;
      vectors.by_column[i] = p_.alpha_col.at(tile.group, column, column < p_.n, 1.0f);
      vectors.bias[i] = p_.bias.at(tile.group, column, column < p_.n, nodes::kNoBias);
    }
    return vectors;
  }

  /// Stores this warp's rows of a tile. Accumulators are the sums of one thread in the register layout of an
  /// m64 wgmma.
  template <class Accumulators>
  CUTLASS_DEVICE void store(Tile const& tile, Vectors const& vectors, Accumulators const& accumulators) {
    float* const by_column = shared_.by_column[turn_][warp_ / 4];
    float* const bias = shared_.bias[turn_][warp_ / 4];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Vectors::kEach; ++i) {
      by_column[thread() + i * 128] = vectors.by_column[i];
      bias[thread() + i * 128] = vectors.bias[i];
    }
    // Named barriers from 1 on, one for each warpgroup: the vectors have been written. Those of the last tile
    // lie elsewhere, and every warp has read those of the tile before it.
    cutlass::arch::NamedBarrier::sync(128u, 1u + static_cast<uint32_t>(warp_) / 4);
    turn_ ^= 1;
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      float z[kSums];
      finish(tile, slice, vectors, by_column, bias, accumulators, z);
      char* const to = shared_.slots[warp_][slot_];
      if (lane_ == 0) {
        cute::tma_store_wait<Config::kSlots - 1>();  // the last copy from this slot has read it
      }
      __syncwarp();  // the slot is free for every lane
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; block += 2) {
        put(to, block, z + block * 4);
      }
      cute::tma_store_fence();  // makes this lane's writes visible to the copy
      __syncwarp();             // every lane has passed the fence
      if (lane_ == 0) {
        int const column = tile.column + slice * Config::kSliceColumns;
        if (first_row(tile) < p_.m && column < p_.n) {
          cute::SM90_TMA_STORE_3D::copy(&p_.d, to, column, first_row(tile), tile.group);
        }
        cute::tma_store_arrive();
      }
      slot_ = slot_ + 1 == Config::kSlots ? 0 : slot_ + 1;
    }
  }

  /// Must be called after the last tile: shared memory must outlive the copies.
  CUTLASS_DEVICE void wait() const {
    if (lane_ == 0) {
      cute::tma_store_wait<0>();
    }
  }

 private:
  static constexpr int kBlocks = Config::kSliceColumns / 8;  // of 8 columns, in a slice
  static constexpr int kSums = kBlocks * 4;                  // of a thread, in a slice

  CUTLASS_DEVICE static int thread() { return static_cast<int>(threadIdx.x % 128); }
  CUTLASS_DEVICE int first_row(Tile const& tile) const { return tile.row + warp_ * 16; }

  /// Writes two neighbouring blocks of 8 columns of the warp's 16 rows to a slot: z holds four sums of each.
  CUTLASS_DEVICE static void put(char* slot, int block, float const* z) {
    uint32_t const lane = threadIdx.x % 32;
    uint32_t const to = cute::cast_smem_ptr_to_uint(slot);
    if constexpr (sizeof(Out) == 2) {
      // stmatrix stores four matrices of 8 x 8: rows r and r + 8 of one block, then of the next. Each lane
      // gives the address of one row of one matrix, which the swizzle permutes by the row's number.
      uint32_t packed[4];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {
        cutlass::Array<float, 2> const from{z[2 * i], z[2 * i + 1]};
        auto const pair =
            cutlass::NumericArrayConverter<Out, float, 2, nodes::kRoundToNearest>::convert(from);
        packed[i] = reinterpret_cast<uint32_t const&>(pair);
      }
      uint32_t const row = lane / 8 % 2 * 8 + lane % 8;
      uint32_t const piece = (static_cast<uint32_t>(block) + lane / 16) ^ lane % 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + row * 128 +
                                                                                            piece * 16),
                   "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t const row = i % 2 * 8 + lane / 4;
        uint32_t const piece = ((static_cast<uint32_t>(block) + i / 2) * 2 + lane % 4 / 2) ^ lane / 4;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + row * 128 + piece * 16 + lane % 2 * 8),
                     "f"(z[2 * i]), "f"(z[2 * i + 1])
                     : "memory");
      }
    }
  }

  /// z = this thread's elements of D in a slice, as fp32. The terms that a call lacks are skipped for the
  /// whole slice at once, since the arithmetic bounds products of small k.
  template <class Accumulators>
  CUTLASS_DEVICE void finish(Tile const& tile, int slice, Vectors const& vectors, float const* by_column,
                             float const* bias, Accumulators const& accumulators, float (&z)[kSums]) const {
    using Pair = cutlass::AlignedArray<Out, 2>;
    nodes::multiply_rn<float> const multiply;
    nodes::add_rn<float> const add;
    int const row = first_row(tile) + lane_ / 4;
    int const first = slice * Config::kSliceColumns + lane_ % 4 * 2;  // column within the tile
    Pair c[kSums / 2];
    if (p_.c != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums / 2; ++i) {
        int const of_row = row + i % 2 * 8;
        int const column = tile.column + first + i / 2 * 8;
        Pair const* const at = reinterpret_cast<Pair const*>(
            p_.c + (int64_t{tile.group} * p_.m + of_row) * p_.c_row_stride + column);
        // A plain load: C may be D, which the read-only path must not see.
        c[i] = of_row < p_.m && column < p_.n ? *at : Pair{};
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      float2 const factors = *reinterpret_cast<float2 const*>(by_column + first + block * 8);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {  // the multiplications of nodes::scaled
        z[block * 4 + i] =
            multiply(vectors.alpha,
                     multiply(i % 2 == 0 ? factors.x : factors.y,
                              multiply(vectors.by_row[i / 2], accumulators(slice * kSums + block * 4 + i))));
      }
    }
    if (p_.bias.data != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        float2 const biases = *reinterpret_cast<float2 const*>(bias + first + block * 8);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          z[block * 4 + i] = add(z[block * 4 + i], i % 2 == 0 ? biases.x : biases.y);
        }
      }
    }
    if (p_.activation != Activation::kNone) {
      nodes::activate_all<kSums>(p_.activation, z);
    }
    if (p_.c != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        z[i] = add(z[i], multiply(p_.c_scale, static_cast<float>(c[i / 2][i % 2])));
      }
    }
  }

  Params const& p_;
  Shared& shared_;
  int warp_;
  int lane_;
  int slot_;  // that is written next
  int turn_;  // of the vectors' memory
};

}  // namespace cutlass_evt
