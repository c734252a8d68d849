// Arithmetic on integers of all widths, fp32, fp64, fp16 and bf16, with modifiers (PTX ISA, "Integer
// Arithmetic Instructions", "Floating-Point Instructions", "Half Precision Floating-Point Instructions").
#include <cfenv>
#include <limits>

#include "families.hpp"
#include "lanes.hpp"

namespace ptxemu {

namespace {

/// Defines an operation on up to three values a, b and c of one type, for lanes<T, Operation>.
#define PTXEMU_OPERATION(Name, expression)                          \
  struct Name {                                                     \
    template <class T>                                              \
    static T run(T a, [[maybe_unused]] T b, [[maybe_unused]] T c) { \
      return static_cast<T>(expression);                            \
    }                                                               \
  };

PTXEMU_OPERATION(Add, a + b)
PTXEMU_OPERATION(Sub, a - b)
PTXEMU_OPERATION(Mul, a* b)
PTXEMU_OPERATION(Mad, a* b + c)
PTXEMU_OPERATION(Fma, std::fma(a, b, c))
PTXEMU_OPERATION(Min, b < a ? b : a)
PTXEMU_OPERATION(Max, a < b ? b : a)
PTXEMU_OPERATION(Negate, -a)
PTXEMU_OPERATION(Absolute, a < 0 ? -a : a)
PTXEMU_OPERATION(DivideFloat, a / b)
PTXEMU_OPERATION(Reciprocal, 1 / a)
PTXEMU_OPERATION(SquareRoot, std::sqrt(a))
// Approximations (.approx): the float nearest to the exact result. The hardware's results differ by a few
// ulp.
PTXEMU_OPERATION(ReciprocalRoot, 1 / std::sqrt(static_cast<double>(a)))
PTXEMU_OPERATION(Exp2, std::exp2(static_cast<double>(a)))
PTXEMU_OPERATION(Log2, std::log2(static_cast<double>(a)))
PTXEMU_OPERATION(Tanh, std::tanh(static_cast<double>(a)))
PTXEMU_OPERATION(Sine, std::sin(static_cast<double>(a)))
PTXEMU_OPERATION(Cosine, std::cos(static_cast<double>(a)))
// Division by zero, which PTX leaves undefined, gives all ones. Division by -1 is separate: the quotient of
// the most negative value would overflow in C++.
PTXEMU_OPERATION(Divide, b == 0                    ? static_cast<T>(~T{0})
                         : b == static_cast<T>(-1) ? static_cast<T>(0 - a)
                                                   : a / b)
PTXEMU_OPERATION(DivideUnsigned, b == 0 ? static_cast<T>(~T{0}) : a / b)
PTXEMU_OPERATION(Remainder, b == 0 ? a : b == static_cast<T>(-1) ? 0 : a % b)
PTXEMU_OPERATION(RemainderUnsigned, b == 0 ? a : a % b)

bool is_nan(double x) { return x != x; }
// min and max return the number if the other operand is NaN, and order -0 before +0. With .NaN they return
// NaN instead.
PTXEMU_OPERATION(MinFloat, is_nan(a) ? b : is_nan(b) ? a : a < b || (a == b && std::signbit(a)) ? a : b)
PTXEMU_OPERATION(MaxFloat, is_nan(a) ? b : is_nan(b) ? a : a > b || (a == b && !std::signbit(a)) ? a : b)
PTXEMU_OPERATION(MinNan,
                 is_nan(a) || is_nan(b) ? std::numeric_limits<T>::quiet_NaN() : MinFloat::run(a, b, c))
PTXEMU_OPERATION(MaxNan,
                 is_nan(a) || is_nan(b) ? std::numeric_limits<T>::quiet_NaN() : MaxFloat::run(a, b, c))
PTXEMU_OPERATION(CopySign, std::copysign(b, a))
// min.xorsign.abs: the lesser magnitude with the product of the signs.
PTXEMU_OPERATION(MinXorSign, std::copysign(MinFloat::run(std::abs(a), std::abs(b), c),
                                           std::signbit(a) == std::signbit(b) ? T{1} : T{-1}))

/// The integer type of twice the size.
template <class T>
using Wider = std::conditional_t<
    sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, i32, u32>,
    std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, i64, u64>,
                       std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>>>;

template <class T>
u64 multiply_wide(u64 a, u64 b) {
  return static_cast<u64>(Wider<T>(static_cast<T>(a)) * Wider<T>(static_cast<T>(b)));
}
template <class T>
u64 multiply_high(u64 a, u64 b) {
  return static_cast<std::make_unsigned_t<T>>(Wider<T>(static_cast<T>(a)) * Wider<T>(static_cast<T>(b)) >>
                                              (8 * sizeof(T)));
}

/// mul.hi, mul.wide, mad.hi and mad.wide. kHigh selects the high half of the product, else all of it; kAdd
/// adds the third operand.
template <class T, bool kHigh, bool kAdd>
void multiply_lanes(Instruction const&, u64* d, u64 const* const* s, u32 mask) {
  u64 const result_mask =
      kHigh ? static_cast<std::make_unsigned_t<T>>(-1) : (sizeof(T) == 2 ? 0xFFFFFFFFull : ~0ull);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 const product = kHigh ? multiply_high<T>(s[0][l], s[1][l]) : multiply_wide<T>(s[0][l], s[1][l]);
      d[l] = (product + (kAdd ? s[2][l] : 0)) & result_mask;
    }
  }
}

