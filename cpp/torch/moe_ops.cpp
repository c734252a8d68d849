// route, combine and experts on CUDA tensors.
#include "moe_ops.hpp"

#include <algorithm>
#include <string>

#include "fp4gemm/groups.h"
#include "gemm_call.hpp"
#include "gemm_ops.hpp"
#include "quantize_call.hpp"

namespace fp4gemm_torch {
namespace {

constexpr int64_t kAlignBytes = 256;  // of every part of the scratch memory

/// The arguments of fp4gemm_route without its results.
fp4gemm_route_args_t route_args(Tensor const& topk_ids, int64_t num_experts, int32_t device) {
  check_dims("topk_ids", topk_ids, 2);
  check_device("topk_ids", topk_ids, device);
  STD_TORCH_CHECK(topk_ids.is_contiguous(), "topk_ids: must be contiguous");
  ScalarType const type = topk_ids.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, "topk_ids: dtype is ", name_of(type),
                  ", must be Int or Long");
  fp4gemm_route_args_t args = FP4GEMM_ROUTE_ARGS_INIT;
  args.num_tokens = topk_ids.size(0);
  args.top_k = narrow("topk_ids: number of slots", topk_ids.size(1));
  args.num_experts = narrow("num_experts", num_experts);
  args.topk_ids = topk_ids.const_data_ptr();
  args.ids_are_64_bits = type == ScalarType::Long ? 1 : 0;
  return args;
}

size_t workspace_bytes(fp4gemm_route_args_t const& args) {
  size_t bytes = 0;
  check_status(fp4gemm_route_workspace_bytes(&args, &bytes));
  return bytes;
}

/// The arguments of fp4gemm_combine without y and its dtype.
fp4gemm_combine_args_t combine_args(Tensor const& topk_weights, int64_t num_tokens, int64_t top_k, int64_t d,
                                    Tensor const& out, int32_t device) {
  check_dims("topk_weights", topk_weights, 2);
  check_device("topk_weights", topk_weights, device);
  check_shape("topk_weights", topk_weights, num_tokens, top_k);
  STD_TORCH_CHECK(topk_weights.is_contiguous(), "topk_weights: must be contiguous");
  fp4gemm_combine_args_t args = FP4GEMM_COMBINE_ARGS_INIT;
  args.num_tokens = num_tokens;
  args.top_k = narrow("number of slots", top_k);
  args.d = d;
  args.topk_weights = topk_weights.const_data_ptr();
  args.weights_dtype = dtype_of("topk_weights", topk_weights.scalar_type());
  args.out = out.mutable_data_ptr();
  args.out_dtype = dtype_of("out_dtype", out.scalar_type());
  return args;
}

/// The kernels read 16 bytes at a time.
void check_aligned(char const* name, Tensor const& t) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0, name,
                  ": must be 16-byte aligned, as a new tensor is");
}

int element_bytes(ScalarType type) { return type == ScalarType::Float ? 4 : 2; }

/// Parts of one allocation, which is made when their sizes are known.
class Scratch {
 public:
  /// Room for `bytes` bytes; returns its offset.
  int64_t add(int64_t bytes) {
    int64_t const offset = total_;
    total_ += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    return offset;
  }

  void allocate(int32_t device) {
    memory_ = empty(total_, -1, ScalarType::Byte, device);
    base_ = static_cast<char*>(memory_.mutable_data_ptr());
  }

  template <class T = void>
  T* at(int64_t offset) const {
    return static_cast<T*>(static_cast<void*>(base_ + offset));
  }

 private:
  int64_t total_ = 0;
  Tensor memory_;
  char* base_ = nullptr;
};

/// The weights of all experts, (rows, k) each: codes with scales, or prepacked bytes.
struct Weights {
  char const* name;
  Tensor const& data;
  std::optional<Tensor> const& scales;
  Tensor const& amax;
  std::optional<Tensor> const& bias;
  int64_t prepacked_rows;  // 0: codes and scales
  int64_t e4m3_max;
  int64_t k;
  bool fp8;  // the tokens are FP8, so that prepacked bytes are in their order

