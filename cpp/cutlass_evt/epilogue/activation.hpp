// Activations of the epilogue, made of single fp32 operations, so that every backend computes the same bits.
#pragma once

#include <cmath>

#include "cutlass/array.h"
#include "cutlass_evt/epilogue/arithmetic.hpp"

namespace cutlass_evt {

enum class Activation : int {
  kNone = 0,
  kSilu = 1,      // z / (1 + exp(-z))
  kGeluTanh = 2,  // z / (1 + exp(-u)), u = z (1.5957691 + 0.071354814 z^2)
  kRelu2 = 3,     // max(z, 0)^2
};

namespace nodes {

/// z / (1 + e(u)), e(u) = exp(-u) with u clamped to -87..87. e's relative error is below 1e-6 times |u| / 16
/// + 1.
CUTLASS_HOST_DEVICE float times_logistic(float z, float u) {
#if defined(__CUDA_ARCH__)
  // The operations of the host's version, as one statement: as separate ones, unrolled over a tile, they
  // double the compiler's time and memory.
  float y;
  asm("{\n"
      ".reg .f32 t, s, f, p;\n"
      ".reg .b32 n, m;\n"
      "neg.f32 t, %2;\n"
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
      "add.rn.f32 p, p, 0f3F800000;\n"
      "div.rn.f32 %0, %1, p;\n"
      "}"
      : "=f"(y)
      : "f"(z), "f"(u));
  return y;
#else
  multiply_rn<float> const multiply;
  add_rn<float> const add;
  float const t = multiply(std::fmin(std::fmax(-u, -87.0f), 87.0f), 1.44269502f);  // log2 e
  // Adding 1.5 * 2^23 rounds to an integer, which then stands in the low bits.
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

/// kSilu and kGeluTanh, which differ in u alone.
CUTLASS_HOST_DEVICE float gate(Activation kind, float z) {
  multiply_rn<float> const multiply;
  float const inner = add_rn<float>{}(1.5957691f, multiply(0.071354814f, multiply(z, z)));
  return times_logistic(z, kind == Activation::kSilu ? z : multiply(z, inner));
}

CUTLASS_HOST_DEVICE float square_of_positive(float z) {
  float const positive = z <= 0.0f ? 0.0f : z;  // keeps NaN
  return multiply_rn<float>{}(positive, positive);
}

CUTLASS_HOST_DEVICE float activate_one(Activation kind, float z) {
  switch (kind) {
    case Activation::kSilu:
    case Activation::kGeluTanh: return gate(kind, z);
    case Activation::kRelu2: return square_of_positive(z);
    case Activation::kNone: break;
  }
  return z;
}

struct ActivationArguments {
  Activation kind = Activation::kNone;
};

/// The functor of a compute node; the activation is chosen at run time, once for a fragment.
template <class T>
struct activate;

template <int N>
struct activate<cutlass::Array<float, N>> {
  using Array = cutlass::Array<float, N>;
  using Arguments = ActivationArguments;

  CUTLASS_HOST_DEVICE Array operator()(Array const& z, Arguments const& args) const {
    Array result = z;
    if (args.kind == Activation::kSilu || args.kind == Activation::kGeluTanh) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        result[i] = gate(args.kind, z[i]);
      }
    } else if (args.kind == Activation::kRelu2) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < N; ++i) {
        result[i] = square_of_positive(z[i]);
      }
    }
    return result;
  }
};

// Sm90Compute looks for Arguments here.
template <>
struct activate<float> {
  using Arguments = ActivationArguments;
};

}  // namespace nodes
}  // namespace cutlass_evt
