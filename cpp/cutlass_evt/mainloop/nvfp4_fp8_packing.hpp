// The layout of NVFP4 weights that are prepacked for the FP8 tensor cores, and the order along k that their
// kernels expect of the tokens.
//
// The kernels decode a weight to e4m3: the operand is e4m3(q * s / 8), rounded to nearest even, with the e2m1
// value q and the block scale s. A block of 16 along k has eight magnitudes. They are the eight bytes of one
// entry of a table of 128 entries, one for each scale without its sign, which a CTA keeps in shared memory.
// So a thread loads eight bytes for each block and row, and PRMT selects four operands at a time.
//
// A weight (n, k) is a row-major matrix of chunks. A chunk covers 64 rows by 128 along k: 4096 bytes of
// codes, then 512 bytes of scales. Rows and columns beyond n and k are zeros. Thread t of a warpgroup has
// rows r = t / 32 * 16 + t % 32 / 4 and r + 8, and of each 64 along k the block of 16 with the number t % 4:
//
//   bytes 16 t .. 16 t + 15          k  0 ..  63: two words of row r, then two of row r + 8
//   bytes 2048 + 16 t .. + 15        k 64 .. 127: the same
//   bytes 4096 + 4 t .. + 3          scales of seven bits each: row r of k 0 .. 63, row r + 8, then both of
//                                    k 64 .. 127, from bit 3 on
//
// A word has eight codes that follow one another along k. Its nibble i has the magnitude of code i in the
// three low bits. The sign of code i is bit 8 i + 7 for i < 4 and bit 8 (i - 4) + 3 for the others. The sign
// of a negative scale is moved to its sixteen codes.
//
// A wgmma of 32 along k gives a thread positions 4 q .. 4 q + 3 and 16 + 4 q .. 16 + 4 q + 3, q = t % 4. For
// these to belong to the thread's block, k is permuted within each 64: position 32 w + 16 h + 4 q + b holds
// element k = 16 q + 8 w + 4 h + b. The quantizer of the tokens writes them in this order.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

struct Nvfp4Fp8Packing {
  static constexpr int kRows = 64;      // rows of a chunk
  static constexpr int kDepth = 128;    // extent of a chunk along k
  static constexpr int kPermuted = 64;  // elements of k that are permuted among themselves
  static constexpr int kCodeBytes = 4096;
  static constexpr int kScaleBytes = 512;
  static constexpr int kChunkBytes = kCodeBytes + kScaleBytes;
  static constexpr int kTableBytes = 1024;  // of the decoded magnitudes: 128 scales, eight bytes each

  // A decoded operand is value * scale * 2^-3.
  static constexpr int kExponent = 3;

  /// The chunks that cover n rows, and k elements.
  CUTLASS_HOST_DEVICE static constexpr int64_t row_chunks(int64_t n) { return (n + kRows - 1) / kRows; }
  CUTLASS_HOST_DEVICE static constexpr int64_t depth_chunks(int64_t k) { return (k + kDepth - 1) / kDepth; }

  /// Bytes of one (n, k) weight.
  CUTLASS_HOST_DEVICE static constexpr int64_t bytes(int64_t n, int64_t k) {
    return row_chunks(n) * depth_chunks(k) * kChunkBytes;
  }

  /// The position within its 64 of the element with number k (0..63).
  CUTLASS_HOST_DEVICE static constexpr int position_of(int k) {
    return k / 8 % 2 * 32 + k / 4 % 2 * 16 + k / 16 * 4 + k % 4;
  }

  /// The bit of the scale of the thread's row (0 or 1) in 64 along k number `half` (0 or 1).
  CUTLASS_HOST_DEVICE static constexpr int scale_shift(int half, int row) { return 3 + 7 * (2 * half + row); }

  /// A word from eight codes, code i in nibble i.
  CUTLASS_HOST_DEVICE static constexpr uint32_t word_of(uint32_t codes) {
    uint32_t word = codes & 0x77777777u;
    for (int i = 0; i < 8; ++i) {
      word |= (codes >> (4 * i + 3) & 1u) << (i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3);
    }
    return word;
  }

  /// The inverse of word_of.
  CUTLASS_HOST_DEVICE static constexpr uint32_t codes_of(uint32_t word) {
    uint32_t codes = word & 0x77777777u;
    for (int i = 0; i < 8; ++i) {
      codes |= (word >> (i < 4 ? 8 * i + 7 : 8 * (i - 4) + 3) & 1u) << (4 * i + 3);
    }
    return codes;
  }
};

}  // namespace cutlass_evt
