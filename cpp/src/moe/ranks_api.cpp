// The C interface of expert parallelism: checks of its arguments, and the launches on the given device.
#include <cstdio>

#include "moe/args.hpp"
#include "moe/moe.hpp"
#include "moe/ranks.hpp"
#include "quantize/on_device.hpp"

namespace fp4gemm {
namespace {

/// The addresses of `count` buffers of `elems` elements.
fp4gemm_status_t check_buffers(char const* name, void const* const* buffers, char const* name_of_count,
                               int count, int most, int64_t elems) {
  FP4GEMM_TRY(check_size(name_of_count, count, 1, 1, most));
  FP4GEMM_CHECK(buffers != nullptr, "%s: is null, must point at %d addresses", name, count);
  for (int i = 0; i < count; ++i) {
    FP4GEMM_CHECK(buffers[i] != nullptr || elems == 0, "%s[%d]: is null, must point at %lld elements", name,
                  i, ll(elems));
    FP4GEMM_CHECK(is_aligned(buffers[i], Rules::kPointerBytes), "%s[%d]: is %p, must be %d-byte aligned",
                  name, i, buffers[i], Rules::kPointerBytes);
  }
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_rows(int64_t m, int64_t k) {
  FP4GEMM_TRY(check_size("m", m, 0, 1));
  return check_size("k", k, Rules::kQuantizeK, Rules::kQuantizeK, Rules::kMaxK);
}

fp4gemm_status_t quantize_records(fp4gemm_quantize_records_args_t const* args, int device,
                                  fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_rows(args->m, args->k));
  FP4GEMM_TRY(check_dtype("x_dtype", args->x_dtype));
  FP4GEMM_TRY(check_row_stride("x_row_stride", args->x_row_stride, args->k, dtype_bytes(args->x_dtype)));
  FP4GEMM_TRY(check_buffer("x", args->x, args->m * args->k));
  FP4GEMM_CHECK(args->four_over_six >= 0 && args->four_over_six <= FP4GEMM_FOUR_OVER_SIX_MSE,
                "four_over_six: is %d, must be a fp4gemm_four_over_six_t",
                static_cast<int>(args->four_over_six));
  bool const four_over_six = args->four_over_six != FP4GEMM_FOUR_OVER_SIX_NONE;
  FP4GEMM_TRY(check_flag("fast_error", args->fast_error));
  FP4GEMM_CHECK(args->e4m3_max == 448 || (args->e4m3_max == 256 && four_over_six),
                "e4m3_max: is %d, must be 448, or 256 with four_over_six", args->e4m3_max);
  FP4GEMM_TRY(check_buffer("rng_state", args->rng_state, 0, sizeof(int64_t)));
  if (four_over_six && args->rng_state != nullptr) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "%s", "four_over_six: requires that rng_state is null");
  }
  FP4GEMM_CHECK(args->first_row >= 0 && args->first_row <= Rules::kMaxSize,
                "first_row: is %lld, must be between 0 and %lld", ll(args->first_row), ll(Rules::kMaxSize));
  FP4GEMM_TRY(check_buffer("records", args->records, args->m));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_quantize_records(*args, properties, stream);
  });
}

fp4gemm_status_t make_records(fp4gemm_make_records_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_rows(args->m, args->k));
  FP4GEMM_TRY(check_buffer("codes", args->codes, args->m * args->k / 2));
  FP4GEMM_TRY(check_buffer("scales", args->scales, args->m * args->k / 16));
  FP4GEMM_TRY(check_buffer("amax", args->amax, args->m, sizeof(float)));
  FP4GEMM_TRY(check_buffer("records", args->records, args->m));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_make_records(*args, properties, stream);
  });
}

fp4gemm_status_t gather_records(fp4gemm_gather_records_args_t const* args, int device,
                                fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_rows(args->m, args->k));
  FP4GEMM_TRY(check_size("num_records", args->num_records, 0, 1));
  FP4GEMM_TRY(check_buffers("records", args->records, "num_buffers", args->num_buffers, kMaxRanks,
                            args->num_records));
  FP4GEMM_CHECK(args->num_buffers * args->num_records <= Rules::kMaxSize,
                "num_records: is %lld, with num_buffers %d must be at most %lld records",
                ll(args->num_records), args->num_buffers, ll(Rules::kMaxSize));
  FP4GEMM_TRY(check_buffer("rows", args->rows, args->m, sizeof(int32_t)));
  FP4GEMM_TRY(check_size("num_groups", args->num_groups, 1, 1));
  FP4GEMM_TRY(check_buffer("offs", args->offs, args->num_groups, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("codes", args->codes, args->m * args->k / 2));
  FP4GEMM_TRY(check_buffer("scales", args->scales, args->m * args->k / 16));
  FP4GEMM_TRY(check_buffer("amax", args->amax, args->m, sizeof(float)));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_gather_records(*args, properties, stream);
  });
}

