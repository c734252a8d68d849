// fp4gemm_experts: the checks of its arguments, the plan of its launches and of the workspace, and the
// launches. The plan is that of the query of the workspace and of the call.
#include "fp4gemm/experts.h"

#include <algorithm>

#include "gemm_plan.hpp"
#include "moe/args.hpp"
#include "moe/moe.hpp"
#include "quantize/on_device.hpp"
#include "quantize/sizes.hpp"

namespace fp4gemm {
namespace {

using ExpertsArgs = fp4gemm_experts_args_t;

// A plan asks of offs and a_rows of a product only whether they are null. They will point into the workspace.
constexpr int32_t kNotNull = 0;

bool quantizes_tokens(ExpertsArgs const& args) { return args.quantize_a != FP4GEMM_QUANTIZE_A_NONE; }
/// Whether the first product gathers the rows of x while it quantizes them, which one amax for the rows of an
/// expert and the options of a cast exclude. Otherwise they are copied first.
bool gathers_rows(ExpertsArgs const& args) {
  return (args.quantize_a == FP4GEMM_QUANTIZE_A_ROW && is_default(args.cast)) ||
         args.quantize_a == FP4GEMM_QUANTIZE_A_FP8;
}
bool has_fp8_tokens(ExpertsArgs const& args) { return args.quantize_a == FP4GEMM_QUANTIZE_A_FP8; }
int64_t num_rows(ExpertsArgs const& args) { return args.num_tokens * args.top_k; }

/// The columns of h, which are the k of the second product.
int64_t columns_of_h(ExpertsArgs const& args) {
  return is_gated(args.activation) ? args.w13.n / 2 : args.w13.n;
}

fp4gemm_dtype_t h_dtype(ExpertsArgs const& args) {
  return args.x_dtype == FP4GEMM_FP32 ? FP4GEMM_BF16 : args.x_dtype;
}

// ---- checks

/// The names of the fields of weights in messages.
struct WeightNames {
  char const *n, *data, *scales, *amax, *bias, *e4m3_max, *scaling, *is_constant;
};
constexpr WeightNames kW13{"w13.n",    "w13",          "w13.scales",  "w13.amax",
                           "w13.bias", "w13.e4m3_max", "w13.scaling", "w13.is_constant"};
constexpr WeightNames kW2{"w2.n",    "w2",          "w2.scales",  "w2.amax",
                          "w2.bias", "w2.e4m3_max", "w2.scaling", "w2.is_constant"};

/// The format, the bound and the scaling of weights (num_experts, n, k), whose sizes are valid.
fp4gemm_status_t check_weights(WeightNames const& names, fp4gemm_expert_weights_t const& weights, int64_t k,
                               ExpertsArgs const& args) {
  bool const fp8 = has_fp8_tokens(args);
  fp4gemm_format_t const packed = fp8 ? FP4GEMM_FORMAT_PREPACKED_FP8 : FP4GEMM_FORMAT_PREPACKED;
  FP4GEMM_CHECK(weights.operand.format == FP4GEMM_FORMAT_NVFP4 || weights.operand.format == packed,
                "%s: format is %d, must be FP4GEMM_FORMAT_NVFP4 or %s with quantize_a %d", names.data,
                static_cast<int>(weights.operand.format),
                fp8 ? "FP4GEMM_FORMAT_PREPACKED_FP8" : "FP4GEMM_FORMAT_PREPACKED",
                static_cast<int>(args.quantize_a));
  FP4GEMM_CHECK(product_is_at_most(Rules::kMaxElements, args.num_experts, weights.n, k),
                "%s: %d matrices of (%lld, %lld) elements, must have at most %lld elements in all",
                names.data, args.num_experts, ll(weights.n), ll(k), ll(Rules::kMaxElements));
  FP4GEMM_TRY(check_flag(names.is_constant, weights.is_constant));
  FP4GEMM_CHECK(weights.e4m3_max == 448 || weights.e4m3_max == 256, "%s: is %d, must be 448 or 256",
                names.e4m3_max, weights.e4m3_max);
  FP4GEMM_CHECK(weights.scaling == FP4GEMM_SCALING_TENSOR || weights.scaling == FP4GEMM_SCALING_ROW,
                "%s: is %d, must be FP4GEMM_SCALING_TENSOR or FP4GEMM_SCALING_ROW", names.scaling,
                static_cast<int>(weights.scaling));
  return FP4GEMM_SUCCESS;
}

/// All that the plan depends on.
fp4gemm_status_t check_problem(ExpertsArgs const* args) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_slots(args->num_tokens, args->top_k));
  FP4GEMM_TRY(check_size("num_experts", args->num_experts, 1, 1, kMaxExperts));
  FP4GEMM_CHECK(args->quantize_a >= FP4GEMM_QUANTIZE_A_NONE && args->quantize_a <= FP4GEMM_QUANTIZE_A_FP8,
                "quantize_a: is %d, must be a fp4gemm_quantize_a_t", static_cast<int>(args->quantize_a));
  FP4GEMM_TRY(check_cast("cast.", args->cast, args->quantize_a, /*gathers=*/false));
  FP4GEMM_CHECK(args->cast.num_residual_channels == 0,
                "cast.num_residual_channels: is %d, must be 0 for experts", args->cast.num_residual_channels);
  FP4GEMM_TRY(check_dtype("x_dtype", args->x_dtype));
  FP4GEMM_CHECK(quantizes_tokens(*args) || args->x_dtype != FP4GEMM_FP32,
                "x_dtype: is FP4GEMM_FP32, must be FP4GEMM_BF16 or FP4GEMM_FP16 with "
                "FP4GEMM_QUANTIZE_A_NONE");
  FP4GEMM_TRY(check_dtype("weights_dtype", args->weights_dtype));
  FP4GEMM_TRY(check_flag("batch_invariant", args->batch_invariant));
  FP4GEMM_CHECK(args->use_fast_accum == 0 || (args->use_fast_accum == 1 && has_fp8_tokens(*args)),
                "use_fast_accum: is %d, must be 0%s", args->use_fast_accum,
                has_fp8_tokens(*args) ? " or 1" : " unless quantize_a is FP4GEMM_QUANTIZE_A_FP8");
  FP4GEMM_TRY(check_activation(args->activation));
  int const step = has_fp8_tokens(*args) ? Rules::kFp8K : Rules::kGemmK;
  FP4GEMM_TRY(check_size("d", args->d, step, step, Rules::kMaxK));
  int const step13 = is_gated(args->activation) ? 2 * step : step;
  FP4GEMM_TRY(check_size(kW13.n, args->w13.n, step13, step13, Rules::kMaxK));
  FP4GEMM_CHECK(args->w2.n == args->d, "%s: is %lld, must be %lld, the d of x", kW2.n, ll(args->w2.n),
                ll(args->d));
  FP4GEMM_CHECK(
      product_is_at_most(Rules::kMaxElements, num_rows(*args), std::max(args->d, args->w13.n), 1),
      "num_tokens: is %lld, with top_k %d and rows of %lld elements must have at most %lld elements",
      ll(args->num_tokens), args->top_k, ll(std::max(args->d, args->w13.n)), ll(Rules::kMaxElements));
  FP4GEMM_TRY(check_weights(kW13, args->w13, args->d, *args));
  return check_weights(kW2, args->w2, columns_of_h(*args), *args);
}

