// ldmatrix and stmatrix: 8x8 tiles of 16-bit elements between shared memory and registers (PTX ISA, "Warp
// Level Matrix Load Instruction: ldmatrix", "Warp Level Matrix Store Instruction: stmatrix"). ldmatrix also
// unpacks 8x16 tiles of 4-bit elements with padding (.b8x16.b4x16_p64).
#include "families.hpp"
#include "machine.hpp"

namespace ptxemu {

/// mode: the number of tiles, whether they are transposed, and whether they have 4-bit elements.
bool decode_matrix(Instruction& in) {
  in.mode[0] = in.has("x4") ? 4 : in.has("x2") ? 2 : 1;
  in.mode[1] = in.has("trans");
  in.handler = in.parts[0] == "ldmatrix" ? &Machine::exec_ldmatrix : &Machine::exec_stmatrix;
  in.mode[2] = in.parts[0] == "ldmatrix" && in.has("m8n16") && in.has("b8x16") && in.has("b4x16_p64");
  if (in.mode[2] != 0) {
    return in.mode[1] == 0;
  }
  return in.has("m8n8") && in.has("b16");
}

namespace {

/// The row and column, within a tile, of the element that a lane holds in its lower (0) or upper (1) half
/// register.
struct Element {
  int row, column;
};
Element element_of(int lane, int half, bool transposed) {
  int const row = lane / 4, column = 2 * (lane % 4) + half;
  return transposed ? Element{column, row} : Element{row, column};
}

}  // namespace

Outcome Machine::exec_ldmatrix(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  Row address;
  read(warp, in.operands[1], address);
  u16 tile[4][8][8];
  for (int i = 0; i < in.mode[0] && mask != 0; ++i) {
    for (int r = 0; r < 8; ++r) {  // lane 8 i + r holds the address of row r of tile i
      u64 const at = address[8 * i + r] & 0xFFFFFFFF;
      if (in.mode[2] == 0) {
        memory_read(warp, Space::kShared, at, 16, 8 * i + r, tile[i][r]);
        continue;
      }
      // 16 elements, then 8 bytes of padding. Each becomes the low half of a byte.
      if (at % 16 != 0) {
        fatal("ldmatrix of .b4x16_p64 from 0x%llx, must be a multiple of 16",
              static_cast<unsigned long long>(at));
      }
      u8 packed[8], bytes[16];
      memory_read(warp, Space::kShared, at, sizeof packed, 8 * i + r, packed);
      for (u32 e = 0; e < sizeof bytes; ++e) {
        bytes[e] = static_cast<u8>(packed[e / 2] >> (e % 2 * 4) & 15);
      }
      std::memcpy(tile[i][r], bytes, sizeof bytes);
    }
  }
  Operand const& to = in.operands[0];
  for (int i = 0; i < in.mode[0]; ++i) {
    for (int l = 0; l < kWarpSize; ++l) {
      if (mask >> l & 1) {
        u32 value = 0;
        for (int half = 0; half < 2; ++half) {
          Element const e = element_of(l, half, in.mode[1] != 0);
          value |= static_cast<u32>(tile[i][e.row][e.column]) << (16 * half);
        }
        write(warp, to.kind == Operand::kVector ? to.parts[static_cast<size_t>(i)] : to, l, value);
      }
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_stmatrix(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  Row address, value;
  read(warp, in.operands[0], address);
  Operand const& from = in.operands[1];
  for (int i = 0; i < in.mode[0] && mask != 0; ++i) {
    read(warp, from.kind == Operand::kVector ? from.parts[static_cast<size_t>(i)] : from, value);
    u16 tile[8][8];
    for (int l = 0; l < kWarpSize; ++l) {
      for (int half = 0; half < 2; ++half) {
        Element const e = element_of(l, half, in.mode[1] != 0);
        tile[e.row][e.column] = static_cast<u16>(value[l] >> (16 * half));
      }
    }
    for (int r = 0; r < 8; ++r) {
      memory_write(warp, Space::kShared, address[8 * i + r] & 0xFFFFFFFF, 16, 8 * i + r, tile[r]);
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
