// Tensor maps, and the instructions that modify one in shared memory and copy it to global memory (PTX ISA,
// "tensormap.replace", "tensormap.cp_fenceproxy").
#include "tensormap.hpp"

#include <algorithm>
#include <cstring>

#include "families.hpp"
#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

namespace {

enum Field { kAddress, kDim, kStride };

constexpr u64 kStrideLimit = 1ull << 40;

}  // namespace

u32 element_bits(u32 dtype) {
  // In the order of CUtensorMapDataType: U8 U16 U32 I32 U64 I64 F16 F32 F64 BF16 F32_FTZ TF32 TF32_FTZ
  // 16U4_ALIGN8B 16U4_ALIGN16B
  static u32 const bits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4};
  if (dtype >= sizeof bits / sizeof bits[0]) {
    fatal("tensor map of data type %u is not modelled", dtype);
  }
  return bits[dtype];
}

EncodedTensorMap::EncodedTensorMap(TensorMap const& map) : EncodedTensorMap() {
  address = map.address;
  tag = kTensorMapTag | (map.has_faulty_bit ? kOutOfBoundsBit : 0);
  rank = static_cast<u8>(map.rank);
  dtype = static_cast<u8>(map.dtype);
  swizzle = static_cast<u8>(map.swizzle);
  unused = 0;
  std::memset(element_stride, 0, sizeof element_stride);
  for (u32 d = 0; d < 5; ++d) {
    dim[d] = map.dim[d];
    box[d] = static_cast<u8>(map.box[d] - 1);
    element_stride[d / 2] |= static_cast<u8>(map.element_stride[d] - 1) << d % 2 * 4;
    if (d > 0) {
      // A stride that does not fit becomes the largest number that does, which breaks a rule as well.
      u64 const stride = std::min(map.stride[d], kStrideLimit - 1);
      stride_low[d - 1] = static_cast<u32>(stride);
      stride_high[d - 1] = static_cast<u8>(stride >> 32);
    }
  }
}

bool EncodedTensorMap::is_valid() const { return (tag & ~kOutOfBoundsBit) == kTensorMapTag; }

TensorMap EncodedTensorMap::decoded() const {
  TensorMap map{};
  map.address = address;
  map.rank = rank;
  map.dtype = dtype;
  map.swizzle = swizzle;
  map.has_faulty_bit = (tag & kOutOfBoundsBit) != 0;
  for (u32 d = 0; d < 5; ++d) {
    map.dim[d] = dim[d];
    map.box[d] = box[d] + 1u;
    map.element_stride[d] = (element_stride[d / 2] >> d % 2 * 4 & 15) + 1u;
    map.stride[d] = d == 0 ? 0 : u64{stride_high[d - 1]} << 32 | stride_low[d - 1];
  }
  return map;
}

u32 TensorMap::row_bytes() const {
  return box[0] * (dtype == kPacked16U4Align16 ? 8 : element_bits(dtype)) / 8;
}

u32 TensorMap::box_bytes() const {
  u32 bytes = row_bytes();
  for (u32 d = 1; d < rank; ++d) {
    bytes *= box[d];
  }
  return bytes;
}

u32 TensorMap::counted_bytes() const { return dtype == kPacked16U4Align16 ? box_bytes() / 2 : box_bytes(); }

u64 TensorMap::span_bytes() const {
  u64 last = (static_cast<u64>(dim[0]) * element_bits(dtype) + 7) / 8;
  for (u32 d = 1; d < rank; ++d) {
    last += (static_cast<u64>(dim[d]) - 1) * stride[d];
  }
  return last;
}

bool TensorMap::is_dense() const {
  u64 elements = 1;
  for (u32 d = 0; d < rank; ++d) {
    elements *= dim[d];
  }
  return elements * element_bits(dtype) / 8 == span_bytes();
}

