// Tensor maps in an encoding of our own, made by the replacement cuTensorMapEncodeTiled.
#pragma once

#include "types.hpp"

namespace ptxemu {

struct TensorMap {
  u64 magic;
  u64 address;
  u32 dim[5];
  u32 padding;
  u64 stride[5];  // bytes; [0] unused
  u16 box[5];
  u8 element_stride[5];
  u8 rank, dtype, interleave, swizzle, l2, out_of_bounds;
  u8 reserved[128 - 8 - 8 - 24 - 40 - 10 - 5 - 6];

  u32 row_bytes() const;  // of the box
  u32 box_bytes() const;
  std::string describe() const;
};
static_assert(sizeof(TensorMap) == 128, "a CUtensorMap has 128 bytes");

constexpr u64 kTensorMapMagic = 0x70616d5478747065ull;

u32 element_bits(u32 dtype);  // of a CUtensorMapDataType

/// CUtensorMapSwizzle. 32, 64, 128: units of 16 bytes move within so many; 128 in units of 32 bytes for
/// transposed 32-bit elements.
enum Swizzle : u32 { kSwizzleNone, kSwizzle32, kSwizzle64, kSwizzle128, kSwizzle128Atom32 };

/// The address at which a swizzled TMA box or operand has the byte that without a swizzle would be at
/// `address`.
inline u32 swizzled(u32 address, u32 swizzle) {
  switch (swizzle) {
    case kSwizzle32: return address ^ (address >> 3 & 0x10);
    case kSwizzle64: return address ^ (address >> 3 & 0x30);
    case kSwizzle128: return address ^ (address >> 3 & 0x70);
    case kSwizzle128Atom32: return address ^ (address >> 2 & 0x60);
    default: return address;
  }
}

/// Bytes within which a swizzle moves; 0: none.
inline u32 swizzle_span(u32 swizzle) {
  return swizzle == kSwizzleNone ? 0 : swizzle >= kSwizzle128 ? 128 : 16u << swizzle;
}

}  // namespace ptxemu