int const kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};

/// fp32 with any of .ftz, .sat and a rounding direction. The file is compiled with -frounding-math, so that
/// the compiler respects the rounding mode that is set here.
template <class Operation>
void modified_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  std::fesetround(kModes[static_cast<int>(in.rounding)]);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      float v[3] = {as_float(s[0][l]), as_float(s[1][l]), as_float(s[2][l])};
      if (in.flush) {
        for (float& x : v) {
          x = flush_denormal(x);
        }
      }
      volatile float a = v[0], b = v[1],
                     c = v[2];  // volatile: the operation stays between the changes of the mode
      volatile float result = Operation::template run<float>(a, b, c);
      float r = result;
      if (in.flush) {
        r = flush_denormal(r);
      }
      if (in.saturate) {
        r = r > 0 ? (r > 1 ? 1.0f : r) : 0.0f;  // NaN becomes +0
      }
      d[l] = as_bits(r);
    }
  }
  std::fesetround(FE_TONEAREST);
}

template <class Operation>
LaneFunction pick_float(Instruction const& in) {
  bool const modified = in.flush || in.saturate || in.rounding != Rounding::kNearest;
  switch (in.type) {
    case Type::kF32: return modified ? modified_lanes<Operation> : lanes<float, Operation>;
    case Type::kF64: return in.rounding == Rounding::kNearest ? lanes<double, Operation> : nullptr;
    default: break;
  }
  if (in.rounding != Rounding::kNearest || in.saturate || in.has("relu")) {
    return nullptr;
  }
  switch (in.type) {
    case Type::kF16: return lanes<Half, Operation>;
    case Type::kBf16: return lanes<Bf16, Operation>;
    case Type::kF16x2: return lanes<Pair<Half>, Operation>;
    case Type::kBf16x2: return lanes<Pair<Bf16>, Operation>;
    default: return nullptr;
  }
}

template <class Signed, class Unsigned = Signed>
LaneFunction pick_integer(Instruction const& in) {
  if (in.saturate || in.parts[1] == "cc" || in.parts.back() == "cc") {
    return nullptr;
  }
  switch (in.type) {
    case Type::kS16: return lanes<int16_t, Signed>;
    case Type::kS32: return lanes<i32, Signed>;
    case Type::kS64: return lanes<i64, Signed>;
    case Type::kU16:
    case Type::kB16: return lanes<u16, Unsigned>;
    case Type::kU32:
    case Type::kB32: return lanes<u32, Unsigned>;
    case Type::kU64:
    case Type::kB64: return lanes<u64, Unsigned>;
    default: return nullptr;
  }
}

template <bool kHigh, bool kAdd>
LaneFunction pick_multiply(Type type) {
  switch (type) {
    case Type::kS16: return multiply_lanes<int16_t, kHigh, kAdd>;
    case Type::kU16: return multiply_lanes<u16, kHigh, kAdd>;
    case Type::kS32: return multiply_lanes<i32, kHigh, kAdd>;
    case Type::kU32: return multiply_lanes<u32, kHigh, kAdd>;
    case Type::kS64: return kHigh ? multiply_lanes<i64, true, kAdd> : nullptr;
    case Type::kU64: return kHigh ? multiply_lanes<u64, true, kAdd> : nullptr;
    default: return nullptr;
  }
}

/// min and max of two values of any type, also of pairs of 16-bit integers.
template <class Float, class Nan, class Integer>
LaneFunction pick_extremum(Instruction const& in) {
  if (in.has("xorsign") || in.has("abs")) {
    return nullptr;
  }
  if (in.parts.back() == "u16x2") {
    return lanes<Pair<u16>, Integer>;
  }
  if (in.parts.back() == "s16x2") {
    return lanes<Pair<int16_t>, Integer>;
  }
  if (is_float(in.type) || in.type == Type::kF16x2 || in.type == Type::kBf16x2) {
    return in.has("NaN") ? pick_float<Nan>(in) : pick_float<Float>(in);
  }
  return pick_integer<Integer>(in);
}

/// min and max of three inputs, as two operations on two.
template <LaneFunction (*kPick)(Instruction const&)>
void three_inputs(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  LaneFunction const two = kPick(in);
  u64 first[kWarpSize];
  u64 const* sources[3] = {s[0], s[1], s[1]};
  two(in, first, sources, mask);
  u64 const* rest[3] = {first, s[2], s[2]};
  two(in, d, rest, mask);
}

template <class Operation>
LaneFunction pick_add(Instruction const& in) {
  return is_float(in.type) || in.type == Type::kF16x2 || in.type == Type::kBf16x2
             ? pick_float<Operation>(in)
             : pick_integer<Operation>(in);
}