std::string TensorMap::broken_rule() const {
  bool const padded = dtype == kPacked16U4Align16;
  u32 const alignment = padded ? 32 : 16;
  char const* const of = padded ? " with 16U4_ALIGN16B" : "";
  if (address % alignment != 0) {
    return format_text("globalAddress 0x%llx must be a multiple of %u bytes%s",
                       static_cast<unsigned long long>(address), alignment, of);
  }
  for (u32 d = 0; d < rank; ++d) {
    if (dim[d] == 0) {
      return format_text("globalDim[%u] is 0, must be 1 to 2^32 - 1", d);
    }
    if (box[d] == 0 || box[d] > 256) {
      return format_text("boxDim[%u] is %u, must be 1 to 256", d, box[d]);
    }
    if (element_stride[d] == 0 || element_stride[d] > 8) {
      return format_text("elementStrides[%u] is %u, must be 1 to 8", d, element_stride[d]);
    }
    if (d > 0 && (stride[d] % alignment != 0 || stride[d] >= kStrideLimit)) {
      return format_text("globalStrides[%u] is %llu, must be a multiple of %u bytes below 2^40%s", d - 1,
                         static_cast<unsigned long long>(stride[d]), alignment, of);
    }
  }
  if (dtype == kPacked16U4Align8 && dim[0] % 2 != 0) {
    return format_text("globalDim[0] is %u, must be a multiple of 2 with 16U4_ALIGN8B", dim[0]);
  }
  if (padded && dim[0] % 128 != 0) {
    return format_text("globalDim[0] is %u, must be a multiple of 128 with 16U4_ALIGN16B", dim[0]);
  }
  if (padded && box[0] != 128) {
    return format_text("boxDim[0] is %u, must be 128 with 16U4_ALIGN16B", box[0]);
  }
  if (padded && swizzle != kSwizzleNone && swizzle < kSwizzle128) {
    return format_text("swizzle %u, must be none, 128B or 128B_ATOM_32B with 16U4_ALIGN16B", swizzle);
  }
  if (box[0] * element_bits(dtype) % 128 != 0) {
    return format_text("a row of the box has %u bits, must be a multiple of 16 bytes",
                       box[0] * element_bits(dtype));
  }
  if (u32 const span = swizzle_span(swizzle); span != 0 && row_bytes() > span) {
    return format_text("a row of the box has %u bytes, must be at most the %u of the swizzle", row_bytes(),
                       span);
  }
  return "";
}

std::string TensorMap::describe() const {
  static char const* const swizzles[] = {"none", "32B", "64B", "128B", "128B-atom32B"};
  std::string text = format_text("dtype %u rank %u swizzle %s box ", dtype, rank, swizzles[swizzle]);
  for (u32 d = 0; d < rank; ++d) {
    text += format_text("%s%u", d == 0 ? "" : "x", box[d]);
  }
  return text;
}

/// mode: the field that tensormap.replace changes.
bool decode_tensormap(Instruction& in) {
  if (in.has("cp_fenceproxy")) {
    in.handler = &Machine::exec_tensormap_copy;
    return true;
  }
  in.mode[0] = in.has("global_address")  ? kAddress
               : in.has("global_dim")    ? kDim
               : in.has("global_stride") ? kStride
                                         : -1;
  in.handler = &Machine::exec_tensormap_replace;
  return in.has("replace") && in.mode[0] >= 0 && in.has("shared::cta");
}

/// tensormap.replace.field [shared], value, or [shared], dimension, value. The map may break rules between
/// two of these instructions; its use checks them.
Outcome Machine::exec_tensormap_replace(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row address, second, third;
  read(warp, in.operands[0], address);
  read(warp, in.operands[1], second);
  if (in.mode[0] != kAddress) {
    read(warp, in.operands[2], third);
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    // The address may be generic or in the shared window.
    u64 const at = address[l] >= kSharedWindow ? address[l] - kSharedWindow : address[l];
    u32 offset;
    Cta* const cta = shared_cta(warp.cta, static_cast<u32>(at), false, &offset);
    EncodedTensorMap encoded;
    shared_read(warp, cta, offset, sizeof encoded, &encoded);
    if (!encoded.is_valid()) {
      fatal("tensormap.replace: there is no tensor map at %u", offset);
    }
    TensorMap map = encoded.decoded();
    if (in.mode[0] == kAddress) {
      map.address = second[l];
    } else {
      // The first dimension has no stride, so stride i belongs to dimension i + 1.
      u64 const index = second[l] + (in.mode[0] == kStride ? 1 : 0);
      if (index >= 5) {  // not the map's rank: CUTLASS writes all five dimensions of a map of any rank
        fatal("tensormap.replace of dimension %llu", static_cast<unsigned long long>(second[l]));
      }
      if (in.mode[0] == kDim) {
        map.dim[index] = static_cast<u32>(third[l]);
      } else {
        map.stride[index] = third[l];
      }
    }
    encoded = EncodedTensorMap(map);
    shared_write(warp, cta, offset, sizeof encoded, &encoded);
  }
  return Outcome::kNext;
}

/// tensormap.cp_fenceproxy [global], [shared], 128
Outcome Machine::exec_tensormap_copy(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask != 0) {
    u64 const to = uniform(warp, in.operands[0], mask);
    u32 offset;
    Cta* const cta =
        shared_cta(warp.cta, static_cast<u32>(uniform(warp, in.operands[1], mask)), false, &offset);
    // The half without contents may be uninitialised.
    u8 bytes[kTensorMapBytes];
    std::memcpy(bytes, shared_bytes(cta, offset, sizeof bytes), sizeof bytes);
    shared_read(warp, cta, offset, sizeof(EncodedTensorMap), bytes);
    memory_write(warp, Space::kGlobal, to, sizeof bytes, 0, bytes);
    if (races_ != nullptr) {
      races_->change_map(warp, to);
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
