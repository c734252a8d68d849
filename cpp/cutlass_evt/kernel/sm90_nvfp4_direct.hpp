// The usual epilogue of tiles whose warpgroups have rows to themselves:
// from the registers of a wgmma to whole lines of D.
#pragma once

#include "cutlass_evt/kernel/sm90_nvfp4_terms.hpp"

namespace cutlass_evt {

/// One tile's epilogue. A warpgroup has 64 columns of D to itself and waits for no other: one may be in the
/// next tile's mainloop while another stores.
///
/// The arithmetic is done where the accumulators are: a thread holds two columns, whose terms are registers,
/// and pairs of tokens, whose factors lie in shared memory. Then stmatrix turns the 16-bit results round, a
/// slice of the tokens at a time, and eight neighbouring threads write 128 bytes of a row of D.
template <class Config, class Epilogue>
struct Sm90Nvfp4Direct {
  using Shared = Sm90Nvfp4Shared<Config>;
  using Place = typename Sm90Nvfp4Groups<Config>::Place;
  using Terms = Sm90Nvfp4Terms<Config, Epilogue>;
  static constexpr int kSliceTokens = Config::kDirectTokens;
  static constexpr int kSlices = Config::kTokens / kSliceTokens;
  static constexpr int kPieces = kSliceTokens / 16;  // of 16 bytes that a thread stores of a slice

  /// Writes the tile to D; the accumulators are used up.
  template <class Accumulators>
  CUTLASS_DEVICE static void store(typename Epilogue::Arguments const& args, Shared const& shared,
                                   Place const& place, int first_chunk, int n, Accumulators& accumulators) {
    int const tokens = place.rows.size - place.token;
    int const row = place.rows.begin + place.token;
    int const thread = static_cast<int>(threadIdx.x % 128);
    int const lane = thread % 32;
    float const* const terms = shared.terms(static_cast<int>(threadIdx.x / 128));
    // A token's 128 bytes are eight pieces of 16, permuted by the token's number. stmatrix stores four 8 x 8
    // matrices, two of tokens by two of columns; each lane has the address of one token's piece.
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
    float const alpha = Epilogue::alpha(args, place.group);
    // From here on the terms are there, and nobody reads what was staged of the tile before.
    Terms::wait();
    sync();
    typename Epilogue::TwoColumns columns;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      int const of_column = thread / 32 * 16 + lane / 4 + i * 8;
      columns.by_column[i] = terms[Terms::kByColumn + of_column];
      columns.bias[i] = terms[Terms::kBias + of_column];
    }
    columns.alpha = alpha;

    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice > 0 && slice * kSliceTokens >= tokens) {
        return;
      }
      uint32_t const buffer = static_cast<uint32_t>(slice % Config::kDirectBuffers * kSliceTokens * 128);
      uint32_t packed[kSliceTokens / 8][2];
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kSliceTokens / 8; ++block) {
        int const first = slice * kSliceTokens + block * 8;
        float2 const by_row = *reinterpret_cast<float2 const*>(terms + first + lane % 4 * 2);
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
  /// Among the threads of the warpgroup.
  CUTLASS_DEVICE static void sync() { cutlass::arch::NamedBarrier::sync(128u, 2u + threadIdx.x / 128); }

  CUTLASS_DEVICE static uint4 get(uint32_t from) {
    uint4 bits;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "r"(from)
                 : "memory");
    return bits;
  }

  CUTLASS_DEVICE static void store_if(bool wanted, void* to, uint4 const& bits) {
    asm volatile(
        "{\n"
        ".reg .pred wanted;\n"
        "setp.ne.s32 wanted, %0, 0;\n"
        "@wanted st.global.v4.u32 [%1], {%2, %3, %4, %5};\n"
        "}" ::"r"(static_cast<int>(wanted)),
        "l"(to), "r"(bits.x), "r"(bits.y), "r"(bits.z), "r"(bits.w)
        : "memory");
  }
};

}  // namespace cutlass_evt