  bool is_prepacked() const { return prepacked_rows > 0; }
  int64_t rows() const { return is_prepacked() ? prepacked_rows : data.size(1); }

  void check(int64_t num_experts, int32_t device) const {
    STD_TORCH_CHECK(prepacked_rows >= 0 && prepacked_rows <= INT32_MAX, name, "_rows: is ", prepacked_rows,
                    ", must be between 0 and ", INT32_MAX);
    check_dims(name, data, is_prepacked() ? 2 : 3);
    if (is_prepacked()) {
      check_order(name, data, fp8);
    } else {
      check_dtype(name, data, ScalarType::Byte);
    }
    check_contiguous(name, data, data.scalar_type(), device);
    check_aligned(name, data);
    std::string const prefix = name;
    STD_TORCH_CHECK(data.size(0) == num_experts, name, ": has ", data.size(0), " experts, must have ",
                    num_experts, " as w13");
    if (is_prepacked()) {
      STD_TORCH_CHECK(!scales.has_value(), name, "_scales: must be None for a prepacked weight");
      int64_t const bytes = prepacked_bytes(data, rows(), k);
      STD_TORCH_CHECK(data.size(1) == bytes, name, ": has ", data.size(1), " bytes a matrix, must have ",
                      bytes, ", prepacked (", rows(), ", ", k, ")");
    } else {
      STD_TORCH_CHECK(2 * data.size(2) == k, name, ": k is ", 2 * data.size(2), ", must be ", k);
      STD_TORCH_CHECK(scales.has_value(), name, "_scales: is None, must be given with codes");
      std::string const of_scales = prefix + "_scales";
      check_stacked_scales(of_scales.c_str(), *scales, num_experts, rows(), k, device);
      check_aligned(of_scales.c_str(), *scales);
    }
    STD_TORCH_CHECK(e4m3_max == 448 || e4m3_max == 256, name, "_e4m3_max: is ", e4m3_max,
                    ", must be 448 or 256");
    check_matrix((prefix + "_amax").c_str(), amax, ScalarType::Float, device);
    STD_TORCH_CHECK(amax.size(0) == num_experts && (amax.size(1) == rows() || amax.size(1) == 1), name,
                    "_amax: shape is (", amax.size(0), ", ", amax.size(1), "), must be (", num_experts, ", ",
                    rows(), ") or (", num_experts, ", 1)");
    if (bias.has_value()) {
      std::string const of_bias = prefix + "_bias";
      check_matrix(of_bias.c_str(), *bias, ScalarType::Float, device);
      check_shape(of_bias.c_str(), *bias, num_experts, rows());
    }
  }

  fp4gemm_operand_t operand() const {
    if (!is_prepacked()) {
      return {data.const_data_ptr(), scales->const_data_ptr(), FP4GEMM_FORMAT_NVFP4};
    }
    return {data.const_data_ptr(), nullptr, fp8 ? FP4GEMM_FORMAT_PREPACKED_FP8 : FP4GEMM_FORMAT_PREPACKED};
  }
};

fp4gemm_vector_t rows_of_groups(Tensor const& t) {
  return {static_cast<float const*>(t.const_data_ptr()), t.size(1), t.size(1)};
}