/// Checks the experts of the ranks, and a rank of them.
fp4gemm_status_t check_ranks(int num_experts, int num_ranks, int rank) {
  FP4GEMM_TRY(check_size("num_experts", num_experts, 1, 1, kMaxExperts));
  FP4GEMM_TRY(check_size("num_ranks", num_ranks, 1, 1, kMaxRanks));
  FP4GEMM_CHECK(num_experts % num_ranks == 0,
                "num_experts: is %d, must be a multiple of num_ranks, which is %d", num_experts, num_ranks);
  return check_size("rank", rank, 0, 1, num_ranks - 1);
}

fp4gemm_status_t check_route(fp4gemm_route_ranks_args_t const* args) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_slots(args->num_tokens, args->top_k));
  FP4GEMM_TRY(check_ranks(args->num_experts, args->num_ranks, args->rank));
  return check_size("capacity", args->capacity, 1, 1, Rules::kMaxSize / args->num_ranks);
}

int64_t workspace_of(fp4gemm_route_ranks_args_t const& args) {
  return route_plan(args.num_tokens * args.top_k, args.num_experts).workspace_bytes(args.num_experts);
}

fp4gemm_status_t route_ranks(fp4gemm_route_ranks_args_t const* args, void* workspace, size_t workspace_bytes,
                             int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_route(args));
  int64_t const num_slots = args->num_tokens * args->top_k;
  FP4GEMM_TRY(check_ids(args->topk_ids, args->ids_are_64_bits, num_slots));
  FP4GEMM_TRY(check_buffer("offs", args->offs, args->num_experts / args->num_ranks, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("token_of_row", args->token_of_row, args->capacity, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("slot_of_row", args->slot_of_row, args->capacity, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("row_of_pair", args->row_of_pair, num_slots, sizeof(int32_t)));
  FP4GEMM_TRY(check_buffer("status", args->status, 2, sizeof(int32_t)));
  FP4GEMM_TRY(check_workspace(workspace, workspace_bytes, static_cast<size_t>(workspace_of(*args)),
                              Rules::kPointerBytes));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_route_ranks(*args, properties, workspace, stream);
  });
}

/// Checks what all sums have: their tokens, d, and the result.
template <class Args>
fp4gemm_status_t check_sum(Args const& args, void const* out, char const* name, fp4gemm_dtype_t dtype) {
  FP4GEMM_TRY(check_slots(args.num_tokens, args.top_k));
  FP4GEMM_TRY(check_size("d", args.d, kCombineStep, kCombineStep, Rules::kMaxK));
  char text[32];
  snprintf(text, sizeof(text), "%s_dtype", name);
  FP4GEMM_TRY(check_dtype(text, dtype));
  return check_buffer(name, out, args.num_tokens * args.d);
}

/// Checks the rows and weights of the slots.
template <class Args>
fp4gemm_status_t check_terms(Args const& args) {
  FP4GEMM_TRY(check_dtype("y_dtype", args.y_dtype));
  FP4GEMM_TRY(check_dtype("weights_dtype", args.weights_dtype));
  FP4GEMM_TRY(check_size("num_rows", args.num_rows, 0, 1));
  FP4GEMM_TRY(check_buffer("row_of_pair", args.row_of_pair, args.num_tokens * args.top_k, sizeof(int32_t)));
  return check_buffer("topk_weights", args.topk_weights, 0, dtype_bytes(args.weights_dtype));
}