/// .f32x2: the operation on both halves of registers of 64 bits.
template <class Operation>
void pair_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  LaneFunction const one = pick_float<Operation>(in);
  u64 halves[3][kWarpSize] = {}, result[2][kWarpSize] = {};
  u64 const* const sources[3] = {halves[0], halves[1], halves[2]};
  for (int half = 0; half < 2; ++half) {
    for (size_t i = 0; i + 1 < in.operands.size(); ++i) {
      for (int l = 0; l < kWarpSize; ++l) {
        halves[i][l] = s[i][l] >> 32 * half & 0xFFFFFFFF;
      }
    }
    one(in, result[half], sources, mask);
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      d[l] = result[0][l] | result[1][l] << 32;
    }
  }
}

LaneFunction pick_pair(std::string const& name) {
  return name == "add"   ? pair_lanes<Add>
         : name == "sub" ? pair_lanes<Sub>
         : name == "mul" ? pair_lanes<Mul>
         : name == "fma" ? pair_lanes<Fma>
                         : nullptr;
}

/// The lane function of an instruction; null if it is not modelled.
LaneFunction pick(Instruction const& in) {
  std::string const& name = in.parts[0];
  bool const floating = is_float(in.type) || in.type == Type::kF16x2 || in.type == Type::kBf16x2;
  bool const three = in.operands.size() == 4;
  if (name == "add") {
    return pick_add<Add>(in);
  } else if (name == "sub") {
    return pick_add<Sub>(in);
  } else if (name == "mul" || name == "mad") {
    bool const add = name == "mad";
    if (in.has("wide")) {
      return add ? pick_multiply<false, true>(in.type) : pick_multiply<false, false>(in.type);
    } else if (in.has("hi")) {
      return add ? pick_multiply<true, true>(in.type) : pick_multiply<true, false>(in.type);
    }
    return add ? (floating ? pick_float<Fma>(in) : pick_integer<Mad>(in)) : pick_add<Mul>(in);
  } else if (name == "fma") {
    return pick_float<Fma>(in);
  } else if (name == "div") {
    return floating ? pick_float<DivideFloat>(in) : pick_integer<Divide, DivideUnsigned>(in);
  } else if (name == "rem") {
    return pick_integer<Remainder, RemainderUnsigned>(in);
  } else if (name == "min" && in.has("xorsign")) {
    return three || in.has("NaN") ? nullptr : pick_float<MinXorSign>(in);
  } else if (name == "min") {
    return three ? three_inputs<pick_extremum<MinFloat, MinNan, Min>>
                 : pick_extremum<MinFloat, MinNan, Min>(in);
  } else if (name == "max") {
    return three ? three_inputs<pick_extremum<MaxFloat, MaxNan, Max>>
                 : pick_extremum<MaxFloat, MaxNan, Max>(in);
  } else if (name == "neg") {
    return pick_add<Negate>(in);
  } else if (name == "abs") {
    return floating ? nullptr : pick_integer<Absolute>(in);
  } else if (name == "copysign") {
    return pick_float<CopySign>(in);
  }
  using Pick = LaneFunction (*)(Instruction const&);
  static std::map<std::string, Pick> const functions = {{"rcp", pick_float<Reciprocal>},
                                                        {"sqrt", pick_float<SquareRoot>},
                                                        {"rsqrt", pick_float<ReciprocalRoot>},
                                                        {"ex2", pick_float<Exp2>},
                                                        {"lg2", pick_float<Log2>},
                                                        {"tanh", pick_float<Tanh>},
                                                        {"sin", pick_float<Sine>},
                                                        {"cos", pick_float<Cosine>}};
  auto const found = functions.find(name);
  return found == functions.end() ? nullptr : found->second(in);
}

/// abs of floating-point types: clears the sign bits, so that a NaN keeps its payload.
template <u64 kMask>
void and_lanes(Instruction const&, u64* d, u64 const* const* s, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      d[l] = s[0][l] & kMask;
    }
  }
}

}  // namespace

bool decode_arithmetic(Instruction& in) {
  bool const pair = in.parts.back() == "f32x2";
  in.type = pair ? Type::kF32 : parse_type(in.parts.back());
  in.flush = in.has("ftz") && in.type == Type::kF32;
  in.saturate = in.has("sat");
  in.rounding = in.has("rz")   ? Rounding::kZero
                : in.has("rm") ? Rounding::kDown
                : in.has("rp") ? Rounding::kUp
                               : Rounding::kNearest;
  if (in.parts[0] == "abs" && !in.flush) {
    switch (in.type) {
      case Type::kF32: in.lanes = and_lanes<0x7FFFFFFF>; return true;
      case Type::kF64: in.lanes = and_lanes<0x7FFFFFFFFFFFFFFF>; return true;
      case Type::kF16:
      case Type::kBf16: in.lanes = and_lanes<0x7FFF>; return true;
      case Type::kF16x2:
      case Type::kBf16x2: in.lanes = and_lanes<0x7FFF7FFF>; return true;
      default: break;
    }
  }
  in.lanes = pair ? pick_pair(in.parts[0]) : pick(in);
  return in.lanes != nullptr;
}

}  // namespace ptxemu