fp4gemm_status_t check_weight_pointers(WeightNames const& names, fp4gemm_expert_weights_t const& weights,
                                       int64_t k, int num_experts) {
  fp4gemm_operand_t const& operand = weights.operand;
  int64_t const rows = num_experts * weights.n;
  FP4GEMM_TRY(check_buffer(names.data, operand.data, rows * k));
  if (operand.format == FP4GEMM_FORMAT_NVFP4) {
    FP4GEMM_TRY(check_buffer(names.scales, operand.scales, rows * k / kBlock));
  } else {
    FP4GEMM_CHECK(operand.scales == nullptr, "%s: is %p, must be null for prepacked weights", names.scales,
                  operand.scales);
  }
  FP4GEMM_TRY(check_buffer(names.amax, weights.amax,
                           weights.scaling == FP4GEMM_SCALING_ROW ? rows : num_experts, sizeof(float)));
  return check_buffer(names.bias, weights.bias, 0, sizeof(float));
}

/// The pointers of arguments that check_problem accepted.
fp4gemm_status_t check_pointers(ExpertsArgs const& args) {
  FP4GEMM_TRY(check_buffer("x", args.x, args.num_tokens * args.d));
  FP4GEMM_TRY(check_ids(args.topk_ids, args.ids_are_64_bits, num_rows(args)));
  FP4GEMM_TRY(check_buffer("topk_weights", args.topk_weights, 0, dtype_bytes(args.weights_dtype)));
  FP4GEMM_TRY(check_weight_pointers(kW13, args.w13, args.d, args.num_experts));
  FP4GEMM_TRY(check_weight_pointers(kW2, args.w2, columns_of_h(args), args.num_experts));
  return check_buffer("out", args.out, args.num_tokens * args.d);
}

