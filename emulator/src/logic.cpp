// Logic, shifts, bit fields and selection (PTX ISA, "Logic and Shift Instructions"; of "Integer Arithmetic
// Instructions" bfe, bfi, bfind, brev, clz and popc; "prmt", "selp").
#include <algorithm>

#include "families.hpp"
#include "lanes.hpp"

namespace ptxemu {

namespace {

/// Defines an operation on up to three operands of `bits` bits, for bit_lanes.
#define PTXEMU_BITS(Name, expression)                                                                  \
  struct Name {                                                                                        \
    static u64 run(u64 a, [[maybe_unused]] u64 b, [[maybe_unused]] u64 c, [[maybe_unused]] int bits) { \
      return expression;                                                                               \
    }                                                                                                  \
  };

u64 low_bits(int count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }

u64 shift_right_signed(u64 a, u64 amount, int bits) {
  i64 const value = static_cast<i64>(a << (64 - bits)) >> (64 - bits);  // sign-extended
  return static_cast<u64>(value >> std::min<u64>(amount & 0xFFFFFFFF, static_cast<u64>(bits - 1)));
}

/// bfe: the field of `length` bits at `position`; bits beyond the value are copies of its sign.
u64 extract(u64 a, u64 position, u64 length, int bits, bool is_signed) {
  u64 const p = position & 255, n = length & 255, width = static_cast<u64>(bits);
  if (n == 0) {
    return 0;
  }
  bool const sign = is_signed && (a >> std::min(p + n - 1, width - 1) & 1);
  u64 field = p >= width ? 0 : a >> p;
  field &= low_bits(static_cast<int>(std::min<u64>(n, 64)));
  u64 const have = p >= width ? 0 : std::min(n, width - p);
  return sign ? field | ~low_bits(static_cast<int>(have)) : field;
}

u64 leading_zeros(u64 a, int bits) {
  return a == 0 ? static_cast<u64>(bits) : static_cast<u64>(__builtin_clzll(a) - (64 - bits));
}

u64 reverse(u64 a, int bits) {
  u64 result = 0;
  for (int i = 0; i < bits; ++i) {
    result |= (a >> i & 1) << (bits - 1 - i);
  }
  return result;
}

/// bfind: the position of the highest bit that differs from the sign, or with .shiftamt the shift that moves
/// it to the top.
u64 highest_bit(u64 a, int bits, bool is_signed, bool as_shift) {
  u64 const value = is_signed && (a >> (bits - 1) & 1) ? ~a & low_bits(bits) : a;
  if (value == 0) {
    return 0xFFFFFFFF;
  }
  u64 const zeros = leading_zeros(value, bits);
  return as_shift ? zeros : static_cast<u64>(bits) - 1 - zeros;
}

/// prmt in its default mode: each nibble of the selector picks a byte of {b, a}, or the byte's sign.
u64 permute(u64 a, u64 b, u64 selector) {
  u64 const bytes = (a & 0xFFFFFFFF) | b << 32;
  u64 result = 0;
  for (int i = 0; i < 4; ++i) {
    u64 const nibble = selector >> (4 * i) & 15;
    u64 byte = bytes >> (8 * (nibble & 7)) & 255;
    if (nibble & 8) {
      byte = byte & 0x80 ? 255 : 0;
    }
    result |= byte << (8 * i);
  }
  return result;
}

PTXEMU_BITS(And, a& b)
PTXEMU_BITS(Or, a | b)
PTXEMU_BITS(Xor, a ^ b)
PTXEMU_BITS(Not, ~a)
PTXEMU_BITS(LogicalNot, a == 0)
PTXEMU_BITS(ShiftLeft, (b & 0xFFFFFFFF) >= static_cast<u64>(bits) ? 0 : a << (b & 63))
PTXEMU_BITS(ShiftRight, (b & 0xFFFFFFFF) >= static_cast<u64>(bits) ? 0 : a >> (b & 63))
PTXEMU_BITS(ShiftRightSigned, shift_right_signed(a, b, bits))
PTXEMU_BITS(FunnelLeftClamp, ((b << 32 | a) << std::min<u64>(c & 0xFFFFFFFF, 32)) >> 32)
PTXEMU_BITS(FunnelLeftWrap, ((b << 32 | a) << (c & 31)) >> 32)
PTXEMU_BITS(FunnelRightClamp, (b << 32 | a) >> std::min<u64>(c & 0xFFFFFFFF, 32))
PTXEMU_BITS(FunnelRightWrap, (b << 32 | a) >> (c & 31))
PTXEMU_BITS(Extract, extract(a, b, c, bits, false))
PTXEMU_BITS(ExtractSigned, extract(a, b, c, bits, true))
PTXEMU_BITS(PopulationCount, static_cast<u64>(__builtin_popcountll(a)))
PTXEMU_BITS(LeadingZeros, leading_zeros(a, bits))
PTXEMU_BITS(Reverse, reverse(a, bits))
PTXEMU_BITS(HighestBit, highest_bit(a, bits, false, false))
PTXEMU_BITS(HighestBitShift, highest_bit(a, bits, false, true))
PTXEMU_BITS(HighestBitSigned, highest_bit(a, bits, true, false))
PTXEMU_BITS(HighestBitSignedShift, highest_bit(a, bits, true, true))
PTXEMU_BITS(Permute, permute(a, b, c))
PTXEMU_BITS(Select, c & 1 ? a : b)

template <class Operation, int kBits>
void bit_lanes(Instruction const&, u64* d, u64 const* const* s, u32 mask) {
  if (mask == kFullMask) {  // a loop without branches, which the compiler vectorizes
    for (int l = 0; l < kWarpSize; ++l) {
      d[l] = Operation::run(s[0][l], s[1][l], s[2][l], kBits) & low_bits(kBits);
    }
    return;
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      d[l] = Operation::run(s[0][l], s[1][l], s[2][l], kBits) & low_bits(kBits);
    }
  }
}

template <class Operation>
LaneFunction pick(Type type) {
  if (type == Type::kPred) {
    return bit_lanes<Operation, 1>;
  }
  switch (bytes_of(type)) {
    case 2: return bit_lanes<Operation, 16>;
    case 4: return bit_lanes<Operation, 32>;
    case 8: return bit_lanes<Operation, 64>;
    default: return nullptr;
  }
}

/// lop3.b32: the immediate is the truth table of a function of three bits.
void lop3_lanes(Instruction const&, u64* d, u64 const* const* s, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 result = 0;
      for (int i = 0; i < 8; ++i) {
        if (s[3][l] >> i & 1) {
          result |=
              (i & 4 ? s[0][l] : ~s[0][l]) & (i & 2 ? s[1][l] : ~s[1][l]) & (i & 1 ? s[2][l] : ~s[2][l]);
        }
      }
      d[l] = result & 0xFFFFFFFF;
    }
  }
}

