// The activations of the C interface and those of cutlass_evt have the same numbers.
#pragma once

#include "activation.hpp"
#include "cutlass_evt/epilogue/activation.hpp"

namespace fp4gemm {

constexpr bool same_number(fp4gemm_activation_t number, cutlass_evt::Activation activation) {
  return static_cast<int>(number) == static_cast<int>(activation);
}
static_assert(same_number(FP4GEMM_ACTIVATION_NONE, cutlass_evt::Activation::kNone) &&
                  same_number(FP4GEMM_ACTIVATION_SILU, cutlass_evt::Activation::kSilu) &&
                  same_number(FP4GEMM_ACTIVATION_GELU_TANH, cutlass_evt::Activation::kGeluTanh) &&
                  same_number(FP4GEMM_ACTIVATION_RELU2, cutlass_evt::Activation::kRelu2),
              "an activation has one number in fp4gemm.h and another in cutlass_evt");

/// What an epilogue that is not gated applies.
inline cutlass_evt::Activation kernel_activation(fp4gemm_activation_t number) {
  return static_cast<cutlass_evt::Activation>(number);
}

}  // namespace fp4gemm
