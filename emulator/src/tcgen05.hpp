// Matrix descriptors of shared memory, the operands of tcgen05.mma and tcgen05.cp (PTX ISA, "TensorCore 5th
// Generation Family Instructions": "Shared memory descriptor", "Canonical layouts").
#pragma once

#include <string>
#include <utility>

#include "tensormap.hpp"

namespace ptxemu {

/// The fields of a descriptor. `start`, `leading` and `stride` are in bytes; the descriptor holds them
/// divided by 16. `leading` is the distance of 16-byte columns without a swizzle, `stride` that of groups of
/// 8 rows, and `layout` the swizzle: 0 none, 2 128 bytes, 4 64 bytes, 6 32 bytes.
struct Descriptor {
  u32 start, leading, stride, version, base_offset, leading_mode, layout;
};

inline Descriptor unpack_descriptor(u64 bits) {
  return {static_cast<u32>(bits & 0x3FFF) << 4,
          static_cast<u32>(bits >> 16 & 0x3FFF) << 4,
          static_cast<u32>(bits >> 32 & 0x3FFF) << 4,
          static_cast<u32>(bits >> 46 & 3),
          static_cast<u32>(bits >> 49 & 7),
          static_cast<u32>(bits >> 52 & 1),
          static_cast<u32>(bits >> 61 & 7)};
}

/// The bytes of a row in the atom of 8 rows within which a layout permutes; 16 without a swizzle.
inline u32 atom_row_bytes(u32 layout) { return layout == 2 ? 128 : layout == 4 ? 64 : layout == 6 ? 32 : 16; }

/// The offset in shared memory of a byte of a row of a K-major matrix. A swizzle is a function of the
/// address, as that of TMA is (tensormap.hpp), so that a matrix may start at any row of the pattern, which
/// repeats after 8 rows of the atom. The base offset of a descriptor is for patterns that start elsewhere
/// than at a multiple of that period, which TMA does not write.
inline u32 descriptor_address(u64 bits, u32 row, u32 byte) {
  Descriptor const d = unpack_descriptor(bits);
  if (d.version != 1 || d.base_offset != 0 || d.leading_mode != 0) {
    fatal("matrix descriptor 0x%llx: version %u, base offset %u, leading mode %u are not modelled",
          static_cast<unsigned long long>(bits), d.version, d.base_offset, d.leading_mode);
  }
  u32 const atom = d.start + row / 8 * d.stride + row % 8 * atom_row_bytes(d.layout);
  switch (d.layout) {
    case 0: return atom + byte / 16 * d.leading + byte % 16;
    case 2: return swizzled(atom + byte, kSwizzle128);
    case 4: return swizzled(atom + byte, kSwizzle64);
    case 6: return swizzled(atom + byte, kSwizzle32);
    default: fatal("matrix descriptor of layout %u is not modelled", d.layout);
  }
}

/// The bytes [first, second) of shared memory that the first `rows` rows of a matrix span. A swizzle permutes
/// bytes within a row of the atom. A start within such a row is a step along k.
inline std::pair<u32, u32> descriptor_bytes(u64 bits, u32 rows) {
  Descriptor const d = unpack_descriptor(bits);
  u32 const row = atom_row_bytes(d.layout);
  u32 const low = d.layout == 0 ? d.start : d.start & ~(row - 1);
  return {low, low + ((rows + 7) / 8 - 1) * d.stride + 8 * row};
}

inline std::string describe_descriptor(u64 bits) {
  Descriptor const d = unpack_descriptor(bits);
  return format_text("layout %u stride %u leading %u", d.layout, d.stride, d.leading);
}

}  // namespace ptxemu