/// The arguments of a grouped product of num_rows rows and the weights, without a, offs and d. The call
/// quantizes its rows, which have the type `in`, as `scaling` says.
fp4gemm_gemm_args_t product_args(Weights const& weights, int64_t num_rows, fp4gemm_quantize_a_t scaling,
                                 ScalarType in, ScalarType out, fp4gemm_activation_t activation,
                                 bool batch_invariant, bool use_fast_accum) {
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.m = num_rows;
  args.n = weights.rows();
  args.k = weights.k;
  args.num_groups = static_cast<int>(weights.data.size(0));
  args.a.format = in == ScalarType::BFloat16 ? FP4GEMM_FORMAT_BF16
                  : in == ScalarType::Half   ? FP4GEMM_FORMAT_FP16
                                             : FP4GEMM_FORMAT_FP32;
  args.quantize_a = scaling;
  args.b = weights.operand();
  args.b_is_constant = weights.is_prepacked() ? 1 : 0;
  // 1 / (6 * B), 1 / (36 * 448 * B) or 1 / (448 * 6 * B), rounded once: the denominators are exact in fp32.
  int64_t const bound_of_rows = scaling == FP4GEMM_QUANTIZE_A_NONE ? 1 : weights.fp8 ? 448 : 6 * 448;
  args.alpha = 1.0f / static_cast<float>(6 * weights.e4m3_max * bound_of_rows);
  args.alpha_col = rows_of_groups(weights.amax);
  if (weights.bias.has_value()) {
    args.bias = rows_of_groups(*weights.bias);
  }
  args.activation = activation;
  args.out_dtype = dtype_of("out", out);
  args.d_row_stride = is_gated(activation) ? args.n / 2 : args.n;
  args.batch_invariant = batch_invariant ? 1 : 0;
  args.use_fast_accum = use_fast_accum ? 1 : 0;
  return args;
}

