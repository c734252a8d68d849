// Integer names, the operand types of PTX, bit casts, and the exception that ends a launch.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ptxemu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int kWarpSize = 32;
constexpr u32 kFullMask = 0xFFFFFFFFu;  // all lanes of a warp

/// The types of PTX operands (PTX ISA, "Types"). kNone stands for no type or an unknown one.
enum class Type : u8 {
  kNone,
  kPred,
  kB8,
  kU8,
  kS8,
  kB16,
  kU16,
  kS16,
  kF16,
  kBf16,
  kB32,
  kU32,
  kS32,
  kF32,
  kF16x2,
  kBf16x2,
  kB64,
  kU64,
  kS64,
  kF64,
  kB128,
};

/// The type of a name such as "u32"; kNone if there is no such type.
Type parse_type(std::string const& name);

inline int bytes_of(Type type) {
  switch (type) {
    case Type::kNone: return 0;
    case Type::kPred:
    case Type::kB8:
    case Type::kU8:
    case Type::kS8: return 1;
    case Type::kB16:
    case Type::kU16:
    case Type::kS16:
    case Type::kF16:
    case Type::kBf16: return 2;
    case Type::kB64:
    case Type::kU64:
    case Type::kS64:
    case Type::kF64: return 8;
    case Type::kB128: return 16;
    default: return 4;
  }
}

inline bool is_signed(Type type) {
  return type == Type::kS8 || type == Type::kS16 || type == Type::kS32 || type == Type::kS64;
}

/// Whether the type is one floating-point number; the pairs kF16x2 and kBf16x2 are not.
inline bool is_float(Type type) {
  return type == Type::kF16 || type == Type::kBf16 || type == Type::kF32 || type == Type::kF64;
}

/// std::bit_cast of C++20.
template <class To, class From>
To bit_cast(From const& from) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float as_float(u64 bits) { return bit_cast<float>(static_cast<u32>(bits)); }
inline u32 as_bits(float value) { return bit_cast<u32>(value); }

/// The low bytes of a value, zero-extended: registers of every type are stored so in 64 bits.
inline u64 truncate_to(u64 value, Type type) {
  if (type == Type::kPred) {
    return value & 1;
  }
  switch (bytes_of(type)) {
    case 1: return value & 0xFF;
    case 2: return value & 0xFFFF;
    case 4: return value & 0xFFFFFFFFu;
    default: return value;
  }
}

/// The low bytes of a value, read as a signed integer of the type's size.
inline i64 sign_extend(u64 value, Type type) {
  switch (bytes_of(type)) {
    case 1: return static_cast<int8_t>(value);
    case 2: return static_cast<int16_t>(value);
    case 4: return static_cast<i32>(value);
    default: return static_cast<i64>(value);
  }
}

/// An error that ends a launch. LaunchQueue catches it; the destructor of Machine then releases the launch's
/// state.
struct Fatal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Throws Fatal with a text that is formatted as printf formats it.
[[noreturn]] void fatal(char const* format, ...) __attribute__((format(printf, 1, 2)));
std::string format_text(char const* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace ptxemu
