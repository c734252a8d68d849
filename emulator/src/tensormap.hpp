// Tensor maps in an encoding of the emulator's own, made by its cuTensorMapEncodeTiled.
#pragma once

#include "types.hpp"

namespace ptxemu {

/// A tensor map.
struct TensorMap {
  u64 address;    // of the tensor in global memory
  u64 stride[5];  // bytes between neighbours along a dimension; [0] is not used
  u32 dim[5];     // elements
  u32 box[5];     // elements
  u32 element_stride[5];
  u32 rank;
  u32 dtype;            // CUtensorMapDataType
  u32 swizzle;          // CUtensorMapSwizzle
  bool has_faulty_bit;  // kOutOfBoundsBit

  u32 row_bytes() const;  // bytes of the box along the first dimension
  u32 box_bytes() const;
  /// The bytes of a whole box that a load counts for its mbarrier: without the padding of .b4x16_p64. That is
  /// what CUTLASS's kernels expect (TmaTransactionBytes, of elements with 4 bits).
  u32 counted_bytes() const;
  u64 span_bytes() const;  // from the first byte of the tensor to its last, gaps between rows included
  bool is_dense() const;   // no gaps between rows
  std::string describe() const;
  /// The rule of cuTensorMapEncodeTiled's documentation that the map breaks, or "".
  std::string broken_rule() const;
};

/// What the emulator stores of a tensor map in the first half of the 128 bytes of a CUtensorMap. NVIDIA does
/// not document the real encoding. It fits in 64 bytes too: kernels of the CUTLASS DSL copy no more to shared
/// memory. The one bit of it that code outside of the driver touches, kOutOfBoundsBit, is where the hardware
/// has it.
struct EncodedTensorMap {
  u64 address;
  u32 tag;  // kTensorMapTag, with or without kOutOfBoundsBit
  u8 rank, dtype, swizzle, unused;
  u32 dim[5];
  u32 stride_low[4];  // of the second and later dimensions
  u8 stride_high[4];
  u8 box[5];             // less 1
  u8 element_stride[3];  // less 1, two in a byte

  explicit EncodedTensorMap(TensorMap const& map);
  EncodedTensorMap() = default;
  /// Whether these bytes are a tensor map.
  bool is_valid() const;
  TensorMap decoded() const;
};
static_assert(sizeof(EncodedTensorMap) == 64, "the half of a CUtensorMap that has contents");
/// The bytes of a CUtensorMap.
constexpr u32 kTensorMapBytes = 128;

/// Marks bytes as a tensor map of this emulator.
constexpr u32 kTensorMapTag = 0x78547065;
/// Bit 85 of the map, bit 21 of its second 64-bit word: how addresses beyond the tensor are generated.
/// Drivers up to CUDA 13.2 always set it. On Blackwell it must be 1 for tensors of 128 KiB or more and 0
/// below; older GPUs ignore it. Loads through a map of a smaller tensor with gaps may fault while the bit is
/// set, so callers of cuTensorMapEncodeTiled clear it for tensors that span less than kSmallTensorBytes.
constexpr u32 kOutOfBoundsBit = 1u << 21;
constexpr u64 kSmallTensorBytes = 128 << 10;
static_assert((kTensorMapTag & kOutOfBoundsBit) == 0, "the tag leaves the bit free");

/// The packed data types of CUtensorMapDataType, .b4x16 and .b4x16_p64 in PTX: 16 elements of 4 bits have 8
/// bytes in global memory. In shared memory they have 8 bytes too, or 16 of which the last 8 are a gap.
constexpr u32 kPacked16U4Align8 = 13, kPacked16U4Align16 = 14;
// With the latter a row of the box has so many elements, and begins at a multiple of them.
constexpr u32 kPaddedElements = 128;

u32 element_bits(u32 dtype);  // of a CUtensorMapDataType, in global memory

/// CUtensorMapSwizzle: 16-byte units are permuted within 32, 64 or 128 bytes; kSwizzle128Atom32 permutes
/// units of 32 bytes within 128, for transposed operands of 32-bit elements.
enum Swizzle : u32 { kSwizzleNone, kSwizzle32, kSwizzle64, kSwizzle128, kSwizzle128Atom32 };

/// The shared memory address of the byte that would lie at `address` without a swizzle.
inline u32 swizzled(u32 address, u32 swizzle) {
  switch (swizzle) {
    case kSwizzle32: return address ^ (address >> 3 & 0x10);
    case kSwizzle64: return address ^ (address >> 3 & 0x30);
    case kSwizzle128: return address ^ (address >> 3 & 0x70);
    case kSwizzle128Atom32: return address ^ (address >> 2 & 0x60);
    default: return address;
  }
}

/// The bytes within which a swizzle permutes; 0 for none.
inline u32 swizzle_span(u32 swizzle) {
  return swizzle == kSwizzleNone ? 0 : swizzle >= kSwizzle128 ? 128 : 16u << swizzle;
}

}  // namespace ptxemu