/// bfi d, a, b, position, length: b with a field replaced by the low bits of a.
void insert_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  int const bits = 8 * bytes_of(in.type);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 const position = s[2][l] & 255, length = s[3][l] & 255;
      u64 const field = position >= static_cast<u64>(bits)
                            ? 0
                            : low_bits(static_cast<int>(length)) << position & low_bits(bits);
      d[l] = (s[1][l] & ~field) | (field == 0 ? 0 : s[0][l] << position & field);
    }
  }
}

}  // namespace

/// Types matter by their size alone, except for shr, bfe and bfind, which have signed forms.
bool decode_logic(Instruction& in) {
  std::string const& name = in.parts[0];
  Type const type = in.type = parse_type(in.parts.back());
  if (name == "and") {
    in.lanes = pick<And>(type);
  } else if (name == "or") {
    in.lanes = pick<Or>(type);
  } else if (name == "xor") {
    in.lanes = pick<Xor>(type);
  } else if (name == "not") {
    in.lanes = pick<Not>(type);
  } else if (name == "cnot") {
    in.lanes = pick<LogicalNot>(type);
  } else if (name == "shl") {
    in.lanes = pick<ShiftLeft>(type);
  } else if (name == "shr") {
    in.lanes = is_signed(type) ? pick<ShiftRightSigned>(type) : pick<ShiftRight>(type);
  } else if (name == "shf") {
    bool const wrap = in.has("wrap");
    in.lanes = in.has("l") ? (wrap ? pick<FunnelLeftWrap>(type) : pick<FunnelLeftClamp>(type))
                           : (wrap ? pick<FunnelRightWrap>(type) : pick<FunnelRightClamp>(type));
  } else if (name == "bfe") {
    in.lanes = is_signed(type) ? pick<ExtractSigned>(type) : pick<Extract>(type);
  } else if (name == "bfi") {
    in.lanes = insert_lanes;
  } else if (name == "lop3" && type == Type::kB32 && in.operands.size() == 5) {
    in.lanes = lop3_lanes;
  } else if (name == "prmt" && in.parts.size() == 2) {
    in.lanes = pick<Permute>(type);
  } else if (name == "popc") {
    in.lanes = pick<PopulationCount>(type);
  } else if (name == "clz") {
    in.lanes = pick<LeadingZeros>(type);
  } else if (name == "brev") {
    in.lanes = pick<Reverse>(type);
  } else if (name == "bfind") {
    in.lanes = in.has("shiftamt")
                   ? (is_signed(type) ? pick<HighestBitSignedShift>(type) : pick<HighestBitShift>(type))
                   : (is_signed(type) ? pick<HighestBitSigned>(type) : pick<HighestBit>(type));
  } else if (name == "selp") {
    in.lanes = pick<Select>(type);
  }
  return in.lanes != nullptr;
}

}  // namespace ptxemu
