// An epilogue for tiles whose warpgroups do not share rows, and for calls whose D ColumnsEpilogue::is_direct
// accepts: from the registers of a wgmma to stores of 128 bytes of D.
#pragma once

#include "cutlass_evt/kernel/mixed_input_epilogue_vectors.hpp"

namespace cutlass_evt {

/// The way of 16-bit elements between the registers of a warpgroup and the rows of a matrix, through shared
/// memory: of its 64 columns, or with kOfPairs of the 32 columns of a matrix that has one for two columns of
/// the product. The pieces of 16 bytes of a row are permuted by the row's number to avoid bank conflicts.
///
/// The matrix instructions move 8 x 8 elements; each lane gives the address of one piece of one row.
template <class Config, bool kOfPairs>
struct MixedInputDirectRows {
  static constexpr int kRowBytes = kOfPairs ? 64 : 128;
  static constexpr int kRowsAtATime = 128 * 16 / kRowBytes;  // each thread has a piece

  uint32_t put_at;  // this lane's for the matrix instructions
  uint32_t get_at;  // this thread's piece
  int row;          // of the piece
  int column;       // of the matrix: the piece's first

  /// `thread` is the thread's number in its warpgroup.
  CUTLASS_DEVICE MixedInputDirectRows(MixedInputShared<Config> const& shared, int thread, int first_chunk) {
    int const lane = thread % 32;
    uint32_t const staged = shared.staged_at(static_cast<int>(threadIdx.x / 128));
    if constexpr (kOfPairs) {
      put_at = staged + static_cast<uint32_t>(lane % 16 * 64 + ((thread / 32) ^ (lane % 16 / 2 % 4)) * 16);
      row = thread / 4;
      int const piece = thread % 4;
      get_at = staged + static_cast<uint32_t>(row * 64 + (piece ^ (row / 2 % 4)) * 16);
      column = (first_chunk + static_cast<int>(threadIdx.x / 128)) * 32 + piece * 8;
    } else {
      // Four 8 x 8 matrices, two along the tokens by two along the columns.
      put_at = staged + static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * 128 +
                                              ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16);
      row = thread / 8;
      int const piece = thread % 8;
      get_at = staged + static_cast<uint32_t>(row * 128 + (piece ^ row % 8) * 16);
      column = (first_chunk + static_cast<int>(threadIdx.x / 128)) * 64 + piece * 8;
    }
  }

  /// Rows of the tile from that of the piece on; none if its columns do not exist.
  CUTLASS_DEVICE int present(int n, int tokens) const {
    return (kOfPairs ? 2 * column : column) < n ? tokens - row : 0;
  }

  /// Two blocks of 8 rows from registers to shared memory: of pairs one register of each block, otherwise
  /// two. `to` is put_at plus the offset of the blocks.
  CUTLASS_DEVICE static void put(uint32_t to, uint32_t const (&first)[2], uint32_t const (&second)[2]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to),
                 "r"(first[0]), "r"(first[1]), "r"(second[0]), "r"(second[1])
                 : "memory");
  }
  CUTLASS_DEVICE static void put(uint32_t to, uint32_t const (&first)[1], uint32_t const (&second)[1]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(first[0]),
                 "r"(second[0])
                 : "memory");
  }
  /// The way back.
  CUTLASS_DEVICE static void get(uint32_t from, uint32_t (&first)[2], uint32_t (&second)[2]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(first[0]), "=r"(first[1]), "=r"(second[0]), "=r"(second[1])
                 : "r"(from)
                 : "memory");
  }
  CUTLASS_DEVICE static void get(uint32_t from, uint32_t (&first)[1], uint32_t (&second)[1]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(first[0]), "=r"(second[0])
                 : "r"(from)
                 : "memory");
  }

  /// A piece of 16 bytes to and from shared memory.
  CUTLASS_DEVICE static void put_piece(uint32_t to, uint4 const& bits) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z),
                 "r"(bits.w)
                 : "memory");
  }
  CUTLASS_DEVICE static uint4 get_piece(uint32_t from) {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(from)
                 : "memory");
    return bits;
  }
  CUTLASS_DEVICE static void store_if(bool present, void* to, uint4 const& bits) {
    asm volatile(
        "{\n"
        ".reg .pred present;\n"
        "setp.ne.s32 present, %0, 0;\n"
        "@present st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
        "}" ::"r"(static_cast<int>(present)),
        "l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
        : "memory");
  }

  /// Of pairs, lanes r / 4 = 0, 1, .. have the columns 0, 4, 1, 5, 2, 6, 3, 7 of a piece. These are its
  /// elements in the order of memory, and back.
  CUTLASS_DEVICE static uint4 in_order(uint4 const& bits) {
    return {__byte_perm(bits.x, bits.y, 0x5410), __byte_perm(bits.z, bits.w, 0x5410),
            __byte_perm(bits.x, bits.y, 0x7632), __byte_perm(bits.z, bits.w, 0x7632)};
  }
  CUTLASS_DEVICE static uint4 by_lane(uint4 const& bits) {
    return {__byte_perm(bits.x, bits.z, 0x5410), __byte_perm(bits.x, bits.z, 0x7632),
            __byte_perm(bits.y, bits.w, 0x5410), __byte_perm(bits.y, bits.w, 0x7632)};
  }

  /// A barrier among the 128 threads of the warpgroup: named barriers 2 and up, one for each.
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(128u, 2u + threadIdx.x / 128); }
};

