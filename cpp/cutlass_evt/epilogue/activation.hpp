// Activations of the epilogue, made of single fp32 operations, so that every backend computes the same bits.
#pragma once

#include <cmath>
#include <utility>

#include "cutlass_evt/epilogue/arguments.hpp"
#include "cutlass_evt/epilogue/arithmetic.hpp"

namespace cutlass_evt {

/// The activations of the epilogue, numbered as in fp4gemm_activation_t. Each has a name and a Formula below;
/// to add one, add its enumerator here, its name and its Formula there.
enum class Activation : int {
  kNone = 0,
  kSilu = 1,
  kGeluTanh = 2,
  kRelu2 = 3,
  kSwiGlu = 4,
  kGelu = 5,
  kSwiGluOai = 6,
  kGeGluTanh = 7,
  kSwiGluLimit10 = 8,
  kCount  // the number of activations, not one of them
};

/// The names of the enumerators, in their order, as the C interface spells them.
inline constexpr char const* kActivationNames[] = {
    "none", "silu", "gelu_tanh", "relu2", "swiglu", "gelu", "swiglu_oai", "geglu_tanh", "swiglu_limit10"};
static_assert(sizeof(kActivationNames) / sizeof(char const*) == static_cast<int>(Activation::kCount),
              "every activation needs a name");

namespace nodes {

/// z / (1 + e(u)), e(u) = exp(-u) with u clamped to -87..87. The relative error of e is below
/// 1e-6 (1 + |u| / 16). |u| must be at most 2 |z| where |z| < 2^-26: then 1 + e(u) is 2.
CUTLASS_HOST_DEVICE float times_logistic(float z, float u) {
#if defined(__CUDA_ARCH__)
  // The operations of the host's version, as one statement: as separate ones, unrolled over a tile, they
  // double the compiler's time and memory.
  float denominator;
  asm("{\n"
      ".reg .f32 t, s, f, p;\n"
      ".reg .b32 n, m;\n"
      "neg.f32 t, %1;\n"
      "max.f32 t, t, 0fC2AE0000;\n"     // -87
      "min.f32 t, t, 0f42AE0000;\n"     // 87
      "mul.rn.f32 t, t, 0f3FB8AA3B;\n"  // log2 e
      "add.rn.f32 s, t, 0f4B400000;\n"  // 1.5 * 2^23
      "add.rn.f32 f, s, 0fCB400000;\n"
      "sub.rn.f32 f, t, f;\n"
      "mul.rn.f32 p, f, 0f39218489;\n"
      "add.rn.f32 p, p, 0f3AAEC3FF;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3C1D955B;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3D635847;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3E75FDF0;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3F317218;\n"
      "mul.rn.f32 p, f, p;\n"
      "add.rn.f32 p, p, 0f3F800000;\n"
      "mov.b32 n, s;\n"
      "shl.b32 n, n, 23;\n"
      "mov.b32 m, p;\n"
      "add.s32 n, n, m;\n"
      "mov.b32 p, n;\n"
      "add.rn.f32 %0, p, 0f3F800000;\n"
      "}"
      : "=f"(denominator)
      : "f"(u));
  return divide_by_normal(z, denominator);
#else
  multiply_rn<float> const multiply;
  add_rn<float> const add;
  float const t = multiply(std::fmin(std::fmax(-u, -87.0f), 87.0f), 1.44269502f);  // log2 e
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits of the sum then hold.
  float const shifted = add(t, 12582912.0f);
  float const f = add(t, -add(shifted, -12582912.0f));
  float p = 0.00015403530f;  // 2^f on -0.5..0.5
  p = add(multiply(f, p), 0.0013333558f);
  p = add(multiply(f, p), 0.0096181291f);
  p = add(multiply(f, p), 0.055504109f);
  p = add(multiply(f, p), 0.24022651f);
  p = add(multiply(f, p), 0.69314718f);
  p = add(multiply(f, p), 1.0f);
  // The clamp keeps the exponent that is added here within the normal numbers.
  float const e = bits_to_float(float_to_bits(p) + (float_to_bits(shifted) << 23));
  return z / add(1.0f, e);
#endif
}

/// Formula<kKind> defines an activation by what it derives from and a static function of one fp32 number:
///   Logistic  act(z) = z / (1 + e(inner(z)))
///   Direct    act(z) = inner(z)
///   Gated     act(z[2j], z[2j+1]) = g / (1 + e(inner(g))) * factor(z[2j+1]) with g = gate(z[2j])
/// Activations whose expensive part is the same share its machine code that way: the logistic function is
/// instantiated once for all of them.
template <Activation kKind>
struct Formula;

struct Logistic {
  static constexpr bool kIsLogistic = true;
  static constexpr bool kIsGated = false;
};
struct Direct {
  static constexpr bool kIsLogistic = false;
  static constexpr bool kIsGated = false;
};
struct Gated {
  static constexpr bool kIsGated = true;
  CUTLASS_HOST_DEVICE static float gate(float z) { return z; }
  CUTLASS_HOST_DEVICE static float factor(float z) { return z; }
};

template <>
struct Formula<Activation::kNone> : Direct {
  CUTLASS_HOST_DEVICE static float inner(float z) { return z; }
};

template <>
struct Formula<Activation::kSilu> : Logistic {
  CUTLASS_HOST_DEVICE static float inner(float z) { return z; }
};

/// z (1.5957691 + 0.071354814 z^2): 2 sqrt(2 / pi), and 0.044715 times that.
template <>
struct Formula<Activation::kGeluTanh> : Logistic {
  CUTLASS_HOST_DEVICE static float inner(float z) {
    multiply_rn<float> const multiply;
    return multiply(z, add_rn<float>{}(1.5957691f, multiply(0.071354814f, multiply(z, z))));
  }
};

/// max(z, 0)^2; NaN stays NaN.
template <>
struct Formula<Activation::kRelu2> : Direct {
  CUTLASS_HOST_DEVICE static float inner(float z) {
    float const positive = z <= 0.0f ? 0.0f : z;
    return multiply_rn<float>{}(positive, positive);
  }
};

/// z Phi(z) with the normal distribution function Phi, 0.5 z (1 + erf(z / sqrt 2)). The logistic function of
/// log(Phi / (1 - Phi)) is Phi; a polynomial approximates that logarithm up to |z| = 5.5, and beyond it grows
/// linearly, where act(z) is z or nearly 0. The error is below 3e-7 max(1, |z|).
template <>
struct Formula<Activation::kGelu> : Logistic {
  CUTLASS_HOST_DEVICE static float inner(float z) {
    multiply_rn<float> const multiply;
    add_rn<float> const add;
    float const square = multiply(z, z);
    float const s = square < 30.25f ? square : 30.25f;
    float p = 1.03947591e-12f;
    p = add(multiply(s, p), -1.63144137e-10f);
    p = add(multiply(s, p), 1.10171632e-08f);
    p = add(multiply(s, p), -4.16529645e-07f);
    p = add(multiply(s, p), 9.45786996e-06f);
    p = add(multiply(s, p), -0.000118352342f);
    p = add(multiply(s, p), -4.65867997e-05f);
    p = add(multiply(s, p), 0.0726476759f);
    p = add(multiply(s, p), 1.59577537f);
    return multiply(z, p);
  }
};

/// silu(gate) * up.
template <>
struct Formula<Activation::kSwiGlu> : Gated {
  CUTLASS_HOST_DEVICE static float inner(float g) { return g; }
};

/// g / (1 + e(1.702 g)) * (1 + clamp(up, -7, 7)), g = min(gate, 7): the activation of GPT-OSS. NaN stays NaN.
template <>
struct Formula<Activation::kSwiGluOai> : Gated {
  CUTLASS_HOST_DEVICE static float gate(float z) { return z > 7.0f ? 7.0f : z; }
  CUTLASS_HOST_DEVICE static float inner(float g) { return multiply_rn<float>{}(1.702f, g); }
  CUTLASS_HOST_DEVICE static float factor(float z) {
    return add_rn<float>{}(1.0f, z > 7.0f ? 7.0f : z < -7.0f ? -7.0f : z);
  }
};

/// gelu_tanh(gate) * up.
template <>
struct Formula<Activation::kGeGluTanh> : Gated {
  CUTLASS_HOST_DEVICE static float inner(float g) { return Formula<Activation::kGeluTanh>::inner(g); }
};

/// silu(min(gate, 10)) * clamp(up, -10, 10): the activation of DeepSeek-V4's experts. NaN stays NaN.
template <>
struct Formula<Activation::kSwiGluLimit10> : Gated {
  CUTLASS_HOST_DEVICE static float gate(float z) { return z > 10.0f ? 10.0f : z; }
  CUTLASS_HOST_DEVICE static float inner(float g) { return g; }
  CUTLASS_HOST_DEVICE static float factor(float z) { return z > 10.0f ? 10.0f : z < -10.0f ? -10.0f : z; }
};

/// Calls visit(Formula<kind>{}) for one of the enumerators in kKinds. Every enumerator must have a Formula:
/// the template that one without selects is not defined.
template <int... kKinds, class Visit>
CUTLASS_HOST_DEVICE constexpr void visit_formula(Activation kind, Visit const& visit,
                                                 std::integer_sequence<int, kKinds...>) {
  static_cast<void>(
      ((static_cast<int>(kind) == kKinds && (visit(Formula<static_cast<Activation>(kKinds)>{}), true)) ||
       ...));
}
template <class Visit>
CUTLASS_HOST_DEVICE constexpr void visit_formula(Activation kind, Visit const& visit) {
  visit_formula(kind, visit, std::make_integer_sequence<int, static_cast<int>(Activation::kCount)>{});
}

/// values[0..N-1] = act(values[i]) for an activation that is not gated. They are dispatched two at a time:
/// more would hold more registers, and one would branch more often.
///
/// The logistic activations meet in one loop, since times_logistic, unrolled over a tile for each of them,
/// would multiply the code and the time to compile it.
template <int N, class Values>
CUTLASS_HOST_DEVICE void activate_all(Activation kind, Values& values) {
  constexpr int kChunk = N % 2 == 0 ? 2 : 1;
  CUTLASS_PRAGMA_UNROLL
  for (int first = 0; first < N; first += kChunk) {
    float inner[kChunk];
    bool is_logistic = false;
    visit_formula(kind, [&](auto formula) {
      using Found = decltype(formula);
      if constexpr (!Found::kIsGated) {
        is_logistic = Found::kIsLogistic;
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kChunk; ++i) {
          (Found::kIsLogistic ? inner[i] : values[first + i]) = Found::inner(values[first + i]);
        }
      }
    });
    if (is_logistic) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kChunk; ++i) {
        values[first + i] = times_logistic(values[first + i], inner[i]);
      }
    }
  }
}

