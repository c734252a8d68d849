// The layout of prepacked NVFP4 weights, and the bit operations that turn them into tensor-core operands.
//
// A weight (n, k) is a row-major matrix of chunks. A chunk covers 64 rows by 64 along k: 2048 bytes of codes,
// then 256 bytes of block scales. Rows and columns beyond n and k are zeros. The codes of a chunk are in the
// order in which the threads of a warpgroup hold the A operand of a wgmma: 16 bytes for each thread, one
// 32-bit word for each 16 along k. So a thread loads its part of a chunk with one 16-byte load.
//
// A word holds eight codes, but not as nibbles. It is such that shifts and an exclusive or move the sign and
// the three other bits of two codes at a time to the sign (bit 15), the two low exponent bits and the high
// mantissa bit (11..9) of an fp16. Those bits are the e2m1 value times 2^-14, subnormals included, and every
// product with an e4m3 scale times 2^7 is exact in fp16. The map from stored to extracted bits is linear over
// GF(2), so packing looks codes up in a table. All shifts but one go to the left and can be multiplications,
// which the multiply-add pipe executes: the ALU pipe, which executes shifts and logic, is the busier one.
//
// The scales are not e4m3 either. A byte is the upper half of an fp16 without its sign, five bits of exponent
// and three of mantissa, of the scale times 2^7. One mask yields two of them, those of rows r and r + 8, as
// the operand of a packed multiplication. The sign of a negative scale is moved to its sixteen codes.
#pragma once

#include <cstdint>

#include "cutlass/cutlass.h"

namespace cutlass_evt {

/// Factors that shift a word to the left by 3, 7 and 10 bits. If the compiler knows their values, it makes
/// shifts of the multiplications, most of which ptxas assigns to the ALU pipe; see MixedInputWgmmaMultiply.
struct Nvfp4Shifts {
  uint32_t by_3 = 1u << 3;
  uint32_t by_7 = 1u << 7;
  uint32_t by_10 = 1u << 10;
};

struct Nvfp4Packing {
  static constexpr int kRows = 64;   // rows of a chunk
  static constexpr int kDepth = 64;  // extent of a chunk along k
  static constexpr int kCodeBytes = 2048;
  static constexpr int kScaleBytes = 256;
  static constexpr int kChunkBytes = kCodeBytes + kScaleBytes;
  static constexpr int kWordsPerThread = 4;  // one for each 16 along k

  // A decoded operand is value * scale * 2^-7.
  static constexpr int kExponent = 7;

  static constexpr int kTableBytes = 0;  // of shared memory that decoding needs

  /// The chunks that cover n rows, and k elements.
  CUTLASS_HOST_DEVICE static constexpr int64_t row_chunks(int64_t n) { return (n + kRows - 1) / kRows; }
  CUTLASS_HOST_DEVICE static constexpr int64_t depth_chunks(int64_t k) { return (k + kDepth - 1) / kDepth; }

  /// Bytes of one (n, k) weight.
  CUTLASS_HOST_DEVICE static constexpr int64_t bytes(int64_t n, int64_t k) {
    return row_chunks(n) * depth_chunks(k) * kChunkBytes;
  }

  /// The row within the chunk of code `index` (0..7) in a word of `thread` (0..127).
  CUTLASS_HOST_DEVICE static constexpr int row_of(int thread, int index) {
    return thread / 32 * 16 + thread % 32 / 4 + index / 2 % 2 * 8;
  }

  /// Its column within the 16 along k of its word.
  CUTLASS_HOST_DEVICE static constexpr int depth_of(int thread, int index) {
    return index / 4 * 8 + thread % 4 * 2 + index % 2;
  }

  // The scales of a chunk: for each pair of rows r and r + 8 two words, each for two blocks of 16 along k.

  /// The index of the pair of words that has row r.
  CUTLASS_HOST_DEVICE static constexpr int scale_pair(int row) { return row / 16 * 8 + row % 8; }

  static constexpr uint32_t kScaleMask = 0x7F807F80u;

  /// The word for two blocks: their scales of row r are bits 7..0 and 15..8 of `upper`, and those of row r +
  /// 8 the same bits of `lower`.
  CUTLASS_HOST_DEVICE static constexpr uint32_t scale_word(uint32_t upper, uint32_t lower) {
    return pair_of_scales(upper & 255u, lower & 255u) ^
           rotl(pair_of_scales(upper >> 8 & 255u, lower >> 8 & 255u), 8);
  }

