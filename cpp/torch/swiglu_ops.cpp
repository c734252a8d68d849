// SwiGLU and its gradients on CUDA tensors: checks, results, and calls of the C interface.
#include "swiglu_ops.hpp"

#include "fp4gemm/training.h"

namespace fp4gemm_torch {
namespace {

/// The rows of a matrix of the shape, dtype and device of gate. Returns the elements from row to row.
int64_t row_stride_of(char const* name, Tensor const& x, Tensor const& gate, int32_t device) {
  check_dims(name, x, 2);
  check_dtype(name, x, gate.scalar_type());
  check_device(name, x, device);
  check_shape(name, x, gate.size(0), gate.size(1));
  check_unit_stride(name, x, "f");
  return x.size(0) > 1 ? x.stride(0) : x.size(1);  // the stride of a single row may be any number
}

/// What both directions read.
fp4gemm_swiglu_args_t swiglu_args(Tensor const& gate, Tensor const& up, std::optional<Tensor> const& weights,
                                  int32_t device) {
  check_dims("gate", gate, 2);
  fp4gemm_swiglu_args_t args = FP4GEMM_SWIGLU_ARGS_INIT;
  args.m = gate.size(0);
  args.f = gate.size(1);
  args.dtype = dtype_of("gate", gate.scalar_type());
  args.gate = gate.const_data_ptr();
  args.gate_row_stride = row_stride_of("gate", gate, gate, device);
  args.up = up.const_data_ptr();
  args.up_row_stride = row_stride_of("up", up, gate, device);
  args.weights = weights.has_value() ? check_vector("weights", *weights, args.m, false, device) : nullptr;
  return args;
}

}  // namespace

Tensor swiglu(Tensor const& gate, Tensor const& up, std::optional<Tensor> weights) {
  int32_t const device = gate.get_device_index();
  fp4gemm_swiglu_args_t args = swiglu_args(gate, up, weights, device);
  Tensor y = empty(args.m, args.f, gate.scalar_type(), device);
  args.y = y.mutable_data_ptr();
  check_status(fp4gemm_swiglu(&args, device, current_stream(device)));
  return y;
}

std::tuple<Tensor, Tensor, Tensor> swiglu_backward(Tensor const& dy, Tensor const& gate, Tensor const& up,
                                                   std::optional<Tensor> weights) {
  int32_t const device = gate.get_device_index();
  fp4gemm_swiglu_args_t args = swiglu_args(gate, up, weights, device);
  args.dy = dy.const_data_ptr();
  args.dy_row_stride = row_stride_of("dy", dy, gate, device);
  Tensor dgate = empty(args.m, args.f, gate.scalar_type(), device);
  Tensor dup = empty(args.m, args.f, gate.scalar_type(), device);
  Tensor dweights = empty(weights.has_value() ? args.m : 0, -1, ScalarType::Float, device);
  args.dgate = dgate.mutable_data_ptr();
  args.dup = dup.mutable_data_ptr();
  args.dweights = static_cast<float*>(dweights.mutable_data_ptr());
  check_status(fp4gemm_swiglu_backward(&args, device, current_stream(device)));
  return {dgate, dup, dweights};
}

}  // namespace fp4gemm_torch