/// Checks the experts and the ranks of a tree.
fp4gemm_status_t check_tree(int num_experts, int num_ranks) {
  FP4GEMM_TRY(check_size("num_experts", num_experts, kTreeBlocks, kTreeBlocks, kMaxExperts));
  FP4GEMM_CHECK(num_ranks == 1 || num_ranks == 2 || num_ranks == 4 || num_ranks == 8,
                "num_ranks: is %d, must be 1, 2, 4 or 8 for a tree", num_ranks);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t combine_ranks(fp4gemm_combine_ranks_args_t const* args, int device,
                               fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_sum(*args, args->out, "out", args->out_dtype));
  FP4GEMM_TRY(check_terms(*args));
  FP4GEMM_TRY(
      check_buffers("y", args->y, "num_buffers", args->num_buffers, kMaxRanks, args->num_rows * args->d));
  FP4GEMM_CHECK(args->num_buffers * args->num_rows <= Rules::kMaxSize,
                "num_rows: is %lld, with num_buffers %d must be at most %lld rows", ll(args->num_rows),
                args->num_buffers, ll(Rules::kMaxSize));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_combine_ranks(*args, properties, stream);
  });
}

fp4gemm_status_t combine_part(fp4gemm_combine_part_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_ranks(args->num_experts, args->num_ranks, args->rank));
  FP4GEMM_TRY(check_tree(args->num_experts, args->num_ranks));
  FP4GEMM_TRY(check_sum(*args, args->part, "part", args->part_dtype));
  FP4GEMM_TRY(check_terms(*args));
  FP4GEMM_TRY(check_ids(args->topk_ids, args->ids_are_64_bits, args->num_tokens * args->top_k));
  FP4GEMM_TRY(check_size("num_rows", args->num_rows, 0, 1, Rules::kMaxSize / args->num_ranks));
  FP4GEMM_TRY(check_buffer("y", args->y, args->num_rows * args->d));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_combine_part(*args, properties, stream);
  });
}

fp4gemm_status_t combine_tree(fp4gemm_combine_tree_args_t const* args, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_tree(args->num_experts, args->num_ranks));
  FP4GEMM_TRY(check_sum(*args, args->out, "out", args->out_dtype));
  FP4GEMM_TRY(check_dtype("part_dtype", args->part_dtype));
  FP4GEMM_TRY(check_buffers("parts", args->parts, "num_ranks", args->num_ranks, kTreeBlocks,
                            args->num_tokens * args->d));
  FP4GEMM_TRY(check_ids(args->topk_ids, args->ids_are_64_bits, args->num_tokens * args->top_k));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_combine_tree(*args, properties, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

int64_t fp4gemm_record_bytes(int64_t k) {
  int64_t const scales = (k / 16 + 3) / 4 * 4;
  return (k / 2 + scales + 4 + 15) / 16 * 16;
}

fp4gemm_status_t fp4gemm_quantize_records(fp4gemm_quantize_records_args_t const* args, int device,
                                          fp4gemm_stream_t stream) {
  return fp4gemm::quantize_records(args, device, stream);
}

fp4gemm_status_t fp4gemm_make_records(fp4gemm_make_records_args_t const* args, int device,
                                      fp4gemm_stream_t stream) {
  return fp4gemm::make_records(args, device, stream);
}

fp4gemm_status_t fp4gemm_gather_records(fp4gemm_gather_records_args_t const* args, int device,
                                        fp4gemm_stream_t stream) {
  return fp4gemm::gather_records(args, device, stream);
}

fp4gemm_status_t fp4gemm_route_ranks_workspace_bytes(fp4gemm_route_ranks_args_t const* args, size_t* bytes) {
  FP4GEMM_TRY(fp4gemm::check_route(args));
  FP4GEMM_CHECK(bytes != nullptr, "bytes: is null, must point at a size");
  *bytes = static_cast<size_t>(fp4gemm::workspace_of(*args));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t fp4gemm_route_ranks(fp4gemm_route_ranks_args_t const* args, void* workspace,
                                     size_t workspace_bytes, int device, fp4gemm_stream_t stream) {
  return fp4gemm::route_ranks(args, workspace, workspace_bytes, device, stream);
}

fp4gemm_status_t fp4gemm_combine_ranks(fp4gemm_combine_ranks_args_t const* args, int device,
                                       fp4gemm_stream_t stream) {
  return fp4gemm::combine_ranks(args, device, stream);
}

fp4gemm_status_t fp4gemm_combine_part(fp4gemm_combine_part_args_t const* args, int device,
                                      fp4gemm_stream_t stream) {
  return fp4gemm::combine_part(args, device, stream);
}

fp4gemm_status_t fp4gemm_combine_tree(fp4gemm_combine_tree_args_t const* args, int device,
                                      fp4gemm_stream_t stream) {
  return fp4gemm::combine_tree(args, device, stream);
}

}  // extern "C"
