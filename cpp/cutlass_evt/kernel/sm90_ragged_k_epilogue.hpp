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

/// The device code; a warpgroup synchronises with no other. Config is a Sm90RaggedKConfig; Accumulators are
/// the sums of one thread in the register layout of an m64 wgmma.
template <class Config>
struct Sm90RaggedKEpilogue {
  using Out = typename Config::Out;
  using Shared = typename Config::Shared;
  using Params = Sm90RaggedKParams<Out>;
  using Tile = Sm90RaggedKTile;
  static constexpr int kBlocks = Config::kSliceColumns / 8;  // of 8 columns, in a slice
  static constexpr int kSums = kBlocks * 4;                  // of a thread, in a slice

  /// A barrier among the threads of a warpgroup: the named barriers from 1 on.
  CUTLASS_DEVICE static void sync(int warpgroup) {
    cutlass::arch::NamedBarrier::sync(128u, 1u + static_cast<uint32_t>(warpgroup));
  }

  /// Writes two neighbouring blocks of 8 columns of this warp's 16 rows to a slot: z holds four sums of each.
  CUTLASS_DEVICE static void put(char* slot, int block, float const* z) {
    uint32_t const lane = threadIdx.x % 32;
    uint32_t const warp_row = threadIdx.x % 128 / 32 * 16;
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
      uint32_t const row = warp_row + lane / 8 % 2 * 8 + lane % 8;
      uint32_t const piece = (static_cast<uint32_t>(block) + lane / 16) ^ lane % 8;
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to + row * 128 +
                                                                                            piece * 16),
                   "r"(packed[0]), "r"(packed[1]), "r"(packed[2]), "r"(packed[3])
                   : "memory");
    } else {
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t i = 0; i < 4; ++i) {
        uint32_t const row = warp_row + i % 2 * 8 + lane / 4;
        uint32_t const piece = ((static_cast<uint32_t>(block) + i / 2) * 2 + lane % 4 / 2) ^ lane / 4;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to + row * 128 + piece * 16 + lane % 2 * 8),
                     "f"(z[2 * i]), "f"(z[2 * i + 1])
                     : "memory");
      }
    }
  }

  /// The vectors of a tile, on their way from global memory: the factors of this thread's rows r and r + 8,
  /// and those and the biases of the columns that it copies for its warpgroup.
  struct Vectors {
    static constexpr int kEach = Config::kColumns / 128;
    float by_row[2];
    float by_column[kEach], bias[kEach];
    float alpha;

    CUTLASS_DEVICE Vectors(Params const& p, Tile const& tile, int first_row) {
      alpha = p.alpha_groups == nullptr ? p.alpha : __ldg(p.alpha_groups + tile.group);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        by_row[i] = p.alpha_row.at(tile.group, first_row + i * 8, first_row + i * 8 < p.m, 1.0f);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        int const column = tile.column + static_cast<int>(threadIdx.x % 128) + i * 128;
        by_column[i] = p.alpha_col.at(tile.group, column, column < p.n, 1.0f);
        bias[i] = p.bias.at(tile.group, column, column < p.n, nodes::kNoBias);
      }
    }

    /// Copies those of the columns to shared memory. The barriers of the last tile's slices have freed it.
    CUTLASS_DEVICE void share(Shared& shared, int warpgroup) const {
      int const thread = static_cast<int>(threadIdx.x % 128);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kEach; ++i) {
        shared.by_column[warpgroup][thread + i * 128] = by_column[i];
        shared.bias[warpgroup][thread + i * 128] = bias[i];
      }
    }
  };

  /// Stores the warpgroup's rows of a tile. A slot is written again when its last copy to D has read it.
  template <class Accumulators>
  CUTLASS_DEVICE static void store(Params const& p, Shared& shared, Tile const& tile, int warpgroup,
                                   Vectors const& vectors, int& slot, Accumulators const& accumulators) {
    int const thread = static_cast<int>(threadIdx.x % 128);
    int const first_row = tile.row + warpgroup * 64;
    vectors.share(shared, warpgroup);
    sync(warpgroup);
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      float z[kSums];
      finish(p, shared, tile, warpgroup, slice, vectors, accumulators, z);
      if (thread == 0) {
        cute::tma_store_wait<Config::kSlots - 1>();
      }
      sync(warpgroup);  // the slot is free
      char* const to = shared.slots[warpgroup][slot];
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; block += 2) {
        put(to, block, z + block * 4);
      }
      cute::tma_store_fence();
      sync(warpgroup);  // the slice is complete in shared memory
      int const column = tile.column + slice * Config::kSliceColumns;
      if (thread == 0) {
        if (first_row < p.m && column < p.n) {
          cute::SM90_TMA_STORE_3D::copy(&p.d, to, column, first_row, tile.group);
        }
        cute::tma_store_arrive();
      }
      slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
    }
  }

  /// z = this thread's elements of D in a slice, as fp32. The terms that a call lacks are skipped for the
  /// whole slice at once, since the arithmetic bounds products of small k.
  template <class Accumulators>
  CUTLASS_DEVICE static void finish(Params const& p, Shared const& shared, Tile const& tile, int warpgroup,
                                    int slice, Vectors const& vectors, Accumulators const& accumulators,
                                    float (&z)[kSums]) {
    using Pair = cutlass::AlignedArray<Out, 2>;
    nodes::multiply_rn<float> const multiply;
    nodes::add_rn<float> const add;
    int const thread = static_cast<int>(threadIdx.x % 128);
    int const row = tile.row + warpgroup * 64 + thread / 32 * 16 + thread % 32 / 4;
    int const first = slice * Config::kSliceColumns + thread % 4 * 2;  // column within the tile
    Pair c[kSums / 2];
    if (p.c != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums / 2; ++i) {
        int const of_row = row + i % 2 * 8;
        int const column = tile.column + first + i / 2 * 8;
        if (of_row < p.m && column < p.n) {
          // A plain load: C may be D, which the read-only path must not see.
          c[i] = *reinterpret_cast<Pair const*>(p.c + (int64_t{tile.group} * p.m + of_row) * p.c_row_stride +
                                                column);
        }
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int block = 0; block < kBlocks; ++block) {
      float2 const by_column =
          *reinterpret_cast<float2 const*>(shared.by_column[warpgroup] + first + block * 8);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 4; ++i) {  // the multiplications of nodes::scaled
        z[block * 4 + i] =
            multiply(vectors.alpha,
                     multiply(i % 2 == 0 ? by_column.x : by_column.y,
                              multiply(vectors.by_row[i / 2], accumulators(slice * kSums + block * 4 + i))));
      }
    }
    if (p.bias.data != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; ++block) {
        float2 const bias = *reinterpret_cast<float2 const*>(shared.bias[warpgroup] + first + block * 8);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 4; ++i) {
          z[block * 4 + i] = add(z[block * 4 + i], i % 2 == 0 ? bias.x : bias.y);
        }
      }
    }
    if (p.activation != Activation::kNone) {
      nodes::activate_all<kSums>(p.activation, z);
    }
    if (p.c != nullptr) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums; ++i) {
        z[i] = add(z[i], multiply(p.c_scale, static_cast<float>(c[i / 2][i % 2])));
      }
    }
  }
};

}  // namespace cutlass_evt