/// values[j] = act(values[2j], values[2j+1]) for j < N / 2 and a gated activation, two pairs at a time. All
/// of them meet in times_logistic, as in activate_all.
template <int N, class Values>
CUTLASS_HOST_DEVICE void activate_pairs(Activation kind, Values& values) {
  constexpr int kChunk = N % 4 == 0 ? 2 : 1;
  CUTLASS_PRAGMA_UNROLL
  for (int first = 0; first < N / 2; first += kChunk) {
    float gate[kChunk];
    float inner[kChunk];
    float factor[kChunk];
    visit_formula(kind, [&](auto formula) {
      using Found = decltype(formula);
      if constexpr (Found::kIsGated) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kChunk; ++i) {
          gate[i] = Found::gate(values[2 * (first + i)]);
          inner[i] = Found::inner(gate[i]);
          factor[i] = Found::factor(values[2 * (first + i) + 1]);
        }
      }
    });
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kChunk; ++i) {
      values[first + i] = multiply_rn<float>{}(times_logistic(gate[i], inner[i]), factor[i]);
    }
  }
}

/// values[j] = act(values[2j], values[2j+1]) for j < N / 2 and the gated activation Formula, all pairs at
/// once, so that their latencies overlap.
template <class Formula, int N>
CUTLASS_HOST_DEVICE void activate_pairs_by(float (&values)[N]) {
  float gate[N / 2];
  float inner[N / 2];
  float factor[N / 2];
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N / 2; ++i) {
    gate[i] = Formula::gate(values[2 * i]);
    inner[i] = Formula::inner(gate[i]);
    factor[i] = Formula::factor(values[2 * i + 1]);
  }
  CUTLASS_PRAGMA_UNROLL
  for (int i = 0; i < N / 2; ++i) {
    values[i] = multiply_rn<float>{}(times_logistic(gate[i], inner[i]), factor[i]);
  }
}

}  // namespace nodes

/// True for the activations that make one column of D of two of the product.
CUTLASS_HOST_DEVICE constexpr bool is_gated(Activation kind) {
  bool gated = false;
  nodes::visit_formula(kind, [&](auto formula) { gated = decltype(formula)::kIsGated; });
  return gated;
}

}  // namespace cutlass_evt
