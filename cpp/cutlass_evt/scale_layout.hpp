// The swizzled layout of block scales, which tensor cores read: tiles of 128 rows by 4 blocks. The header
// needs neither CUTLASS nor a CUDA compiler: kernels and the code for the CPU evaluate the same formula.
#pragma once

#include <cstdint>

namespace cutlass_evt {

/// The byte offset of the scale of (row, block) in the 128x4 swizzled layout. num_words is a quarter of the
/// number of blocks in a row, padding included.
constexpr int64_t scale_offset(int64_t row, int block, int num_words) {
  int const in_tile = static_cast<int>(row % 128);
  return (row / 128 * num_words + block / 4) * 512 + in_tile % 32 * 16 + in_tile / 32 * 4 + block % 4;
}

}  // namespace cutlass_evt
