// The activations of the C interface as those of cutlass_evt, which have the same numbers and properties.
#pragma once

#include "activation.hpp"
#include "cutlass_evt/epilogue/activation.hpp"

namespace fp4gemm {

constexpr cutlass_evt::Activation kernel_activation(fp4gemm_activation_t number) {
  return static_cast<cutlass_evt::Activation>(number);
}

static_assert(kernel_activation(FP4GEMM_ACTIVATION_NONE) == cutlass_evt::Activation::kNone);
static_assert(kernel_activation(FP4GEMM_ACTIVATION_SILU) == cutlass_evt::Activation::kSilu);
static_assert(kernel_activation(FP4GEMM_ACTIVATION_GELU_TANH) == cutlass_evt::Activation::kGeluTanh);
static_assert(kernel_activation(FP4GEMM_ACTIVATION_RELU2) == cutlass_evt::Activation::kRelu2);
static_assert(kernel_activation(FP4GEMM_ACTIVATION_SWIGLU) == cutlass_evt::Activation::kSwiGlu);
static_assert(kernel_activation(FP4GEMM_ACTIVATION_GELU) == cutlass_evt::Activation::kGelu);

constexpr bool tables_agree() {
  for (int i = 0; i < kNumActivations; ++i) {
    if (static_cast<int>(kActivations[i].number) != i ||
        kActivations[i].is_gated != cutlass_evt::is_gated(kernel_activation(kActivations[i].number))) {
      return false;
    }
  }
  return kNumActivations == static_cast<int>(cutlass_evt::Activation::kCount);
}
static_assert(tables_agree(), "fp4gemm.h, activation.hpp and cutlass_evt must have the same activations");

}  // namespace fp4gemm
