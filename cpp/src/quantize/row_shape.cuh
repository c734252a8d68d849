// What quantize_rows is told: its parameters and the ways in which threads share rows.
#pragma once

#include "quantize/cast.cuh"
#include "quantize/groups.cuh"
#include "quantize/loaders.cuh"
#include "quantize/sizes.hpp"

namespace fp4gemm {

/// The element of amax_in that a row uses.
enum class AmaxAt {
  kStart,       // the first one: one amax for the tensor
  kRow,         // that of the row
  kGroup,       // that of the row's group, amax_in having one for each group
  kGroupStart,  // that of the first row of the row's group, amax_in having one for each row
};

/// The arguments of quantize_rows.
struct RowParams {
  Input input;
  int64_t m;
  int num_blocks;  // of 16 elements in a row
  int num_words;   // of 4 scales in a row, padding included
  uint8_t* codes;
  uint8_t* scales;
  uint4* decoded;        // out, (m, 2 * num_blocks): fp16 values; null: codes and scales are written instead
  float* amax;           // out, (m); null: not written
  float const* amax_in;  // the amaxes to use; null: found, see Amax
  AmaxAt amax_at;
  Groups groups;
  CastOptions cast;
  int const* channels = nullptr;  // kResidual: the columns of x whose errors are appended, on the device
  int num_residual_blocks = 0;    // kResidual: a sixteenth of their number; even
};

/// How a row gets the amax that it is scaled by.
enum class Amax {
  kRow,     // found: the amax of the row itself
  kGiven,   // read from amax_in
  kEither,  // read from amax_in, or found where amax_in is null
};

/// The rows of a tile of 128 rows of scales that one CTA quantizes.
enum class Cover {
  kQuads,  // r, r + 32, r + 64 and r + 96: their scales are adjacent in the swizzled layout, so that they are
           // collected in shared memory and written 16 bytes at a time
  kSingles,  // one row for each CTA (four for warps): the most CTAs, for tensors of few rows
};

/// How the threads of a CTA share its rows. A turn is what the threads of a row hold in registers at a time,
/// kThreadsPerRow * kBlocksPerThread blocks.
///
/// @tparam kAmax_ How a row gets its amax.
/// @tparam kCover_ Which rows a CTA quantizes.
/// @tparam kGrouped_ Whether RowParams::groups may hold groups. If not, no code looks for the group of a row.
/// @tparam kLooped_ Whether a row may have more blocks than a turn. If so, the turns after the first are read
///     twice, for the amax and for the cast.
/// @tparam kThreadsPerRow_ Threads that share a row: 32, where each of the CTA's four warps has a row of its
///     own, or 128 and more, where the whole CTA shares a row and quantizes its rows one after the other.
/// @tparam kBlocksPerThread_ Blocks of a turn that a thread holds.
/// @tparam kResidual_ Whether the errors of RowParams::channels are appended to each row of the result.
template <Amax kAmax_, Cover kCover_, bool kGrouped_, bool kLooped_, int kThreadsPerRow_,
          int kBlocksPerThread_, bool kResidual_ = false>
struct RowShape {
  static constexpr Amax kAmax = kAmax_;
  static constexpr Cover kCover = kCover_;
  static constexpr bool kGrouped = kGrouped_;
  static constexpr bool kLooped = kLooped_;
  static constexpr int kThreadsPerRow = kThreadsPerRow_;
  static constexpr int kBlocksPerThread = kBlocksPerThread_;
  static constexpr bool kResidual = kResidual_;
  static_assert(kThreadsPerRow == 32 || kThreadsPerRow >= 128,
                "a row is shared by one warp, or by a CTA of four warps or more");

  static constexpr bool kWarpRows = kThreadsPerRow == 32;
  static constexpr int kThreads = kWarpRows ? kQuad * 32 : kThreadsPerRow;
  static constexpr int kTurnBlocks = kThreadsPerRow * kBlocksPerThread;
  static constexpr int kCtaRows = kWarpRows || kCover == Cover::kQuads ? kQuad : 1;
  static constexpr int kRounds = kWarpRows ? 1 : kCtaRows;           // rows that a thread takes part in
  static constexpr int kRowStep = kCover == Cover::kQuads ? 32 : 1;  // between the rows of a CTA
};

/// CTAs on an SM that the compiler must leave registers for. Hiding the latency of memory and barriers needs
/// about 1024 threads; shapes whose blocks would spill at that number are compiled for 768.
template <class Loader, class Shape>
constexpr int min_ctas() {
  constexpr bool kIsFloat = sizeof(typename Loader::Element) == 4;
  constexpr bool kNeedsRegisters =
      Loader::kIsNorm || Shape::kResidual ||
      (kIsFloat ? Shape::kGrouped || Shape::kBlocksPerThread > 1 : Shape::kGrouped && Shape::kLooped);
  return (kNeedsRegisters ? 768 : 1024) / Shape::kThreads;
}

}  // namespace fp4gemm