// ---- the plan

/// The numbers of all experts, `of_one` each.
fp4gemm_vector_t vector_of(float const* data, int64_t of_one) {
  return data == nullptr ? fp4gemm_vector_t{nullptr, 0, 0} : fp4gemm_vector_t{data, of_one, of_one};
}

/// The grouped product of all rows and the weights, without the data of A and D. `in` is the type of the rows
/// of A, before their quantization.
GemmArgs product_of(ExpertsArgs const& args, fp4gemm_expert_weights_t const& weights, int64_t k,
                    fp4gemm_dtype_t in, fp4gemm_dtype_t out, fp4gemm_activation_t activation) {
  GemmArgs product = FP4GEMM_GEMM_ARGS_INIT;
  product.m = num_rows(args);
  product.n = weights.n;
  product.k = k;
  product.num_groups = args.num_experts;
  product.offs = &kNotNull;
  product.a.format = in == FP4GEMM_BF16   ? FP4GEMM_FORMAT_BF16
                     : in == FP4GEMM_FP16 ? FP4GEMM_FORMAT_FP16
                                          : FP4GEMM_FORMAT_FP32;
  product.quantize_a = args.quantize_a;
  product.b = weights.operand;
  product.b_is_constant = weights.is_constant;
  // 1 / (6 B), 1 / (36 * B_a B) or 1 / (448 * 6 B), rounded once: the denominators are exact in fp32.
  int const bound_of_rows = !quantizes_tokens(args) ? 1 : has_fp8_tokens(args) ? 448 : 6 * args.cast.e4m3_max;
  product.alpha = 1.0f / static_cast<float>(6 * weights.e4m3_max * bound_of_rows);
  product.alpha_col = vector_of(weights.amax, weights.scaling == FP4GEMM_SCALING_ROW ? weights.n : 1);
  product.bias = vector_of(weights.bias, weights.n);
  product.activation = activation;
  product.out_dtype = out;
  product.d_row_stride = columns_of_d(product);
  product.batch_invariant = args.batch_invariant;
  product.use_fast_accum = args.use_fast_accum;
  return product;
}

/// What a call will do: both products, and the layout of the workspace. Offsets are in bytes.
struct ExpertsPlan {
  GemmArgs product13, product2;
  GemmPlan plan13, plan2;
  size_t offs = 0, token_of_row = 0, row_of_pair = 0;  // the result of the routing
  size_t rows = 0;                                     // of x, copied unless the first product gathers them
  size_t h = 0, y = 0;
  size_t shared = 0;  // the workspace of each launch in turn
  size_t total_bytes = 0;
};

fp4gemm_status_t make_plan(ExpertsArgs const& args, int device, ExpertsPlan* plan) {
  int64_t const rows = num_rows(args);
  int64_t const k2 = columns_of_h(args);
  plan->product13 = product_of(args, args.w13, args.d, args.x_dtype, h_dtype(args), args.activation);
  plan->product2 = product_of(args, args.w2, k2, h_dtype(args), args.x_dtype, FP4GEMM_ACTIVATION_NONE);
  plan->plan13.cast = plan->plan2.cast = args.cast;
  if (gathers_rows(args)) {
    plan->product13.a_rows = &kNotNull;
    plan->product13.a_num_rows = args.num_tokens;
  }
  FP4GEMM_TRY(check_gemm_problem(plan->product13));
  FP4GEMM_TRY(check_gemm_problem(plan->product2));
  FP4GEMM_TRY(plan_gemm(plan->product13, device, &plan->plan13));
  FP4GEMM_TRY(plan_gemm(plan->product2, device, &plan->plan2));

  size_t bytes = 0;
  auto const take = [&](int64_t more) {
    size_t const offset = bytes;
    bytes += static_cast<size_t>(round_up(more, Rules::kWorkspaceBytes));
    return offset;
  };
  constexpr int64_t kIndexBytes = sizeof(int32_t);
  plan->offs = take(args.num_experts * kIndexBytes);
  plan->token_of_row = take(rows * kIndexBytes);
  plan->row_of_pair = take(rows * kIndexBytes);
  plan->rows = take(gathers_rows(args) ? 0 : rows * args.d * dtype_bytes(args.x_dtype));
  plan->h = take(rows * k2 * dtype_bytes(h_dtype(args)));
  plan->y = take(rows * args.d * dtype_bytes(args.x_dtype));
  auto const of_route =
      static_cast<size_t>(route_plan(rows, args.num_experts).workspace_bytes(args.num_experts));
  plan->shared = bytes;
  plan->total_bytes = bytes + std::max({of_route, plan->plan13.total_bytes, plan->plan2.total_bytes});
  return FP4GEMM_SUCCESS;
}