  /// The scales of one block as two fp16, times 2^7: row r in the low half, row r + 8 in the high half.
  CUTLASS_HOST_DEVICE static constexpr uint32_t scale_bits(uint32_t word, int block) {
    return (block % 2 == 0 ? word : rotl(word, 24)) & kScaleMask;
  }

  /// The stored byte of an e4m3 number that is not negative.
  CUTLASS_HOST_DEVICE static constexpr uint32_t scale_code(uint32_t e4m3) {
    if (e4m3 == 0x7F) {
      return 0xFF;  // NaN
    }
    if (e4m3 >= 8) {
      return e4m3 + (15 << 3);
    }
    if (e4m3 >= 4) {  // subnormal numbers of e4m3 are normal numbers of fp16
      return (15u << 3) + (e4m3 - 4) * 2;
    }
    return e4m3 >= 2 ? (14u << 3) + (e4m3 - 2) * 4 : e4m3 == 1 ? 13u << 3 : 0u;
  }

  /// The inverse of scale_code.
  CUTLASS_HOST_DEVICE static constexpr uint32_t scale_of(uint32_t code) {
    if (code == 0xFF) {
      return 0x7F;
    }
    if (code >= 16 << 3) {
      return code - (15 << 3);
    }
    if (code >= 15 << 3) {
      return 4 + (code - (15 << 3)) / 2;
    }
    return code >= 14 << 3 ? 2 + (code - (14 << 3)) / 4 : code == 13 << 3 ? 1u : 0u;
  }

  static constexpr uint32_t kMask = 0x8E008E00u;

  CUTLASS_HOST_DEVICE static constexpr uint32_t rotl(uint32_t word, int by) {
    return (word << by) | (word >> (32 - by));
  }

  /// Codes 2 * pair (low half) and 2 * pair + 1 (high half) as the bits of two fp16.
  CUTLASS_HOST_DEVICE static constexpr uint32_t pair_bits(uint32_t word, int pair,
                                                          Nvfp4Shifts const& shifts = {}) {
    switch (pair) {
      case 0: return word & kMask;
      case 1: return word * shifts.by_3 & kMask;
      case 2: return (word * shifts.by_7 ^ word * shifts.by_10) & kMask;
      default: return (word * shifts.by_7 ^ rotl(word, 12)) & kMask;
    }
  }

  /// The four bits of code `index` of a word.
  CUTLASS_HOST_DEVICE static constexpr uint32_t code_of(uint32_t word, int index) {
    uint32_t const half = pair_bits(word, index / 2) >> (index % 2 * 16);
    return (half >> 12 & 8u) | (half >> 9 & 7u);
  }

 private:
  CUTLASS_HOST_DEVICE static constexpr uint32_t pair_of_scales(uint32_t upper, uint32_t lower) {
    return upper << 7 | lower << 23;
  }
};

/// The table that packs codes: a word is the exclusive or of words[index][code] over its eight codes.
struct Nvfp4WordTable {
  uint32_t words[8][16] = {};

  /// Inverts the 32 x 32 bit matrix of pair_bits by Gauss-Jordan elimination over GF(2), at compile time.
  constexpr Nvfp4WordTable() {
    // Low half: the stored bits that make bit r of the codes. High half: the inverse.
    uint64_t rows[32] = {};
    for (int r = 0; r < 32; ++r) {
      rows[r] = uint64_t{1} << (32 + r);
      for (int bit = 0; bit < 32; ++bit) {
        uint32_t const code = Nvfp4Packing::code_of(uint32_t{1} << bit, r / 4);
        rows[r] |= static_cast<uint64_t>(code >> (r % 4) & 1u) << bit;
      }
    }
    for (int column = 0; column < 32; ++column) {
      int pivot = column;
      while ((rows[pivot] >> column & 1u) == 0) {
        ++pivot;  // leaves the array, and so does not compile, if the map has no inverse
      }
      uint64_t const found = rows[pivot];
      rows[pivot] = rows[column];
      rows[column] = found;
      for (int r = 0; r < 32; ++r) {
        if (r != column && (rows[r] >> column & 1u) != 0) {
          rows[r] ^= found;
        }
      }
    }
    for (int index = 0; index < 8; ++index) {
      for (uint32_t code = 0; code < 16; ++code) {
        for (int bit = 0; bit < 32; ++bit) {
          uint32_t const sources = static_cast<uint32_t>(rows[bit] >> (32 + 4 * index)) & code;
          uint32_t const parity = (0x6996u >> (sources & 15u)) & 1u;
          words[index][code] |= parity << bit;
        }
      }
    }
  }
};

inline constexpr Nvfp4WordTable kNvfp4Words{};

}  // namespace cutlass_evt
