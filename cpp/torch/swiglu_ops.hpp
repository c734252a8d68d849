// The operators of SwiGLU and its gradients on CUDA tensors; ops.cpp has their schemas.
#pragma once

#include <optional>
#include <tuple>

#include "tensors.hpp"

namespace fp4gemm_torch {

/// y (m, f), as fp4gemm_swiglu of fp4gemm/training.h defines it.
Tensor swiglu(Tensor const& gate, Tensor const& up, std::optional<Tensor> weights);

/// dgate and dup (m, f), and dweights (m), or (0) without weights.
std::tuple<Tensor, Tensor, Tensor> swiglu_backward(Tensor const& dy, Tensor const& gate, Tensor const& up,
                                                   std::optional<Tensor> weights);

}  // namespace fp4gemm_torch
