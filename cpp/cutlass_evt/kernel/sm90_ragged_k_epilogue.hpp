// The epilogue of SM90's kernel of groups that are ragged in k: from the sums of a wgmma to copies of D by
// TMA.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass/array.h"
#include "cutlass_evt/epilogue/finish.hpp"
#include "cutlass_evt/kernel/sm90_ragged_k_config.hpp"
#include "cutlass_evt/load_after_wait.hpp"

namespace cutlass_evt {

/// The epilogue of one consumer warp, which has 16 rows of each tile of its CTA. Warps store them without
/// waiting for each other. Config is a Sm90RaggedKConfig.
template <class Config>
class Sm90RaggedKEpilogue {
 public:
  using Out = typename Config::Out;
  using Shared = typename Config::Shared;
  using Params = Sm90RaggedKParams;
  using Tile = Sm90RaggedKTile;
  using WorkItem = typename Config::WorkItem;

  CUTLASS_DEVICE Sm90RaggedKEpilogue(Params const& p, Shared& shared)
      : p_(p),
        shared_(shared),
        warp_(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        slot_(0) {}

  /// Writes the work item of a tile. All lanes of the publisher call this; each writes a part.
  CUTLASS_DEVICE static void write_item(Params const& p, Tile const& tile, int steps, WorkItem& item) {
    float const alpha = epilogue::alpha_of(p.epilogue, tile.group);
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      copy(p.epilogue, RowVector(v), tile.group, tile.row, p.m, item.per_row[v]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumColumnVectors; ++v) {
      copy(p.epilogue, ColumnVector(v), tile.group, tile.column, p.n, item.per_column[v]);
    }
    if (threadIdx.x % 32 == 0) {
      item.alpha = alpha;
      item.tile = tile;
      item.steps = steps;
    }
  }

  /// Stores this warp's rows of a tile. Accumulators are the sums of one thread in the register layout of an
  /// m64 wgmma.
  template <class Accumulators>
  CUTLASS_DEVICE void store(WorkItem const& item, Accumulators const& accumulators) {
    // The usual product has code of its own, since the instructions of the epilogue bound products of small
    // k, and those that skip absent terms are among them.
    if (p_.epilogue.has_factors_alone()) {
      store<false>(item, accumulators);
    } else {
      store<true>(item, accumulators);
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

  /// The warp's first row within a tile.
  CUTLASS_DEVICE int first_row() const { return warp_ * 16; }

  /// to[i] = element first + i of the vector V of a group, for i < Count. Beyond its `size` elements, and
  /// where a factor is absent, it is absent(V). All lanes of a warp call this; each copies a part.
  template <int Count, class V>
  CUTLASS_DEVICE static void copy(EpilogueArguments const& args, V v, int group, int first, int size,
                                  float (&to)[Count]) {
    if (is_addend(v) && !args.has(v)) {
      return;
    }
    EpilogueVector const& vector = args.vector(v);
    int const lane = static_cast<int>(threadIdx.x % 32);
    int const present = vector.data == nullptr ? 0 : size - first - lane;
    float const* const from =
        vector.data + group * vector.group_stride + (vector.is_vector ? first + lane : 0);
    int const step = vector.is_vector ? 32 : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count / 32; ++i) {
      to[lane + i * 32] = i * 32 < present ? load_after_wait(from + i * step) : absent(v);
    }
  }

  /// kHasTerms: false if the call has_factors_alone().
  template <bool kHasTerms, class Accumulators>
  CUTLASS_DEVICE void store(WorkItem const& item, Accumulators const& accumulators) {
    Tile const tile = item.tile;
    int const row = tile.row + first_row();
    float const alpha = item.alpha;
    float per_row[kNumRowVectors][2];  // of this lane's two rows
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        per_row[v][i] = item.per_row[v][first_row() + lane_ / 4 + i * 8];
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kSlices; ++slice) {
      float z[kSums];
      finish<kHasTerms>(item, tile, slice, alpha, per_row, accumulators, z);
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
        if (row < p_.m && column < p_.n) {
          cute::SM90_TMA_STORE_3D::copy(&p_.d, to, column, row, tile.group);
        }
        cute::tma_store_arrive();
      }
      slot_ = slot_ + 1 == Config::kSlots ? 0 : slot_ + 1;
    }
  }

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
        packed[i] = epilogue::cast_two<Out>(z[2 * i], z[2 * i + 1]);
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

  /// z = this thread's elements of D in a slice, as fp32. kHasTerms is that of store().
  template <bool kHasTerms, class Accumulators>
  CUTLASS_DEVICE void finish(WorkItem const& item, Tile const& tile, int slice, float alpha,
                             float const (&per_row)[kNumRowVectors][2], Accumulators const& accumulators,
                             float (&z)[kSums]) const {
    using Pair = cutlass::AlignedArray<Out, 2>;
    EpilogueArguments const& args = p_.epilogue;
    int const first = slice * Config::kSliceColumns + lane_ % 4 * 2;  // column within the tile
    Pair c[kSums / 2];
    if (kHasTerms && args.c != nullptr) {
      int const row = tile.row + first_row() + lane_ / 4;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums / 2; ++i) {
        int const of_row = row + i % 2 * 8;
        int const column = tile.column + first + i / 2 * 8;
        Pair const* const at =
            reinterpret_cast<Pair const*>(static_cast<Out const*>(args.c) +
                                          (int64_t{tile.group} * p_.m + of_row) * args.c_row_stride + column);
        // A plain load: C may be D, which the read-only path must not see.
        c[i] = of_row < p_.m && column < p_.n ? *at : Pair{};
      }
    }
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSums; ++i) {
      z[i] = accumulators(slice * kSums + i);
    }
    // Of each block of 8 columns a lane has two columns of two rows.
    auto const row = [&](RowVector v, int i) { return per_row[v][i % 4 / 2]; };
    auto const column = [&](ColumnVector v, int i) {
      float2 const pair = *reinterpret_cast<float2 const*>(item.per_column[v] + first + i / 4 * 8);
      return i % 2 == 0 ? pair.x : pair.y;
    };
    if constexpr (kHasTerms) {
      epilogue::finish<kSums>(args, alpha, z, row, column,
                              [&](int i) { return static_cast<float>(c[i / 2][i % 2]); });
    } else {
      epilogue::scale<kSums>(alpha, z, row, column);
    }
  }

  Params const& p_;
  Shared& shared_;
  int warp_;
  int lane_;
  int slot_;  // that is written next
};

}  // namespace cutlass_evt
