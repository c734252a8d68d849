// The epilogue of the usual call, for tiles whose warpgroups do not share rows: from the registers of a wgmma
// to stores of 128 bytes of D.
#pragma once

#include "cutlass_evt/kernel/sm90_nvfp4_epilogue_vectors.hpp"

namespace cutlass_evt {

/// The epilogue of one tile where Epilogue's is_direct() holds: 16-bit D, no C, no activation. A warpgroup
/// has 64 columns of D and synchronises with no other: one may be in the mainloop of the next tile while
/// another stores.
///
/// The arithmetic happens where the accumulators are: a thread holds two columns, whose factors and biases
/// are in registers, and pairs of tokens, whose factors are in shared memory. stmatrix then transposes the
/// 16-bit results in shared memory, a slice of the tokens at a time, and eight neighbouring threads store 128
/// bytes of a row of D.
///
/// Config is a Sm90Nvfp4Config; Epilogue is ColumnsEpilogue or a type with its interface.
template <class Config, class Epilogue>
struct Sm90Nvfp4DirectEpilogue {
  using Shared = Sm90Nvfp4Shared<Config>;
  using TileCoord = typename Sm90Nvfp4Groups<Config>::TileCoord;
  using Vectors = Sm90Nvfp4EpilogueVectors<Config, Epilogue>;
  static constexpr int kSliceTokens = Config::kDirectTokens;
  static constexpr int kSlices = Config::kTokens / kSliceTokens;
  static constexpr int kPieces = kSliceTokens / 16;  // stores of 16 bytes by a thread for each slice

  /// Writes the tile to D; the accumulators are used up.
  template <class Accumulators>
  CUTLASS_DEVICE static void store(typename Epilogue::Arguments const& args, Shared const& shared,
                                   TileCoord const& coord, int first_chunk, int n,
                                   Accumulators& accumulators) {
    int const tokens = coord.rows.size - coord.token;
    int const row = coord.rows.begin + coord.token;
    int const thread = static_cast<int>(threadIdx.x % 128);
    int const lane = thread % 32;
    float const* const vectors = shared.vectors(static_cast<int>(threadIdx.x / 128));
    // The 128 bytes of a token are eight pieces of 16 bytes, permuted by the token's number to avoid bank
    // conflicts. stmatrix stores four 8 x 8 matrices, two along the tokens by two along the columns; each
    // lane gives the address of one piece of one token.
    uint32_t const staged = shared.staged_at(static_cast<int>(threadIdx.x / 128));
    uint32_t const put_at =
        staged + static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * 128 +
                                       ((thread / 32 * 2 + lane / 8 % 2) ^ lane % 8) * 16);
    int const token = thread / 8;
    int const piece = thread % 8;
    uint32_t const get_at = staged + static_cast<uint32_t>(token * 128 + (piece ^ token % 8) * 16);
    int const column = (first_chunk + static_cast<int>(threadIdx.x / 128)) * 64 + piece * 8;
    int const present = column < n ? tokens - token : 0;
    char* d = static_cast<char*>(args.d) + ((int64_t{row} + token) * args.d_row_stride + column) * 2;
    int64_t const step = args.d_row_stride * (16 * 2);
    float const alpha = Epilogue::alpha(args, coord.group);
    // After the barrier the vectors that every thread of the warpgroup copied are visible, and the staged
    // results of the previous tile have been read.
    Vectors::wait();
    sync();
    typename Epilogue::TwoColumns columns;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const of_column = thread / 32 * 16 + lane / 4 + i * 8;
      columns.by_column[i] = vectors[Vectors::kByColumn + of_column];
      columns.bias[i] = vectors[Vectors::kBias + of_column];
    }
    columns.alpha = alpha;

    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      // The buffers alternate, so that one barrier for each slice suffices: a thread that writes slice s has
      // passed the barrier of slice s - 1, and before that every thread had read slice s - 2.
      if (slice > 0 && slice * kSliceTokens >= tokens) {
        return;
      }
      uint32_t const buffer = static_cast<uint32_t>(slice % Config::kDirectBuffers * kSliceTokens * 128);
      uint32_t packed[kSliceTokens / 8][2];
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kSliceTokens / 8; ++block) {
        int const first = slice * kSliceTokens + block * 8;
        float2 const by_row = *reinterpret_cast<float2 const*>(vectors + first + lane % 4 * 2);
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < 4; ++v) {
          float& z = accumulators[first / 2 + v];
          z = columns.scaled(z * static_cast<float>(1 << Nvfp4Packing::kExponent),
                             v % 2 == 0 ? by_row.x : by_row.y, v / 2);
        }
      }
      columns.template finish<kSliceTokens / 2>(
          args, [&](int i) -> float& { return accumulators[slice * (kSliceTokens / 2) + i]; },
          [&](int i) -> uint32_t& { return packed[i / 2][i % 2]; });
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kSliceTokens / 8; block += 2) {
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         put_at + buffer + static_cast<uint32_t>(block * 8 * 128)),
                     "r"(packed[block][0]), "r"(packed[block][1]), "r"(packed[block + 1][0]),
                     "r"(packed[block + 1][1])
                     : "memory");
      }
      // The slice is complete in shared memory.
      sync();
      uint4 pieces[kPieces];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        pieces[i] = get(get_at + buffer + static_cast<uint32_t>(i * 16 * 128));
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        store_if(slice * kSliceTokens + i * 16 < present, d, pieces[i]);
        d += step;
      }
    }
  }

 private:
  /// A barrier among the 128 threads of the warpgroup: named barriers 2 and up, one for each.
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(128u, 2u + threadIdx.x / 128); }

  CUTLASS_DEVICE static uint4 get(uint32_t from) {
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
};

}  // namespace cutlass_evt
