// Matrix descriptors of shared memory, as tcgen05.mma and tcgen05.cp take them.
#pragma once

#include <string>
#include <utility>

#include "tensormap.hpp"

namespace ptxemu {

// start >> 4 : 14 | leading byte offset >> 4 : 14 at 16 | stride byte offset >> 4 : 14 at 32 | version : 2 at
// 46 | base offset : 3 at 49 | leading mode at 52 | layout : 3 at 61
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

/// Bytes of a row of the 8-row atom: 16 without a swizzle.
inline u32 atom_row_bytes(u32 layout) { return layout == 2 ? 128 : layout == 4 ? 64 : layout == 6 ? 32 : 16; }

/// Offset in shared memory of byte `byte` of K-major row `row`.
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

/// The bytes [first, second) that so many rows span.
inline std::pair<u32, u32> descriptor_bytes(u64 bits, u32 rows) {
  Descriptor const d = unpack_descriptor(bits);
  u32 const atom = 8 * atom_row_bytes(d.layout);
  u32 const low = d.layout == 0 ? d.start : d.start & ~(atom - 1);
  // Steps along k stay within a row of the atom; whole rows would have to stand in the base offset, which is
  // 0.
  if (d.layout != 0 && d.start - low >= atom_row_bytes(d.layout)) {
    fatal(
        "matrix at %u of shared memory: its swizzle has a period of %u bytes, at a multiple of which it must "
        "start",
        d.start, atom);
  }
  return {low, low + ((rows + 7) / 8 - 1) * d.stride + atom};
}

inline std::string describe_descriptor(u64 bits) {
  Descriptor const d = unpack_descriptor(bits);
  return format_text("layout %u stride %u leading %u", d.layout, d.stride, d.leading);
}

}  // namespace ptxemu
