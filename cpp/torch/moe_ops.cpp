// route, combine and experts on CUDA tensors.
#include "moe_ops.hpp"

#include <string>

#include "fp4gemm/experts.h"
#include "fp4gemm/groups.h"
#include "gemm_call.hpp"
#include "gemm_ops.hpp"
#include "quantize_call.hpp"

namespace fp4gemm_torch {
namespace {

/// Sets the fields of the experts that tokens name, which are contiguous, (num_tokens, top_k).
template <class Args>
void set_ids(Args& args, Tensor const& topk_ids, int64_t num_experts, int32_t device) {
  check_dims("topk_ids", topk_ids, 2);
  check_device("topk_ids", topk_ids, device);
  STD_TORCH_CHECK(topk_ids.is_contiguous(), "topk_ids: must be contiguous");
  ScalarType const type = topk_ids.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, "topk_ids: dtype is ", name_of(type),
                  ", must be Int or Long");
  args.num_tokens = topk_ids.size(0);
  args.top_k = narrow("topk_ids: number of slots", topk_ids.size(1));
  args.num_experts = narrow("num_experts", num_experts);
  args.topk_ids = topk_ids.const_data_ptr();
  args.ids_are_64_bits = type == ScalarType::Long ? 1 : 0;
}

/// Sets the fields of the weights of slots, which are contiguous, (num_tokens, top_k) as those of args.
template <class Args>
void set_topk_weights(Args& args, Tensor const& topk_weights, int32_t device) {
  check_dims("topk_weights", topk_weights, 2);
  check_device("topk_weights", topk_weights, device);
  check_shape("topk_weights", topk_weights, args.num_tokens, args.top_k);
  STD_TORCH_CHECK(topk_weights.is_contiguous(), "topk_weights: must be contiguous");
  args.topk_weights = topk_weights.const_data_ptr();
  args.weights_dtype = dtype_of("topk_weights", topk_weights.scalar_type());
}

/// The arguments of the operator that describe the weights of one product.
struct Weights {
  char const* name;  // with which the names of the arguments begin
  Tensor const& data;
  std::optional<Tensor> const& scales;
  Tensor const& amax;
  std::optional<Tensor> const& bias;
  int64_t prepacked_rows;  // 0: codes and scales
  int64_t e4m3_max;
};

/// The weights of all experts, (n, k) each, from the arguments of the operator. fp8: the tokens are FP8, so
/// that prepacked bytes are in their order.
fp4gemm_expert_weights_t weights_of(Weights const& from, int64_t num_experts, int64_t k, bool fp8,
                                    int32_t device) {
  std::string const prefix = from.name;
  bool const is_prepacked = from.prepacked_rows != 0;
  STD_TORCH_CHECK(from.prepacked_rows >= 0 && from.prepacked_rows <= INT32_MAX, from.name, "_rows: is ",
                  from.prepacked_rows, ", must be between 0 and ", INT32_MAX);
  check_dims(from.name, from.data, is_prepacked ? 2 : 3);
  STD_TORCH_CHECK(from.data.size(0) == num_experts, from.name, ": has ", from.data.size(0),
                  " experts, must have ", num_experts, " as w13");
  fp4gemm_expert_weights_t weights = FP4GEMM_EXPERT_WEIGHTS_INIT;
  weights.n = is_prepacked ? from.prepacked_rows : from.data.size(1);
  if (is_prepacked) {
    STD_TORCH_CHECK(!from.scales.has_value(), prefix, "_scales: must be None for a prepacked weight");
    weights.operand = prepacked_operand(from.name, from.data, fp8, device);
    int64_t const bytes = prepacked_bytes(from.data, weights.n, k);
    STD_TORCH_CHECK(from.data.size(1) == bytes, prefix, ": has ", from.data.size(1),
                    " bytes a matrix, must have ", bytes, ", prepacked (", weights.n, ", ", k, ")");
    weights.is_constant = 1;  // as in the operator gemm
  } else {
    STD_TORCH_CHECK(2 * from.data.size(2) == k, prefix, ": k is ", 2 * from.data.size(2), ", must be ", k);
    STD_TORCH_CHECK(from.scales.has_value(), prefix, "_scales: is None, must be given with codes");
    weights.operand = packed_operand(from.name, (prefix + "_scales").c_str(), from.data, *from.scales,
                                     num_experts, weights.n, k, device);
  }
  weights.e4m3_max = narrow((prefix + "_e4m3_max").c_str(), from.e4m3_max);
  check_matrix((prefix + "_amax").c_str(), from.amax, ScalarType::Float, device);
  bool const one_amax = from.amax.size(1) == 1;
  STD_TORCH_CHECK(from.amax.size(0) == num_experts && (one_amax || from.amax.size(1) == weights.n), prefix,
                  "_amax: shape is (", from.amax.size(0), ", ", from.amax.size(1), "), must be (",
                  num_experts, ", ", weights.n, ") or (", num_experts, ", 1)");
  weights.scaling = one_amax ? FP4GEMM_SCALING_TENSOR : FP4GEMM_SCALING_ROW;
  weights.amax = static_cast<float const*>(from.amax.const_data_ptr());
  if (from.bias.has_value()) {
    std::string const of_bias = prefix + "_bias";
    check_matrix(of_bias.c_str(), *from.bias, ScalarType::Float, device);
    check_shape(of_bias.c_str(), *from.bias, num_experts, weights.n);
    weights.bias = static_cast<float const*>(from.bias->const_data_ptr());
  }
  return weights;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> route(Tensor const& topk_ids, int64_t num_experts) {
  int32_t const device = topk_ids.get_device_index();
  fp4gemm_route_args_t args = FP4GEMM_ROUTE_ARGS_INIT;
  set_ids(args, topk_ids, num_experts, device);
  size_t bytes = 0;
  check_status(fp4gemm_route_workspace_bytes(&args, &bytes));
  Tensor const offs = empty(args.num_experts, -1, ScalarType::Int, device);
  Tensor const token_of_row = empty(args.num_tokens * args.top_k, -1, ScalarType::Int, device);
  Tensor const row_of_pair = empty(args.num_tokens, args.top_k, ScalarType::Int, device);
  args.offs = static_cast<int32_t*>(offs.mutable_data_ptr());
  args.token_of_row = static_cast<int32_t*>(token_of_row.mutable_data_ptr());
  args.row_of_pair = static_cast<int32_t*>(row_of_pair.mutable_data_ptr());
  std::optional<Tensor> workspace;
  if (bytes > 0) {
    workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, device);
  }
  void* const data = workspace.has_value() ? workspace->mutable_data_ptr() : nullptr;
  check_status(fp4gemm_route(&args, data, bytes, device, current_stream(device)));
  return {offs, token_of_row, row_of_pair};
}

Tensor combine(Tensor const& y, Tensor const& row_of_pair, Tensor const& topk_weights,
               std::optional<ScalarType> out_dtype) {
  int32_t const device = y.get_device_index();
  check_dims("y", y, 2);
  STD_TORCH_CHECK(y.is_contiguous(), "y: must be contiguous");
  check_matrix("row_of_pair", row_of_pair, ScalarType::Int, device);
  fp4gemm_combine_args_t args = FP4GEMM_COMBINE_ARGS_INIT;
  args.num_tokens = row_of_pair.size(0);
  args.top_k = narrow("row_of_pair: number of slots", row_of_pair.size(1));
  args.d = y.size(1);
  set_topk_weights(args, topk_weights, device);
  Tensor const out =
      empty(args.num_tokens, args.d, out_dtype.has_value() ? *out_dtype : y.scalar_type(), device);
  args.out = out.mutable_data_ptr();
  args.out_dtype = dtype_of("out_dtype", out.scalar_type());
  args.num_rows = y.size(0);
  args.y = y.const_data_ptr();
  args.y_dtype = dtype_of("y", y.scalar_type());
  args.row_of_pair = static_cast<int32_t const*>(row_of_pair.const_data_ptr());
  check_status(fp4gemm_combine(&args, device, current_stream(device)));
  return out;
}

void zero_outside_groups(Tensor const& x, Tensor const& offs) {
  int32_t const device = x.get_device_index();
  check_dims("x", x, 2);
  dtype_of("x", x.scalar_type());
  STD_TORCH_CHECK(x.is_contiguous(), "x: must be contiguous");
  struct {
    int32_t const* offs;
    int num_groups;
  } groups{};
  set_groups(groups, offs, device);
  check_status(fp4gemm_zero_outside_groups(x.size(0), x.size(1) * x.element_size(), x.mutable_data_ptr(),
                                           groups.offs, groups.num_groups, device, current_stream(device)));
}

Tensor experts(Tensor const& x, Tensor const& topk_ids, Tensor const& topk_weights, Tensor const& w13,
               std::optional<Tensor> w13_scales, Tensor const& w13_amax, std::optional<Tensor> w13_bias,
               Tensor const& w2, std::optional<Tensor> w2_scales, Tensor const& w2_amax,
               std::optional<Tensor> w2_bias, int64_t w13_rows, int64_t w2_rows, int64_t w13_e4m3_max,
               int64_t w2_e4m3_max, int64_t scaling, int64_t activation, bool batch_invariant,
               bool use_fast_accum) {
  int32_t const device = x.get_device_index();
  check_dims("x", x, 2);
  STD_TORCH_CHECK(x.is_contiguous(), "x: must be contiguous");
  InputCast const input(scaling);
  STD_TORCH_CHECK(!input.is_mxfp8, "scaling: is ", scaling, ", must be another one for experts");
  bool const fp8 = input.quantize_a == FP4GEMM_QUANTIZE_A_FP8;
  check_fast_accum(use_fast_accum, fp8);
  STD_TORCH_CHECK(w13.dim() > 0, "w13: has 0 dimensions, must have 3, or 2 with w13_rows");
  int64_t const num_experts = w13.size(0);

  fp4gemm_experts_args_t args = FP4GEMM_EXPERTS_ARGS_INIT;
  set_ids(args, topk_ids, num_experts, device);
  STD_TORCH_CHECK(args.num_tokens == x.size(0), "topk_ids: has ", args.num_tokens, " rows, must have ",
                  x.size(0), " as x");
  set_topk_weights(args, topk_weights, device);
  args.d = x.size(1);
  args.x = x.const_data_ptr();
  args.x_dtype = dtype_of("x", x.scalar_type());
  args.quantize_a = input.quantize_a;
  args.cast = input.cast;
  args.activation = static_cast<fp4gemm_activation_t>(narrow("activation", activation));
  args.w13 = weights_of({"w13", w13, w13_scales, w13_amax, w13_bias, w13_rows, w13_e4m3_max}, num_experts,
                        args.d, fp8, device);
  int64_t const k2 = is_gated(activation) ? args.w13.n / 2 : args.w13.n;
  args.w2 =
      weights_of({"w2", w2, w2_scales, w2_amax, w2_bias, w2_rows, w2_e4m3_max}, num_experts, k2, fp8, device);
  args.batch_invariant = batch_invariant ? 1 : 0;
  args.use_fast_accum = use_fast_accum ? 1 : 0;
  Tensor const out = empty(args.num_tokens, args.d, x.scalar_type(), device);
  args.out = out.mutable_data_ptr();
  size_t bytes = 0;
  check_status(fp4gemm_experts_workspace_bytes(&args, device, &bytes));
  Tensor const workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, device);
  check_status(fp4gemm_experts(&args, workspace.mutable_data_ptr(), bytes, device, current_stream(device)));
  return out;
}

}  // namespace fp4gemm_torch
