// The activations of the C interface as those of cutlass_evt, which have the same numbers and properties.
#pragma once

#include "activation.hpp"
#include "cutlass_evt/epilogue/activation.hpp"

namespace fp4gemm {

constexpr cutlass_evt::Activation kernel_activation(fp4gemm_activation_t number) {
  return static_cast<cutlass_evt::Activation>(number);
}

constexpr bool are_equal(char const* a, char const* b) {
  while (*a != 0 && *a == *b) {
    ++a;
    ++b;
  }
  return *a == *b;
}

constexpr bool tables_agree() {
  for (int i = 0; i < kNumActivations; ++i) {
    ActivationInfo const& row = kActivations[i];
    if (static_cast<int>(row.number) != i ||
        row.is_gated != cutlass_evt::is_gated(kernel_activation(row.number)) ||
        !are_equal(row.name, cutlass_evt::kActivationNames[i])) {
      return false;
    }
  }
  return kNumActivations == static_cast<int>(cutlass_evt::Activation::kCount);
}
static_assert(tables_agree(), "fp4gemm.h, activation.hpp and cutlass_evt must have the same activations");

}  // namespace fp4gemm
