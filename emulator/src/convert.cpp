// cvt: conversions between integers, floats and packed pairs of small formats (PTX ISA, "cvt").
#include <algorithm>
#include <cmath>

#include "families.hpp"
#include "numeric.hpp"

namespace ptxemu {

namespace {

enum Format { kInteger, kFloat32, kFloat64, kHalf, kBfloat, kE2m1, kE4m3, kE5m2, kE8m0, kUnknown };

/// The source or destination type of a cvt.
struct Side {
  Format format = kUnknown;
  bool packed = false;  // .x2: two elements, of 4 bits in e2m1 and of 8 or 16 bits in other formats
  Type type = Type::kNone;
};

Side side_of(std::string name) {
  Side side;
  side.packed = name.size() > 2 && name.compare(name.size() - 2, 2, "x2") == 0;
  if (side.packed) {
    name.resize(name.size() - 2);
  }
  static std::map<std::string, Format> const formats = {{"f32", kFloat32}, {"f64", kFloat64}, {"f16", kHalf},
                                                        {"bf16", kBfloat}, {"e2m1", kE2m1},   {"e4m3", kE4m3},
                                                        {"e5m2", kE5m2},   {"ue8m0", kE8m0}};
  if (auto const found = formats.find(name); found != formats.end()) {
    side.format = found->second;
    side.type = parse_type(name);
  } else if (Type const type = parse_type(name); type != Type::kNone && !side.packed) {
    side.format = kInteger;
    side.type = type;
  }
  return side;
}

double decode_one(Format format, u32 code) {
  switch (format) {
    case kFloat32: return as_float(code);
    case kHalf: return decode_f16(code);
    case kBfloat: return decode_bf16(code & 0xFFFF);
    case kE2m1: return decode_e2m1(code);
    case kE4m3: return decode_e4m3(code);
    case kE5m2: return decode_e5m2(code);
    default: return decode_e8m0(code);
  }
}

u32 encode_one(Format format, double x, Instruction const& in) {
  if (in.mode[2] != 0) {  // .relu
    x = x > 0 ? x : (x != x ? x : 0);
  }
  switch (format) {
    case kFloat32: return as_bits(round_to_float(x, in.rounding));
    case kHalf: return encode_f16(x, in.rounding, in.saturate);
    case kBfloat: return encode_bf16(x, in.rounding, in.saturate);
    case kE2m1: return encode_e2m1(x, in.rounding);
    case kE4m3: return encode_e4m3(x, in.rounding);
    case kE5m2: return encode_e5m2(x, in.rounding);
    default: return encode_e8m0(x, in.rounding);
  }
}

int bits_of(Format format) {
  switch (format) {
    case kE2m1: return 4;
    case kHalf:
    case kBfloat: return 16;
    case kFloat32: return 32;
    default: return 8;
  }
}

/// Conversions to a packed pair: of two fp32 operands, the first in the upper half, or of the two halves of
/// one operand.
void packed_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  auto const from = static_cast<Format>(in.mode[0]), to = static_cast<Format>(in.mode[1]);
  int const in_bits = bits_of(from), out_bits = bits_of(to);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      bool const two = in.operands.size() > 2;
      u32 const upper = static_cast<u32>(two ? s[0][l] : s[0][l] >> in_bits);
      u32 const lower = static_cast<u32>(two ? s[1][l] : s[0][l]);
      u64 const high = encode_one(to, decode_one(from, upper), in);
      u64 const low = encode_one(to, decode_one(from, lower), in);
      d[l] = high << out_bits | low;
    }
  }
}

void integer_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  auto const from = static_cast<Type>(in.mode[0]);
  Type const to = in.type;
  Type const kept =
      in.operands[0].type;  // the register may be wider than the type, and is then sign-extended
  int const bits = 8 * bytes_of(to);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 value = is_signed(from) ? static_cast<u64>(sign_extend(s[0][l], from)) : truncate_to(s[0][l], from);
      if (in.saturate) {
        // 128 bits hold every value and every bound, signed or not.
        __int128 const wide = is_signed(from) ? __int128(static_cast<i64>(value)) : __int128(value);
        __int128 const low = is_signed(to) ? -(__int128(1) << (bits - 1)) : 0;
        __int128 const high = (__int128(1) << (is_signed(to) ? bits - 1 : bits)) - 1;
        value = static_cast<u64>(wide < low ? low : wide > high ? high : wide);
      }
      value = is_signed(to) ? static_cast<u64>(sign_extend(value, to)) : truncate_to(value, to);
      d[l] = truncate_to(value, kept);
    }
  }
}

