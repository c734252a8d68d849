// The epilogue of SM90's GEMM: from the sums of a wgmma to copies of D by TMA.
#pragma once

#include "cute/arch/copy_sm90_tma.hpp"
#include "cutlass_evt/epilogue/finish.hpp"
#include "cutlass_evt/kernel/sm90_gemm_config.hpp"
#include "cutlass_evt/load_after_wait.hpp"

namespace cutlass_evt {

/// The epilogue of one consumer warp, which has 16 rows of each tile of its CTA. Warps store them without
/// waiting for each other. Config is a Sm90GemmConfig.
///
/// A thread has the sums of two rows, r = lane / 4 and r + 8: in each block of 8 columns those of two
/// neighbouring columns, first of row r and then of row r + 8.
template <class Config>
class Sm90GemmEpilogue {
 public:
  using Shared = typename Config::Shared;
  using Params = Sm90GemmParams;
  using WorkItem = typename Config::WorkItem;

  CUTLASS_DEVICE Sm90GemmEpilogue(Params const& p, Shared& shared)
      : p_(p),
        args_(p.epilogue),
        shared_(shared),
        warp_(__shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0)),
        lane_(static_cast<int>(threadIdx.x % 32)),
        slot_(0) {}

  /// Writes the work item of a tile. All lanes of the publisher call this; each writes a part. The factors of
  /// an empty group that is ragged in k are left out: its D must not be NaN or -0.0 because of them.
  CUTLASS_DEVICE static void write_item(Params const& p, Sm90GemmTile const& tile, WorkItem& item) {
    bool const has_product = tile.steps > 0;
    float const alpha = has_product ? epilogue::alpha_of(p.epilogue, tile.group) : 1.0f;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      copy(p.epilogue, RowVector(v), has_product, tile.group, tile.row, tile.end, item.per_row[v]);
    }
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumColumnVectors; ++v) {
      copy(p.epilogue, ColumnVector(v), has_product, tile.group, tile.column, p.n, item.per_column[v]);
    }
    if (threadIdx.x % 32 == 0) {
      item.alpha = alpha;
      item.tile = tile;
    }
  }

  /// Stores this warp's rows of a tile. Accumulators are the sums of one thread in the register layout of an
  /// m64 wgmma.
  template <class Accumulators>
  CUTLASS_DEVICE void store(WorkItem const& item, Accumulators const& accumulators) {
    int const row = item.tile.row + first_row();
    int const present = item.tile.end - row;  // rows of this warp, and those behind them
    if (present <= 0) {
      return;
    }
    Place const place{item.tile.plane, row, item.tile.column, present};
    // A product with factors alone has code of its own, since the instructions of the epilogue bound products
    // of small k, and those that skip absent terms are among them.
    bool const has_terms = !args_.has_factors_alone();
    if (args_.output == OutputType::kFp32) {
      has_terms ? store_columns<4, true>(item, place, accumulators)
                : store_columns<4, false>(item, place, accumulators);
    } else if (is_gated(args_.activation)) {
      store_pairs(item, place, accumulators);
    } else {
      has_terms ? store_columns<2, true>(item, place, accumulators)
                : store_columns<2, false>(item, place, accumulators);
    }
  }

  /// Must be called after the last tile: shared memory must outlive the copies.
  CUTLASS_DEVICE void wait() const {
    if (lane_ == 0) {
      cute::tma_store_wait<0>();
    }
  }

 protected:
  static constexpr int kPieces = Config::kSliceRowBytes / 16;  // of 16 bytes, in a row of a slice

  /// Where the rows of this warp lie.
  struct Place {
    int plane;
    int row;      // the first, in the plane
    int column;   // the first of the tile, of the product
    int present;  // rows from the first to the end of the group; may be more than the warp's
  };

  /// The warp's first row within a tile.
  CUTLASS_DEVICE int first_row() const { return warp_ * 16; }

  /// to[i] = element first + i of the vector V of a group, for i < Count. Beyond its `size` elements, and
  /// where a factor is absent or left out, it is absent(V). All lanes of a warp call this; each copies a
  /// part.
  template <int Count, class V>
  CUTLASS_DEVICE static void copy(EpilogueArguments const& args, V v, bool has_product, int group, int first,
                                  int size, float (&to)[Count]) {
    if (is_addend(v) && !args.has(v)) {
      return;
    }
    EpilogueVector const& vector = args.vector(v);
    int const lane = static_cast<int>(threadIdx.x % 32);
    bool const is_there = vector.data != nullptr && (is_addend(v) || has_product);
    int const present = is_there ? size - first - lane : 0;
    float const* const from =
        vector.data + group * vector.group_stride + (vector.is_vector ? first + lane : 0);
    int const step = vector.is_vector ? 32 : 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Count / 32; ++i) {
      to[lane + i * 32] = i * 32 < present ? load_after_wait(from + i * step) : absent(v);
    }
  }

  // ---- slots ----

  /// Where piece number `piece` of a row lies in a slot, in bytes: the swizzle of the tensor map permutes the
  /// pieces of a row by its number.
  CUTLASS_DEVICE static uint32_t offset(uint32_t row, uint32_t piece) {
    uint32_t const key = Config::kSliceRowBytes == 128 ? row % 8 : row / 2 % 4;
    return row * Config::kSliceRowBytes + (piece ^ key) * 16;
  }

  /// The slot that is written next, once the copy from it that was issued last has read it.
  CUTLASS_DEVICE char* acquire() {
    if (lane_ == 0) {
      cute::tma_store_wait<Config::kSlots - 1>();
    }
    __syncwarp();  // the slot is free for every lane
    return shared_.slots[warp_][slot_];
  }

  /// Where the results go: D here, or another matrix of its shape that is stored as D is.
  struct ToD {
    Sm90GemmEpilogue const& epilogue;
    CUTLASS_DEVICE CUtensorMap const* map() const { return &epilogue.p_.d; }
    CUTLASS_DEVICE void* data() const { return epilogue.args_.d; }
    CUTLASS_DEVICE int64_t row_stride() const { return epilogue.args_.d_row_stride; }
  };

  /// Copies a slot to D; column is its first, of D. kBytes are those of an element.
  template <int kBytes>
  CUTLASS_DEVICE void issue(Place const& place, int column) {
    issue<kBytes>(ToD{*this}, place, column);
  }
  template <int kBytes, class To>
  CUTLASS_DEVICE void issue(To const& to, Place const& place, int column) {
    char* const from = shared_.slots[warp_][slot_];
    // TMA leaves out what lies beyond the plane, but not the rows of the next group.
    bool const whole = place.present >= 16 || place.row + place.present == p_.m;
    cute::tma_store_fence();  // makes this lane's writes visible to the copy
    __syncwarp();             // every lane has passed the fence, and sees what the others wrote
    if (!whole) {
      copy_rows<kBytes>(to, from, place, column);
    }
    if (lane_ == 0) {
      if (whole && column < p_.columns_of_d) {
        cute::SM90_TMA_STORE_3D::copy(to.map(), from, column, place.row, place.plane);
      }
      cute::tma_store_arrive();
    }
    slot_ = slot_ + 1 == Config::kSlots ? 0 : slot_ + 1;
  }

  /// Copies the rows of a slot that the group has, without TMA.
  template <int kBytes, class To>
  CUTLASS_DEVICE void copy_rows(To const& output, char const* from, Place const& place, int column) const {
    constexpr int kRowsAtATime = 32 / kPieces;
    int const piece = lane_ % kPieces;
    if (column + piece * (16 / kBytes) >= p_.columns_of_d) {
      return;  // rows of D are multiples of 16 bytes
    }
    int64_t const first = int64_t{place.plane} * p_.m + place.row;
    char* const to =
        static_cast<char*>(output.data()) + (first * output.row_stride() + column) * kBytes + piece * 16;
    CUTLASS_PRAGMA_UNROLL
    for (int row = lane_ / kPieces; row < 16; row += kRowsAtATime) {
      if (row < place.present) {
        auto const at = offset(static_cast<uint32_t>(row), static_cast<uint32_t>(piece));
        *reinterpret_cast<uint4*>(to + row * output.row_stride() * kBytes) =
            *reinterpret_cast<uint4 const*>(from + at);
      }
    }
  }

  // ---- a D as wide as the product ----

  /// kBytes are those of an element of D. kHasTerms: false if the call has_factors_alone().
  template <int kBytes, bool kHasTerms, class Accumulators>
  CUTLASS_DEVICE void store_columns(WorkItem const& item, Place const& place,
                                    Accumulators const& accumulators) {
    constexpr int kSliceColumns = Config::kSliceRowBytes / kBytes;
    constexpr int kSums = kSliceColumns / 2;
    Vectors const vectors(item, first_row(), lane_);
    float const alpha = item.alpha;
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kColumns / kSliceColumns; ++slice) {
      int const first = slice * kSliceColumns;
      uint32_t c[kSums * kBytes / 4];
      if (kHasTerms && args_.c != nullptr) {
        load_c<kBytes>(place, first, c);
      }
      float z[kSums];
      auto const [row, column] = vectors.of(first);
      take(first, accumulators, z);
      if constexpr (kHasTerms) {
        epilogue::finish<kSums>(args_, alpha, z, row, column,
                                [&](int i) { return element_of_c<kBytes>(c, i); });
      } else {
        epilogue::scale<kSums>(alpha, z, row, column);
      }
      char* const slot = acquire();
      if constexpr (kBytes == 2) {
        put_16(slot, z);
      } else {
        put_32(slot, z);
      }
      issue<kBytes>(place, place.column + first);
    }
  }

  /// Loads this thread's elements of C for a slice whose first column is `first` of the tile, 0 where there
  /// are none.
  template <int kBytes, int kWords>
  CUTLASS_DEVICE void load_c(Place const& place, int first, uint32_t (&c)[kWords]) const {
    constexpr int kWordsOfAPair = kBytes / 2;
    int const column = place.column + first + lane_ % 4 * 2;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kWords / kWordsOfAPair; ++i) {
      int const row = i % 2 * 8 + lane_ / 4;
      int const of_pair = column + i / 2 * 8;
      int64_t const element = (int64_t{place.plane} * p_.m + place.row + row) * args_.c_row_stride + of_pair;
      bool const exists = row < place.present && of_pair < p_.n;
      char const* const at = static_cast<char const*>(args_.c) + element * kBytes;
      // A plain load: C may be D, which the read-only path must not see.
      if constexpr (kBytes == 2) {
        c[i] = exists ? *reinterpret_cast<uint32_t const*>(at) : 0;
      } else {
        uint2 const pair = exists ? *reinterpret_cast<uint2 const*>(at) : uint2{0, 0};
        c[2 * i] = pair.x;
        c[2 * i + 1] = pair.y;
      }
    }
  }

  /// Element i of what load_c has loaded.
  template <int kBytes>
  CUTLASS_DEVICE float element_of_c(uint32_t const* c, int i) const {
    if constexpr (kBytes == 4) {
      return __uint_as_float(c[i]);
    } else {
      auto const bits = static_cast<uint16_t>(i % 2 == 0 ? c[i / 2] & 0xFFFFu : c[i / 2] >> 16);
      return epilogue::to_float(args_, epilogue::SixteenBits{bits});
    }
  }

  /// Writes the warp's 16 rows of a slice to a slot as 16-bit elements.
  template <int kSums>
  CUTLASS_DEVICE void put_16(char* slot, float const (&z)[kSums]) const {
    uint32_t packed[kSums / 2];
    round(z, packed);
    put_packed(slot, packed);
  }
  template <int kWords>
  CUTLASS_DEVICE void put_packed(char* slot, uint32_t const (&packed)[kWords]) const {
    uint32_t const lane = static_cast<uint32_t>(lane_);
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t i = 0; i < kWords; i += 4) {
      // stmatrix stores four matrices of 8 x 8: rows r and r + 8 of one block of 8 columns, then of the next.
      // Each lane gives the address of one row of one matrix.
      uint32_t const to =
          cute::cast_smem_ptr_to_uint(slot) + offset(lane / 8 % 2 * 8 + lane % 8, i / 2 + lane / 16);
      asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                   "r"(packed[i]), "r"(packed[i + 1]), "r"(packed[i + 2]), "r"(packed[i + 3])
                   : "memory");
    }
  }

  /// The same as fp32 elements.
  template <int kSums>
  CUTLASS_DEVICE void put_32(char* slot, float const (&z)[kSums]) const {
    uint32_t const lane = static_cast<uint32_t>(lane_);
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t i = 0; i < kSums / 2; ++i) {
      uint32_t const to = cute::cast_smem_ptr_to_uint(slot) +
                          offset(i % 2 * 8 + lane / 4, i / 2 * 2 + lane % 4 / 2) + lane % 2 * 8;
      asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(z[2 * i]), "f"(z[2 * i + 1]) : "memory");
    }
  }

  // ---- a D of which two columns of the product make one ----

  /// D has 16-bit elements, since a gated activation is refused for fp32.
  template <class Accumulators>
  CUTLASS_DEVICE void store_pairs(WorkItem const& item, Place const& place,
                                  Accumulators const& accumulators) {
    constexpr int kSliceColumns = Config::kSliceRowBytes;  // of the product
    constexpr int kAtATime = 32;                           // columns that are finished at a time
    Vectors const vectors(item, first_row(), lane_);
    float const alpha = item.alpha;
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kColumns / kSliceColumns; ++slice) {
      char* const slot = acquire();
      CUTLASS_PRAGMA_UNROLL
      for (int first = 0; first < kSliceColumns; first += kAtATime) {
        float z[kAtATime / 2];
        auto const [row, column] = vectors.of(slice * kSliceColumns + first);
        take(slice * kSliceColumns + first, accumulators, z);
        epilogue::finish_pairs<kAtATime / 2>(args_, alpha, z, row, column);  // to the first half of z
        put_pairs(slot, static_cast<uint32_t>(first) / 16, z);
      }
      issue<2>(place, (place.column + slice * kSliceColumns) / 2);
    }
  }

  /// Writes the results of four blocks of 8 columns of the product to a slot, from piece number `piece` of
  /// its rows on: z holds those of rows r and r + 8 of one block, then of the next.
  CUTLASS_DEVICE void put_pairs(char* slot, uint32_t piece, float const (&z)[16]) const {
    float pairs[8];
    exchange(z, pairs);
    uint32_t packed[4];
    round(pairs, packed);
    put_packed_pairs(slot, piece, packed);
  }
  /// Two neighbouring lanes exchange results, so that each has pairs of neighbouring columns: the even lane
  /// in the first block of two, the odd one in the second.
  CUTLASS_DEVICE void exchange(float const* z, float (&pairs)[8]) const {
    bool const is_odd = lane_ % 2 != 0;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 4; ++i) {  // rows r and r + 8 of the first two blocks, then of the next two
      float const of_first = z[i / 2 * 4 + i % 2];
      float const of_second = z[i / 2 * 4 + i % 2 + 2];
      float const received = __shfl_xor_sync(0xFFFFFFFFu, is_odd ? of_first : of_second, 1);
      pairs[2 * i] = is_odd ? received : of_first;
      pairs[2 * i + 1] = is_odd ? of_second : received;
    }
  }
  CUTLASS_DEVICE void put_packed_pairs(char* slot, uint32_t piece, uint32_t const (&packed)[4]) const {
    uint32_t const lane = static_cast<uint32_t>(lane_);
    CUTLASS_PRAGMA_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
      uint32_t const to = cute::cast_smem_ptr_to_uint(slot) + offset(i % 2 * 8 + lane / 4, piece + i / 2) +
                          (lane % 2 * 2 + lane % 4 / 2) * 4;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(packed[i]) : "memory");
    }
  }

  // ---- the sums of a thread ----

  /// z = this thread's sums from column `first` of the tile on. The column is known at compile time.
  template <int kSums, class Accumulators>
  CUTLASS_DEVICE static void take(int first, Accumulators const& accumulators, float (&z)[kSums]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kSums; ++i) {
      z[i] = accumulators(first / 2 + i);
    }
  }

  /// The elements of the vectors that belong to the sums of a thread.
  class Vectors {
   public:
    CUTLASS_DEVICE Vectors(WorkItem const& item, int first_row, int lane) : item_(item), lane_(lane) {
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kNumRowVectors; ++v) {
        per_row_[v][0] = item.per_row[v][first_row + lane / 4];
        per_row_[v][1] = item.per_row[v][first_row + lane / 4 + 8];
      }
    }

    /// The functions `row` and `column` of finish.hpp, for sums from column `first` of the tile on.
    CUTLASS_DEVICE auto of(int first) const {
      auto const row = [this](RowVector v, int i) { return per_row_[v][i / 2 % 2]; };
      auto const column = [this, first](ColumnVector v, int i) {
        float const* const from = item_.per_column[v] + first + lane_ % 4 * 2 + i / 4 * 8;
        float2 const pair = *reinterpret_cast<float2 const*>(from);
        return i % 2 == 0 ? pair.x : pair.y;
      };
      struct Functions {
        decltype(row) of_row;
        decltype(column) of_column;
      };
      return Functions{row, column};
    }

   private:
    WorkItem const& item_;
    int lane_;
    float per_row_[kNumRowVectors][2];  // of this thread's two rows
  };

  /// to[i] = z[2 i] and z[2 i + 1] in the 16-bit type of D.
  template <int kValues>
  CUTLASS_DEVICE void round(float const (&z)[kValues], uint32_t (&to)[kValues / 2]) const {
    if (args_.output == OutputType::kBf16) {
      round_to<cutlass::bfloat16_t>(z, to);
    } else {
      round_to<cutlass::half_t>(z, to);
    }
  }
  template <class Out, int kValues>
  CUTLASS_DEVICE static void round_to(float const (&z)[kValues], uint32_t (&to)[kValues / 2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues / 2; ++i) {
      to[i] = epilogue::cast_two<Out>(z[2 * i], z[2 * i + 1]);
    }
  }

  Params const& p_;
  EpilogueArguments const& args_;
  Shared& shared_;
  int warp_;
  int lane_;
  int slot_;  // that is written next
};

}  // namespace cutlass_evt