/// The epilogue of one tile where Epilogue's is_direct holds: 16-bit D without C and activation or, for tiles
/// with kTakesCAndGated, with C or a gated activation. A warpgroup has 64 columns of D and synchronises with
/// no other: one may be in the mainloop of the next tile while another stores.
///
/// The arithmetic happens where the accumulators are: a thread holds two columns, whose factors and biases
/// are in registers, and pairs of tokens, whose factors are in shared memory. stmatrix then transposes the
/// 16-bit results in shared memory, a slice of the tokens at a time, and eight neighbouring threads store 128
/// bytes of a row of D.
///
/// Config is a MixedInputConfig; Epilogue is ColumnsEpilogue or a type with its interface.
template <class Config, class Epilogue>
struct MixedInputDirectEpilogue {
  using Shared = MixedInputShared<Config>;
  using TileCoord = typename MixedInputGroups<Config>::TileCoord;
  using Vectors = MixedInputEpilogueVectors<Config>;
  using Rows = MixedInputDirectRows<Config, false>;
  using PairRows = MixedInputDirectRows<Config, true>;
  static constexpr int kSliceTokens = Config::kDirectTokens;
  static constexpr int kSlices = Config::kTokens / kSliceTokens;
  static constexpr int kPieces = kSliceTokens / 16;  // stores of 16 bytes by a thread for each slice
  // Whether gated activations and C are served. store_pairs writes 32 tokens at a time, and three warpgroups
  // have too few registers for either.
  static constexpr bool kTakesCAndGated = kSliceTokens >= 32 && Config::kConsumerGroups <= 2;

  /// Whether this epilogue serves a call.
  CUTLASS_DEVICE static bool serves(EpilogueArguments const& args) {
    return Epilogue::is_direct(args, kTakesCAndGated);
  }

  /// Writes the tile to D; the accumulators are used up.
  template <class Accumulators>
  CUTLASS_DEVICE static void store_tile(EpilogueArguments const& args, Shared const& shared,
                                        TileCoord const& coord, int first, int n,
                                        Accumulators& accumulators) {
    if constexpr (kTakesCAndGated) {
      if (args.activation != Activation::kNone) {
        // The formula is chosen once for a tile: a choice for each pair would cost as much as the pair.
        nodes::visit_formula(args.activation, [&](auto formula) {
          using Formula = decltype(formula);
          if constexpr (Formula::kIsGated) {
            store_pairs<Formula>(args, shared, coord, first, n, accumulators);
          }
        });
        return;
      }
      if (args.c != nullptr) {
        store<true>(args, shared, coord, first, n, accumulators);
        return;
      }
    }
    store<false>(args, shared, coord, first, n, accumulators);
  }