size_t workspace_bytes(fp4gemm_gemm_args_t const& args, int32_t device) {
  size_t bytes = 0;
  check_status(fp4gemm_gemm_workspace_bytes(&args, device, &bytes));
  return bytes;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> route(Tensor const& topk_ids, int64_t num_experts) {
  int32_t const device = topk_ids.get_device_index();
  fp4gemm_route_args_t args = route_args(topk_ids, num_experts, device);
  size_t const bytes = workspace_bytes(args);
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
  int64_t const num_tokens = row_of_pair.size(0);
  Tensor const out =
      empty(num_tokens, y.size(1), out_dtype.has_value() ? *out_dtype : y.scalar_type(), device);
  fp4gemm_combine_args_t args =
      combine_args(topk_weights, num_tokens, row_of_pair.size(1), y.size(1), out, device);
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
  check_aligned("x", x);
  STD_TORCH_CHECK(scaling == FP4GEMM_QUANTIZE_A_NONE || scaling == FP4GEMM_QUANTIZE_A_ROW ||
                      scaling == FP4GEMM_QUANTIZE_A_FP8,
                  "scaling: is ", scaling, ", must be 0, 1 or 3");
  auto const quantization = static_cast<fp4gemm_quantize_a_t>(scaling);
  bool const quantizes = quantization != FP4GEMM_QUANTIZE_A_NONE;
  bool const fp8 = quantization == FP4GEMM_QUANTIZE_A_FP8;
  check_fast_accum(use_fast_accum, fp8);
  ScalarType const type = x.scalar_type();
  STD_TORCH_CHECK(quantizes || type != ScalarType::Float,
                  "x: dtype is Float, must be BFloat16 or Half where scaling is 0");
  fp4gemm_dtype_t const dtype = dtype_of("x", type);
  ScalarType const hidden_type = type == ScalarType::Float ? ScalarType::BFloat16 : type;
  int64_t const num_tokens = x.size(0);
  int64_t const d = x.size(1);
  STD_TORCH_CHECK(w13.dim() > 0, "w13: has 0 dimensions, must have 3, or 2 with w13_rows");
  fp4gemm_route_args_t routing = route_args(topk_ids, w13.size(0), device);
  STD_TORCH_CHECK(routing.num_tokens == num_tokens, "topk_ids: has ", routing.num_tokens, " rows, must have ",
                  num_tokens, " as x");
  Tensor const out = empty(num_tokens, d, type, device);
  fp4gemm_combine_args_t combination = combine_args(topk_weights, num_tokens, routing.top_k, d, out, device);

  int const num_experts = routing.num_experts;
  int64_t const num_rows = num_tokens * routing.top_k;
  auto const act = static_cast<fp4gemm_activation_t>(narrow("activation", activation));
  Weights const first{"w13", w13, w13_scales, w13_amax, w13_bias, w13_rows, w13_e4m3_max, d, fp8};
  first.check(num_experts, device);
  int64_t const k2 = is_gated(act) ? first.rows() / 2 : first.rows();
  Weights const second{"w2", w2, w2_scales, w2_amax, w2_bias, w2_rows, w2_e4m3_max, k2, fp8};
  second.check(num_experts, device);
  STD_TORCH_CHECK(second.rows() == d, "w2: has ", second.rows(), " rows, must have ", d, ", the d of x");
  if (num_tokens == 0) {
    return out;
  }
  fp4gemm_gemm_args_t product1 =
      product_args(first, num_rows, quantization, type, hidden_type, act, batch_invariant, use_fast_accum);
  fp4gemm_gemm_args_t product2 = product_args(second, num_rows, quantization, hidden_type, type,
                                              FP4GEMM_ACTIVATION_NONE, batch_invariant, use_fast_accum);
  // The queries of the workspaces ask of offs and a_rows only whether they are null. The memory that they
  // will point at is allocated below, together with the workspace.
  auto const* const not_null = static_cast<int32_t const*>(topk_ids.const_data_ptr());
  product1.offs = product2.offs = not_null;
  if (quantizes) {  // the first product gathers its rows
    product1.a_rows = not_null;
    product1.a_num_rows = num_tokens;
  }
  size_t const route_bytes = workspace_bytes(routing);
  size_t const bytes1 = workspace_bytes(product1, device);
  size_t const bytes2 = workspace_bytes(product2, device);

  Scratch scratch;
  int64_t const offs = scratch.add(num_experts * sizeof(int32_t));
  int64_t const token_of_row = scratch.add(num_rows * sizeof(int32_t));
  int64_t const row_of_pair = scratch.add(num_rows * sizeof(int32_t));
  int64_t const rows = quantizes ? 0 : scratch.add(num_rows * d * element_bytes(type));
  int64_t const h = scratch.add(num_rows * k2 * element_bytes(hidden_type));
  int64_t const y = scratch.add(num_rows * d * element_bytes(type));
  int64_t const workspace = scratch.add(static_cast<int64_t>(std::max({route_bytes, bytes1, bytes2})));
  scratch.allocate(device);

  fp4gemm_stream_t const stream = current_stream(device);
  routing.offs = scratch.at<int32_t>(offs);
  routing.token_of_row = scratch.at<int32_t>(token_of_row);
  routing.row_of_pair = scratch.at<int32_t>(row_of_pair);
  check_status(fp4gemm_route(&routing, scratch.at(workspace), route_bytes, device, stream));
  if (quantizes) {
    product1.a.data = x.const_data_ptr();
    product1.a_rows = routing.token_of_row;
  } else {
    // The rows of x, copied to their places: sums of one row each.
    fp4gemm_combine_args_t gather = FP4GEMM_COMBINE_ARGS_INIT;
    gather.num_tokens = num_rows;
    gather.num_rows = num_tokens;
    gather.d = d;
    gather.y = x.const_data_ptr();
    gather.y_dtype = gather.out_dtype = dtype;
    gather.row_of_pair = routing.token_of_row;
    gather.out = scratch.at(rows);
    check_status(fp4gemm_combine(&gather, device, stream));
    product1.a.data = gather.out;
  }
  product1.offs = product2.offs = routing.offs;
  product1.d = scratch.at(h);
  check_status(fp4gemm_gemm(&product1, scratch.at(workspace), bytes1, device, stream));
  product2.a.data = product1.d;
  product2.d = scratch.at(y);
  check_status(fp4gemm_gemm(&product2, scratch.at(workspace), bytes2, device, stream));
  combination.num_rows = num_rows;
  combination.y = product2.d;
  combination.y_dtype = dtype;
  combination.row_of_pair = routing.row_of_pair;
  check_status(fp4gemm_combine(&combination, device, stream));
  return out;
}

}  // namespace fp4gemm_torch
