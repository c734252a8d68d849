// The C interface of the kernels for mixtures of experts: checks, the plan of a routing, and the launches.
#include <algorithm>

#include "fp4gemm/groups.h"
#include "moe/args.hpp"
#include "moe/moe.hpp"
#include "quantize/on_device.hpp"

namespace fp4gemm {
namespace {

constexpr int kCountersBytes = 28672;  // of a CTA, 2 bytes for each expert and counting warp
constexpr int kManyCtas = 64;

fp4gemm_status_t check_route(fp4gemm_route_args_t const* args) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_slots(args->num_tokens, args->top_k));
  return check_size("num_experts", args->num_experts, 1, 1, kMaxExperts);
}

fp4gemm_status_t route(fp4gemm_route_args_t const* args, void* workspace, size_t workspace_bytes, int device,
                       fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_route(args));
  int64_t const num_slots = args->num_tokens * args->top_k;
  FP4GEMM_TRY(check_ids(args->topk_ids, args->ids_are_64_bits, num_slots));
  FP4GEMM_TRY(check_buffer("offs", args->offs, args->num_experts, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("token_of_row", args->token_of_row, num_slots, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("row_of_pair", args->row_of_pair, num_slots, sizeof(int32_t)));
  int64_t const needed = route_plan(num_slots, args->num_experts).workspace_bytes(args->num_experts);
  FP4GEMM_TRY(check_workspace(workspace, workspace_bytes, static_cast<size_t>(needed), Rules::kPointerBytes));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_route(*args, properties, workspace, stream);
  });
}

fp4gemm_status_t combine(fp4gemm_combine_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_size("num_tokens", args->num_tokens, 0, 1));
  FP4GEMM_TRY(check_size("top_k", args->top_k, 1, 1));
  FP4GEMM_TRY(check_size("num_rows", args->num_rows, 0, 1));
  FP4GEMM_TRY(check_size("d", args->d, kCombineStep, kCombineStep, Rules::kMaxK));
  FP4GEMM_TRY(check_dtype("y_dtype", args->y_dtype));
  FP4GEMM_TRY(check_dtype("weights_dtype", args->weights_dtype));
  FP4GEMM_TRY(check_dtype("out_dtype", args->out_dtype));
  FP4GEMM_TRY(check_buffer("y", args->y, args->num_rows * args->d));
  int64_t const num_slots = args->num_tokens * args->top_k;
  FP4GEMM_TRY(check_buffer("row_of_pair", args->row_of_pair, num_slots, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("topk_weights", args->topk_weights, 0, dtype_bytes(args->weights_dtype)));
  FP4GEMM_TRY(check_buffer("out", args->out, args->num_tokens * args->d));
  return on_device(
      device, [&](DeviceProperties const& properties) { return launch_combine(*args, properties, stream); });
}

fp4gemm_status_t zero_outside_groups(int64_t m, int64_t row_bytes, void* x, int32_t const* offs,
                                     int num_groups, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_size("m", m, 0, 1));
  FP4GEMM_TRY(check_size("row_bytes", row_bytes, 0, 1, Rules::kMaxElements / Rules::kMaxSize));
  FP4GEMM_TRY(check_size("num_groups", num_groups, 1, 1));
  FP4GEMM_TRY(check_buffer("x", x, m * row_bytes));
  FP4GEMM_TRY(check_buffer("offs", offs, num_groups, sizeof(int32_t)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_zero_outside_groups(m, row_bytes, x, offs, num_groups, properties, stream);
  });
}

}  // namespace

RoutePlan route_plan(int64_t num_slots, int num_experts) {
  int const most = std::min(kMaxRouteWarps, kCountersBytes / 2 / num_experts);
  auto const ceil = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  // Few slots: one CTA with as many warps as there are slots for, and threads that share the experts.
  RoutePlan plan{};
  plan.counting_warps = static_cast<int>(std::clamp<int64_t>(ceil(num_slots, 32), 1, most));
  plan.ctas = 1;
  plan.steps = static_cast<int>(std::max<int64_t>(ceil(num_slots, int64_t{32} * plan.counting_warps), 1));
  plan.threads = 32 * std::clamp((num_experts + 31) / 32, plan.counting_warps, kMaxRouteWarps);
  if (plan.steps > kMaxRouteSteps / 2) {
    plan.steps = static_cast<int>(
        std::clamp<int64_t>(ceil(num_slots, int64_t{32} * most * kManyCtas), 1, kMaxRouteSteps));
    plan.ctas = static_cast<int>(ceil(num_slots, plan.slots()));
  }
  return plan;
}

}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_route_workspace_bytes(fp4gemm_route_args_t const* args, size_t* bytes) {
  FP4GEMM_TRY(fp4gemm::check_route(args));
  FP4GEMM_CHECK(bytes != nullptr, "bytes: is null, must point at a size");
  fp4gemm::RoutePlan const plan = fp4gemm::route_plan(args->num_tokens * args->top_k, args->num_experts);
  *bytes = static_cast<size_t>(plan.workspace_bytes(args->num_experts));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t fp4gemm_route(fp4gemm_route_args_t const* args, void* workspace, size_t workspace_bytes,
                               int device, fp4gemm_stream_t stream) {
  return fp4gemm::route(args, workspace, workspace_bytes, device, stream);
}

fp4gemm_status_t fp4gemm_combine(fp4gemm_combine_args_t const* args, int device, fp4gemm_stream_t stream) {
  return fp4gemm::combine(args, device, stream);
}

fp4gemm_status_t fp4gemm_zero_outside_groups(int64_t m, int64_t row_bytes, void* x, int32_t const* offs,
                                             int num_groups, int device, fp4gemm_stream_t stream) {
  return fp4gemm::zero_outside_groups(m, row_bytes, x, offs, num_groups, device, stream);
}

}  // extern "C"