  /// As store_tile without an activation, with or without C.
  template <bool kHasC, class Accumulators>
  CUTLASS_DEVICE static void store(EpilogueArguments const& args, Shared const& shared,
                                   TileCoord const& coord, int first_chunk, int n,
                                   Accumulators& accumulators) {
    int const tokens = coord.rows.size - coord.token;
    int const row = coord.rows.begin + coord.token;
    int const thread = static_cast<int>(threadIdx.x % 128);
    int const lane = thread % 32;
    float const* const vectors = shared.vectors(static_cast<int>(threadIdx.x / 128));
    Rows const rows_of_d(shared, thread, first_chunk);
    int const present = rows_of_d.present(n, tokens);
    char* d = static_cast<char*>(args.d) +
              ((int64_t{row} + rows_of_d.row) * args.d_row_stride + rows_of_d.column) * 2;
    int64_t const step = args.d_row_stride * (16 * 2);
    float const alpha = Epilogue::alpha(args, coord.group);
    uint4 pieces[kPieces];
    auto const get_c = [&](int slice) {
      int64_t const first = int64_t{row} + rows_of_d.row + slice * kSliceTokens;
      auto const* c = static_cast<char const*>(args.c) + (first * args.c_row_stride + rows_of_d.column) * 2;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        // A plain load: C may be D, which the read-only path must not see. Zeros where D has no row.
        bool const has_row = slice * kSliceTokens + i * 16 < present;
        pieces[i] = has_row ? *reinterpret_cast<uint4 const*>(c + i * args.c_row_stride * (16 * 2))
                            : uint4{0, 0, 0, 0};
      }
    };
    if constexpr (kHasC) {
      get_c(0);
    }
    // After the barrier the vectors that every thread of the warpgroup copied are visible, and the staged
    // results of the previous tile have been read.
    Vectors::wait();
    sync();
    typename Epilogue::TwoColumns const columns = two_columns(vectors, thread, alpha);

    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      // Two buffers alternate, so that one barrier for each slice suffices: a thread that writes slice s has
      // passed the barrier of slice s - 1, and before that every thread had read slice s - 2.
      if (slice > 0 && slice * kSliceTokens >= tokens) {
        return;
      }
      sync_single_buffer(slice);
      uint32_t const buffer = static_cast<uint32_t>(slice % Config::kDirectBuffers * kSliceTokens * 128);
      uint32_t packed[kSliceTokens / 8][2];
      if constexpr (kHasC) {
        // C takes the way of D backwards: pieces of rows to shared memory, and from there to the registers
        // that hold the same elements of D. A warp then writes D where it has read C.
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPieces; ++i) {
          Rows::put_piece(rows_of_d.get_at + buffer + static_cast<uint32_t>(i * 16 * 128), pieces[i]);
        }
        sync();
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kSliceTokens / 8; block += 2) {
          Rows::get(rows_of_d.put_at + buffer + static_cast<uint32_t>(block * 8 * 128), packed[block],
                    packed[block + 1]);
        }
      }
      Sums<Accumulators> z{accumulators, slice * (kSliceTokens / 2)};
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSliceTokens / 2; ++i) {
        z[i] *= kScale;
      }
      float2 rows[kNumRowVectors][kSliceTokens / 8];
      get_rows(vectors, slice * kSliceTokens, lane, rows);
      columns.template finish<kSliceTokens / 2>(
          args, kHasC, z, [&](RowVector v, int i) { return of_token(rows[v][i / 4], i); },
          [&](int i) -> uint32_t& { return packed[i / 2][i % 2]; });
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kSliceTokens / 8; block += 2) {
        Rows::put(rows_of_d.put_at + buffer + static_cast<uint32_t>(block * 8 * 128), packed[block],
                  packed[block + 1]);
      }
      if constexpr (kHasC) {
        if (slice + 1 < kSlices) {
          get_c(slice + 1);  // only now, since registers are scarce before
        }
      }
      // The slice is complete in shared memory.
      sync();
      uint4 results[kPieces];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        results[i] = Rows::get_piece(rows_of_d.get_at + buffer + static_cast<uint32_t>(i * 16 * 128));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        Rows::store_if(slice * kSliceTokens + i * 16 < present, d, results[i]);
        d += step;
      }
    }
  }

  /// As store, for the gated activation Formula: D has half as many columns, of which the warpgroup has 32.
  ///
  /// Gate and up are neighbouring columns of the product, which lanes 4 apart hold, each with the two columns
  /// r and r + 8 of a warp. The lane with the gates gets the up of its first column and gives the gate of its
  /// second: so each lane activates one pair of columns. A loop over slices keeps the code small; since
  /// registers cannot be indexed at run time, it selects a slice's sums among all.
  template <class Formula, class Accumulators>
  CUTLASS_DEVICE static void store_pairs(EpilogueArguments const& args, Shared const& shared,
                                         TileCoord const& coord, int first_chunk, int n,
                                         Accumulators& accumulators) {
    // Slices of tiles of 256 are smaller, since their sums need most of the registers.
    constexpr int kSliceTokens = Config::kTokens >= 256 ? 32 : Config::kDirectTokens;
    constexpr int kSlices = Config::kTokens / kSliceTokens;
    constexpr int kSums = kSliceTokens / 2;     // of a thread, in a slice
    constexpr int kPasses = kSliceTokens / 32;  // stores of 16 bytes by a thread for each slice
    int const tokens = coord.rows.size - coord.token;
    int const row = coord.rows.begin + coord.token;
    int const thread = static_cast<int>(threadIdx.x % 128);
    int const lane = thread % 32;
    bool const has_up = lane / 4 % 2 != 0;
    float const* const vectors = shared.vectors(static_cast<int>(threadIdx.x / 128));
    PairRows const rows_of_d(shared, thread, first_chunk);
    int const present = rows_of_d.present(n, tokens);
    char* d = static_cast<char*>(args.d) +
              ((int64_t{row} + rows_of_d.row) * args.d_row_stride + rows_of_d.column) * 2;
    int64_t const step = args.d_row_stride * (32 * 2);
    Vectors::wait();
    sync();
    typename Epilogue::TwoColumns const columns =
        two_columns(vectors, thread, Epilogue::alpha(args, coord.group));

    CUTLASS_PRAGMA_NO_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice > 0 && slice * kSliceTokens >= tokens) {
        return;
      }
      sync_single_buffer(slice);
      float sums[kSums];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSlices; ++i) {
        if (i == slice) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < kSums; ++v) {
            sums[v] = accumulators[i * kSums + v];
          }
        }
      }
      uint32_t const buffer = static_cast<uint32_t>(slice % Config::kDirectBuffers * kSliceTokens * 128);
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kSliceTokens / 8; block += 2) {
        float pairs[8];  // gate and up of this lane's column of D, for four tokens
        CUTLASS_PRAGMA_UNROLL
        for (int half = 0; half < 2; ++half) {
          float2 rows[kNumRowVectors][1];
          get_rows(vectors, slice * kSliceTokens + (block + half) * 8, lane, rows);
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < 2; ++v) {
            float const* const sum = sums + (block + half) * 4 + v;
            float z[2] = {sum[0] * kScale, sum[2] * kScale};
            epilogue::scale_and_add<2, /*kSkipsAbsent=*/false>(
                args, columns.alpha, z, [&](RowVector vector, int) { return of_token(rows[vector][0], v); },
                [&](ColumnVector vector, int i) { return columns.per_column[vector][i]; });
            float const other = __shfl_xor_sync(0xFFFFFFFFu, has_up ? z[0] : z[1], 4);
            pairs[half * 4 + v * 2] = has_up ? other : z[0];
            pairs[half * 4 + v * 2 + 1] = has_up ? z[1] : other;
          }
        }
        uint32_t packed[2];
        columns.template activate_and_cast<Formula>(args, pairs, packed);
        PairRows::put(rows_of_d.put_at + buffer + static_cast<uint32_t>(block * 8 * 64), {packed[0]},
                      {packed[1]});
      }
      sync();  // the slice is complete in shared memory; the buffers alternate as in store
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPasses; ++i) {
        uint4 const bits =
            PairRows::get_piece(rows_of_d.get_at + buffer + static_cast<uint32_t>(i * 32 * 64));
        PairRows::store_if(slice * kSliceTokens + i * 32 < present, d + i * step, PairRows::in_order(bits));
      }
      d += args.d_row_stride * (kSliceTokens * 2);
    }
  }

 private:
  static constexpr float kScale = static_cast<float>(1 << Config::Packing::kExponent);

  /// Some accumulators, from number `first` on.
  template <class Accumulators>
  struct Sums {
    Accumulators& accumulators;
    int first;
    CUTLASS_DEVICE float& operator[](int i) const { return accumulators[first + i]; }
  };

  /// The elements of the vectors along the rows for the two tokens of a thread in each block of 8 tokens from
  /// `first` on. A thread has four sums of a block, of which the even ones belong to the first token.
  template <int Blocks>
  CUTLASS_DEVICE static void get_rows(float const* vectors, int first, int lane,
                                      float2 (&rows)[kNumRowVectors][Blocks]) {
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < Blocks; ++block) {
        rows[v][block] = *reinterpret_cast<float2 const*>(vectors + v * Config::kTokens + first + block * 8 +
                                                          lane % 4 * 2);
      }
    }
  }
  CUTLASS_DEVICE static float of_token(float2 const& tokens, int i) {
    return i % 2 == 0 ? tokens.x : tokens.y;
  }

  /// The vectors of the two columns of a thread.
  CUTLASS_DEVICE static typename Epilogue::TwoColumns two_columns(float const* vectors, int thread,
                                                                  float alpha) {
    typename Epilogue::TwoColumns columns;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumColumnVectors; ++v) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        columns.per_column[v][i] = vectors[Vectors::kColumnsAt + v * Config::kVectorColumns +
                                           thread / 32 * 16 + thread % 32 / 4 + i * 8];
      }
    }
    columns.alpha = alpha;
    return columns;
  }

  /// Where there is one buffer for all slices: every thread has read the slice before.
  CUTLASS_DEVICE static void sync_single_buffer(int slice) {
    if constexpr (Config::kDirectBuffers == 1 && kSlices > 1) {
      if (slice > 0) {
        sync();
      }
    }
  }

  CUTLASS_DEVICE static void sync() { Rows::sync(); }
};

}  // namespace cutlass_evt