void float_to_integer_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  auto const from = static_cast<Format>(in.mode[0]);
  int const bits = 8 * bytes_of(in.type) - (is_signed(in.type) ? 1 : 0);
  // Values are clamped to [low, high), where high is one more than the largest integer.
  double const high = std::ldexp(1.0, bits), low = is_signed(in.type) ? -high : 0;
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      double x = from == kFloat64 ? bit_cast<double>(s[0][l]) : decode_one(from, static_cast<u32>(s[0][l]));
      x = round_to_integer(x, in.rounding);
      u64 value = 0;
      if (x >= high) {
        value = bits == 64 ? ~0ull : (1ull << bits) - 1;
      } else if (x > low) {
        value = x < 0 ? static_cast<u64>(static_cast<i64>(x)) : static_cast<u64>(x);
      } else if (x <= low && is_signed(in.type)) {
        value = 1ull << bits;
      }  // NaN becomes 0
      d[l] = truncate_to(value, in.operands[0].type);
    }
  }
}

template <class Integer>
void integer_to_float_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  auto const to = static_cast<Format>(in.mode[1]);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      auto const value = static_cast<Integer>(s[0][l]);
      if (to == kFloat64) {
        d[l] = bit_cast<u64>(static_cast<double>(value));
      } else if (to == kFloat32 && in.rounding == Rounding::kNearest) {
        d[l] = as_bits(static_cast<float>(value));
      } else {
        d[l] = encode_one(to, static_cast<double>(value), in);
      }
    }
  }
}

void float_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  auto const from = static_cast<Format>(in.mode[0]), to = static_cast<Format>(in.mode[1]);
  bool const to_integer = in.has("rni") || in.has("rzi") || in.has("rmi") || in.has("rpi");
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      double x = from == kFloat64 ? bit_cast<double>(s[0][l]) : decode_one(from, static_cast<u32>(s[0][l]));
      if (in.flush && from == kFloat32) {
        x = flush_denormal(static_cast<float>(x));
      }
      x = to_integer ? round_to_integer(x, in.rounding) : x;
      if (in.saturate && !in.has("satfinite")) {
        x = x > 0 ? (x > 1 ? 1 : x) : 0;
      }
      if (to == kFloat64) {
        d[l] = bit_cast<u64>(x);
      } else {
        d[l] = to_integer ? as_bits(static_cast<float>(x)) : encode_one(to, x, in);
      }
    }
  }
}

LaneFunction from_integer(Type type) {
  switch (type) {
    case Type::kS8: return integer_to_float_lanes<int8_t>;
    case Type::kU8: return integer_to_float_lanes<u8>;
    case Type::kS16: return integer_to_float_lanes<int16_t>;
    case Type::kU16: return integer_to_float_lanes<u16>;
    case Type::kS32: return integer_to_float_lanes<i32>;
    case Type::kU32: return integer_to_float_lanes<u32>;
    case Type::kS64: return integer_to_float_lanes<i64>;
    case Type::kU64: return integer_to_float_lanes<u64>;
    default: return nullptr;
  }
}

}  // namespace

/// mode: the source format (integer conversions: the source type), the destination format, and .relu.
bool decode_cvt(Instruction& in) {
  if (in.parts.size() < 3 || in.has("rs") || in.has("pack") || in.has("scaled")) {
    return false;
  }
  Side const to = side_of(in.parts[in.parts.size() - 2]);
  Side const from = side_of(in.parts.back());
  auto const is = [&](char const* a, char const* b) { return in.has(a) || in.has(b); };
  in.rounding = is("rz", "rzi")   ? Rounding::kZero
                : is("rm", "rmi") ? Rounding::kDown
                : is("rp", "rpi") ? Rounding::kUp
                                  : Rounding::kNearest;
  in.flush = in.has("ftz");
  in.saturate = in.has("sat") || in.has("satfinite");
  in.type = to.type;
  in.mode[0] = from.format;
  in.mode[1] = to.format;
  in.mode[2] = in.has("relu");
  if (to.format == kUnknown || from.format == kUnknown || in.has("rna")) {
    return false;
  }
  if (to.packed) {
    bool const from_two = from.format == kFloat32 && in.operands.size() == 3;
    if (from_two || (from.packed && in.operands.size() == 2)) {
      in.lanes = packed_lanes;
    }
  } else if (from.format == kInteger && to.format == kInteger) {
    in.mode[0] = static_cast<int>(from.type);
    in.lanes = integer_lanes;
  } else if (to.format == kInteger) {
    in.lanes = float_to_integer_lanes;
  } else if (from.format == kInteger) {
    in.lanes = from_integer(from.type);
  } else if (from.type != Type::kNone && to.type != Type::kNone) {
    in.lanes = float_lanes;
  }
  return in.lanes != nullptr;
}

}  // namespace ptxemu
