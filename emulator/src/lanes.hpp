// Register operations that are written once for a value type and applied to the lanes of a warp.
#pragma once

#include <cmath>

#include "numeric.hpp"

namespace ptxemu {

// Tags for value types that C++ lacks: fp16, bf16, two 16-bit elements in 32 bits, and predicates.
struct Half {
  u16 bits;
};
struct Bf16 {
  u16 bits;
};
template <class Element>
struct Pair {
  u16 low, high;
};
struct Predicate {};

/// Lane<T>::get reads a value of type T from the 64 bits that a lane of a register has, and put writes one.
/// Value is the C++ type in which operations compute.
template <class T>
struct Lane {
  using Value = T;
  static T get(u64 bits) { return static_cast<T>(bits); }
  static u64 put(T value) { return static_cast<std::make_unsigned_t<T>>(value); }
};
template <>
struct Lane<float> {
  using Value = float;
  static float get(u64 bits) { return as_float(bits); }
  static u64 put(float value) { return as_bits(value); }
};
template <>
struct Lane<double> {
  using Value = double;
  static double get(u64 bits) { return bit_cast<double>(bits); }
  static u64 put(double value) { return bit_cast<u64>(value); }
};
// 16-bit floats compute in double. Sums and products of two of them are exact there, so put() rounds once. A
// fused multiply-add is rounded to double first, which changes the result only where the exact sum lies
// within 2^-53 of a tie.
template <>
struct Lane<Half> {
  using Value = double;
  static double get(u64 bits) { return decode_f16(static_cast<u32>(bits)); }
  static u64 put(double value) { return encode_f16(value); }
};
template <>
struct Lane<Bf16> {
  using Value = double;
  static double get(u64 bits) { return decode_bf16(static_cast<u32>(bits) & 0xFFFF); }
  static u64 put(double value) { return encode_bf16(value); }
};

/// Applies Operation::run to one lane.
template <class T, class Operation>
struct Apply {
  using L = Lane<T>;
  static u64 one(u64 a, u64 b, u64 c) { return L::put(Operation::run(L::get(a), L::get(b), L::get(c))); }
};
template <class Element, class Operation>
struct Apply<Pair<Element>, Operation> {
  static u64 one(u64 a, u64 b, u64 c) {
    using A = Apply<Element, Operation>;
    return (A::one(a & 0xFFFF, b & 0xFFFF, c & 0xFFFF) & 0xFFFF) |
           (A::one(a >> 16 & 0xFFFF, b >> 16 & 0xFFFF, c >> 16 & 0xFFFF) & 0xFFFF) << 16;
  }
};
template <class Operation>
struct Apply<Predicate, Operation> {
  static u64 one(u64 a, u64 b, u64 c) { return Operation::run(a, b, c) & 1; }
};

/// A LaneFunction: Operation on values of type T.
template <class T, class Operation>
void lanes(Instruction const&, u64* d, u64 const* const* s, u32 mask) {
  u64 const *a = s[0], *b = s[1], *c = s[2];
  if (mask == kFullMask) {  // a loop without branches, which the compiler vectorizes
    for (int l = 0; l < kWarpSize; ++l) {
      d[l] = Apply<T, Operation>::one(a[l], b[l], c[l]);
    }
    return;
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      d[l] = Apply<T, Operation>::one(a[l], b[l], c[l]);
    }
  }
}

}  // namespace ptxemu
