// The activations of the GEMM epilogue as data: the one table that the checks and messages of the library
// read. The functions themselves are in cutlass_evt/epilogue/activation.hpp.
#pragma once

#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

struct ActivationInfo {
  fp4gemm_activation_t number;
  char const* name;
  bool is_gated;  // D has half as many columns: gate and up of each column of D are two columns of z
};

inline constexpr ActivationInfo kActivations[] = {
    {FP4GEMM_ACTIVATION_NONE, "none", false},
    {FP4GEMM_ACTIVATION_SILU, "silu", false},
    {FP4GEMM_ACTIVATION_GELU_TANH, "gelu_tanh", false},
    {FP4GEMM_ACTIVATION_RELU2, "relu2", false},
    {FP4GEMM_ACTIVATION_SWIGLU, "swiglu", true},
    {FP4GEMM_ACTIVATION_GELU, "gelu", false},
    {FP4GEMM_ACTIVATION_SWIGLU_OAI, "swiglu_oai", true},
    {FP4GEMM_ACTIVATION_GEGLU_TANH, "geglu_tanh", true},
    {FP4GEMM_ACTIVATION_SWIGLU_LIMIT10, "swiglu_limit10", true},
};

inline constexpr int kNumActivations = sizeof(kActivations) / sizeof(ActivationInfo);

/// The row of an activation, or null for a number that names none.
constexpr ActivationInfo const* activation_info(fp4gemm_activation_t number) {
  for (ActivationInfo const& row : kActivations) {
    if (row.number == number) {
      return &row;
    }
  }
  return nullptr;
}

constexpr bool is_gated(fp4gemm_activation_t number) {
  ActivationInfo const* const row = activation_info(number);
  return row != nullptr && row->is_gated;
}

}  // namespace fp4gemm