// ---- the calls

fp4gemm_status_t workspace_bytes(ExpertsArgs const* args, int device, size_t* bytes) {
  FP4GEMM_CHECK(bytes != nullptr, "bytes: is null, must point at the result");
  FP4GEMM_TRY(check_problem(args));
  ExpertsPlan plan;
  FP4GEMM_TRY(make_plan(*args, device, &plan));
  *bytes = plan.total_bytes;
  return FP4GEMM_SUCCESS;
}

/// The launches of a plan. The device is current.
fp4gemm_status_t launch(ExpertsArgs const& args, ExpertsPlan& plan, char* workspace, int device,
                        DeviceProperties const& properties, fp4gemm_stream_t stream) {
  auto const indices = [&](size_t offset) { return reinterpret_cast<int32_t*>(workspace + offset); };
  void* const shared = workspace + plan.shared;
  fp4gemm_route_args_t routing = FP4GEMM_ROUTE_ARGS_INIT;
  routing.num_tokens = args.num_tokens;
  routing.top_k = args.top_k;
  routing.num_experts = args.num_experts;
  routing.topk_ids = args.topk_ids;
  routing.ids_are_64_bits = args.ids_are_64_bits;
  routing.offs = indices(plan.offs);
  routing.token_of_row = indices(plan.token_of_row);
  routing.row_of_pair = indices(plan.row_of_pair);
  FP4GEMM_TRY(launch_route(routing, properties, shared, stream));

  GemmArgs& product13 = plan.product13;
  GemmArgs& product2 = plan.product2;
  product13.offs = product2.offs = routing.offs;
  if (gathers_rows(args)) {
    product13.a.data = args.x;
    product13.a_rows = routing.token_of_row;
  } else {
    // The rows of x, copied to their places: sums of one row each.
    fp4gemm_combine_args_t gather = FP4GEMM_COMBINE_ARGS_INIT;
    gather.num_tokens = num_rows(args);
    gather.num_rows = args.num_tokens;
    gather.d = args.d;
    gather.y = args.x;
    gather.y_dtype = gather.out_dtype = args.x_dtype;
    gather.row_of_pair = routing.token_of_row;
    gather.out = workspace + plan.rows;
    FP4GEMM_TRY(launch_combine(gather, properties, stream));
    product13.a.data = gather.out;
  }
  product13.d = workspace + plan.h;
  FP4GEMM_TRY(launch_gemm(product13, plan.plan13, shared, device, stream));
  product2.a.data = product13.d;
  product2.d = workspace + plan.y;
  FP4GEMM_TRY(launch_gemm(product2, plan.plan2, shared, device, stream));

  fp4gemm_combine_args_t combination = FP4GEMM_COMBINE_ARGS_INIT;
  combination.num_tokens = args.num_tokens;
  combination.top_k = args.top_k;
  combination.num_rows = num_rows(args);
  combination.d = args.d;
  combination.y = product2.d;
  combination.y_dtype = combination.out_dtype = args.x_dtype;
  combination.row_of_pair = routing.row_of_pair;
  combination.topk_weights = args.topk_weights;
  combination.weights_dtype = args.weights_dtype;
  combination.out = args.out;
  return launch_combine(combination, properties, stream);
}

fp4gemm_status_t run(ExpertsArgs const* args, void* workspace, size_t workspace_bytes, int device,
                     fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_problem(args));
  FP4GEMM_TRY(check_pointers(*args));
  ExpertsPlan plan;
  FP4GEMM_TRY(make_plan(*args, device, &plan));
  FP4GEMM_TRY(check_workspace(workspace, workspace_bytes, plan.total_bytes));
  if (args->num_tokens == 0) {
    return FP4GEMM_SUCCESS;
  }
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch(*args, plan, static_cast<char*>(workspace), device, properties, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_experts_workspace_bytes(fp4gemm_experts_args_t const* args, int device,
                                                 size_t* bytes) {
  return fp4gemm::workspace_bytes(args, device, bytes);
}

fp4gemm_status_t fp4gemm_experts(fp4gemm_experts_args_t const* args, void* workspace, size_t workspace_bytes,
                                 int device, fp4gemm_stream_t stream) {
  return fp4gemm::run(args, workspace, workspace_bytes, device, stream);
}

}  // extern "C"
