// The operators of expert parallelism on CUDA: they check tensors, allocate results and call the C interface.
#include "ranks_ops.hpp"

#include <string>

#include "fp4gemm/ranks.h"
#include "quantize_call.hpp"

namespace fp4gemm_torch {
namespace {

/// Checks the records that are written, of `rows` rows of k elements.
void* records_out(Tensor const& out, int64_t rows, int64_t k, int32_t device) {
  check_matrix("out", out, ScalarType::Byte, device);
  check_shape("out", out, rows, fp4gemm_record_bytes(k));
  return out.mutable_data_ptr();
}

/// Matrices of one shape and dtype on the device, and their addresses, offset by `first` rows.
struct Buffers {
  std::vector<void const*> addresses;
  int64_t rows;
  int64_t columns;
  ScalarType type;

  Buffers(char const* name, std::vector<Tensor> const& tensors, int32_t device, int64_t first = 0) {
    STD_TORCH_CHECK(!tensors.empty(), name, ": has no tensors, must have at least 1");
    type = tensors[0].scalar_type();
    for (Tensor const& each : tensors) {
      check_matrix(name, each, type, device);
      rows = tensors[0].size(0);
      columns = tensors[0].size(1);
      check_shape(name, each, rows, columns);
      auto const* const data = static_cast<char const*>(each.const_data_ptr());
      addresses.push_back(data + first * columns * element_bytes());
    }
  }

  int count() const { return static_cast<int>(addresses.size()); }

 private:
  int64_t element_bytes() const { return type == ScalarType::Float ? 4 : type == ScalarType::Byte ? 1 : 2; }
};

int32_t device_of(char const* name, Tensor const& tensor) {
  STD_TORCH_CHECK(tensor.is_cuda(), name, ": must be a CUDA tensor");
  return tensor.get_device_index();
}

/// Sets the ids of the slots of args and the number of tokens and slots.
template <class Args>
void set_ids(Args& args, Tensor const& topk_ids, int32_t device) {
  check_dims("topk_ids", topk_ids, 2);
  ScalarType const type = topk_ids.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, "topk_ids: dtype is ", name_of(type),
                  ", must be Int or Long");
  check_matrix("topk_ids", topk_ids, type, device);
  args.num_tokens = topk_ids.size(0);
  args.top_k = narrow("topk_ids: number of slots", topk_ids.size(1));
  args.topk_ids = topk_ids.const_data_ptr();
  args.ids_are_64_bits = type == ScalarType::Long ? 1 : 0;
}

/// Sets the rows and weights of the slots.
template <class Args>
void set_terms(Args& args, Tensor const& row_of_pair, Tensor const& topk_weights, ScalarType y_type,
               int32_t device) {
  check_matrix("row_of_pair", row_of_pair, ScalarType::Int, device);
  args.num_tokens = row_of_pair.size(0);
  args.top_k = narrow("row_of_pair: number of slots", row_of_pair.size(1));
  check_matrix("topk_weights", topk_weights, topk_weights.scalar_type(), device);
  check_shape("topk_weights", topk_weights, args.num_tokens, args.top_k);
  args.y_dtype = dtype_of("y", y_type);
  args.row_of_pair = static_cast<int32_t const*>(row_of_pair.const_data_ptr());
  args.topk_weights = topk_weights.const_data_ptr();
  args.weights_dtype = dtype_of("topk_weights", topk_weights.scalar_type());
}

int32_t* ints(Tensor const& t) { return static_cast<int32_t*>(t.mutable_data_ptr()); }

}  // namespace

void quantize_records(Tensor const& x, Tensor const& out, int64_t four_over_six, bool fast_error,
                      int64_t e4m3_max, std::optional<Tensor> rng_state, int64_t first_row) {
  int32_t const device = device_of("x", x);
  fp4gemm_quantize_records_args_t args = FP4GEMM_QUANTIZE_RECORDS_ARGS_INIT;
  set_input(args, x);
  args.x_dtype = dtype_of("x", x.scalar_type());
  args.four_over_six = static_cast<fp4gemm_four_over_six_t>(narrow("four_over_six", four_over_six));
  args.fast_error = fast_error ? 1 : 0;
  args.e4m3_max = narrow("e4m3_max", e4m3_max);
  args.first_row = first_row;
  if (rng_state.has_value()) {
    check_dims("rng_state", *rng_state, 1);
    check_contiguous("rng_state", *rng_state, ScalarType::Long, device);
    STD_TORCH_CHECK(rng_state->size(0) == 2, "rng_state: has ", rng_state->size(0), " elements, must have 2");
    args.rng_state = static_cast<int64_t const*>(rng_state->const_data_ptr());
  }
  args.records = records_out(out, args.m, args.k, device);
  check_status(fp4gemm_quantize_records(&args, device, current_stream(device)));
}

void make_records(Tensor const& codes, Tensor const& scales, Tensor const& amax, Tensor const& out) {
  int32_t const device = device_of("codes", codes);
  check_matrix("codes", codes, ScalarType::Byte, device);
  fp4gemm_make_records_args_t args = FP4GEMM_MAKE_RECORDS_ARGS_INIT;
  args.m = codes.size(0);
  args.k = 2 * codes.size(1);
  check_scales("scales", scales, args.m, args.k, device);
  args.codes = static_cast<uint8_t const*>(codes.const_data_ptr());
  args.scales = static_cast<uint8_t const*>(scales.const_data_ptr());
  args.amax = check_vector("amax", amax, args.m, false, device);
  args.records = records_out(out, args.m, args.k, device);
  check_status(fp4gemm_make_records(&args, device, current_stream(device)));
}

std::tuple<Tensor, Tensor, Tensor> gather_records(std::vector<Tensor> records, Tensor const& rows,
                                                  Tensor const& offs, int64_t k) {
  int32_t const device = device_of("rows", rows);
  Buffers const buffers("records", records, device);
  STD_TORCH_CHECK(buffers.type == ScalarType::Byte, "records: dtype is ", name_of(buffers.type),
                  ", must be Byte");
  STD_TORCH_CHECK(k > 0 && k % 16 == 0, "k: is ", k, ", must be a positive multiple of 16");
  STD_TORCH_CHECK(buffers.columns == fp4gemm_record_bytes(k), "records: has ", buffers.columns,
                  " bytes a record, must have ", fp4gemm_record_bytes(k), " for k = ", k);
  check_dims("rows", rows, 1);
  check_contiguous("rows", rows, ScalarType::Int, device);
  fp4gemm_gather_records_args_t args = FP4GEMM_GATHER_RECORDS_ARGS_INIT;
  set_groups(args, offs, device);
  args.m = rows.size(0);
  args.k = k;
  args.records = buffers.addresses.data();
  args.num_buffers = buffers.count();
  args.num_records = buffers.rows;
  args.rows = static_cast<int32_t const*>(rows.const_data_ptr());
  Shape const shape = scale_shape(args.m, k / 16, true, args.num_groups);
  Tensor const codes = empty(args.m, k / 2, ScalarType::Byte, device);
  Tensor const scales = empty(shape.rows, shape.columns, ScalarType::Float8_e4m3fn, device);
  Tensor const amax = empty(args.m, -1, ScalarType::Float, device);
  args.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  args.amax = static_cast<float*>(amax.mutable_data_ptr());
  check_status(fp4gemm_gather_records(&args, device, current_stream(device)));
  return {codes, scales, amax};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> route_ranks(Tensor const& topk_ids, int64_t num_experts,
                                                               int64_t num_ranks, int64_t rank,
                                                               int64_t capacity) {
  int32_t const device = device_of("topk_ids", topk_ids);
  fp4gemm_route_ranks_args_t args = FP4GEMM_ROUTE_RANKS_ARGS_INIT;
  set_ids(args, topk_ids, device);
  args.num_experts = narrow("num_experts", num_experts);
  args.num_ranks = narrow("num_ranks", num_ranks);
  args.rank = narrow("rank", rank);
  args.capacity = capacity;
  size_t bytes = 0;
  check_status(fp4gemm_route_ranks_workspace_bytes(&args, &bytes));
  Tensor const offs = empty(num_experts / num_ranks, -1, ScalarType::Int, device);
  Tensor const token_of_row = empty(capacity, -1, ScalarType::Int, device);
  Tensor const slot_of_row = empty(capacity, -1, ScalarType::Int, device);
  Tensor const row_of_pair = empty(args.num_tokens, args.top_k, ScalarType::Int, device);
  Tensor const status = empty(2, -1, ScalarType::Int, device);
  args.offs = ints(offs);
  args.token_of_row = ints(token_of_row);
  args.slot_of_row = ints(slot_of_row);
  args.row_of_pair = ints(row_of_pair);
  args.status = ints(status);
  std::optional<Tensor> workspace;
  if (bytes > 0) {
    workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, device);
  }
  void* const data = workspace.has_value() ? workspace->mutable_data_ptr() : nullptr;
  check_status(fp4gemm_route_ranks(&args, data, bytes, device, current_stream(device)));
  return {offs, token_of_row, slot_of_row, row_of_pair, status};
}

Tensor combine_ranks(std::vector<Tensor> y, Tensor const& row_of_pair, Tensor const& topk_weights,
                     std::optional<ScalarType> out_dtype) {
  int32_t const device = device_of("row_of_pair", row_of_pair);
  Buffers const buffers("y", y, device);
  fp4gemm_combine_ranks_args_t args = FP4GEMM_COMBINE_RANKS_ARGS_INIT;
  set_terms(args, row_of_pair, topk_weights, buffers.type, device);
  args.d = buffers.columns;
  args.y = buffers.addresses.data();
  args.num_buffers = buffers.count();
  args.num_rows = buffers.rows;
  Tensor const out =
      empty(args.num_tokens, args.d, out_dtype.has_value() ? *out_dtype : buffers.type, device);
  args.out = out.mutable_data_ptr();
  args.out_dtype = dtype_of("out_dtype", out.scalar_type());
  check_status(fp4gemm_combine_ranks(&args, device, current_stream(device)));
  return out;
}

void combine_part(Tensor const& y, Tensor const& topk_ids, Tensor const& row_of_pair,
                  Tensor const& topk_weights, Tensor const& out, int64_t num_experts, int64_t num_ranks,
                  int64_t rank) {
  int32_t const device = device_of("y", y);
  check_matrix("y", y, y.scalar_type(), device);
  fp4gemm_combine_part_args_t args = FP4GEMM_COMBINE_PART_ARGS_INIT;
  set_terms(args, row_of_pair, topk_weights, y.scalar_type(), device);
  set_ids(args, topk_ids, device);
  check_shape("row_of_pair", row_of_pair, args.num_tokens, args.top_k);
  args.num_experts = narrow("num_experts", num_experts);
  args.num_ranks = narrow("num_ranks", num_ranks);
  args.rank = narrow("rank", rank);
  args.num_rows = y.size(0);
  args.d = y.size(1);
  args.y = y.const_data_ptr();
  check_matrix("out", out, out.scalar_type(), device);
  check_shape("out", out, args.num_tokens, args.d);
  args.part = out.mutable_data_ptr();
  args.part_dtype = dtype_of("out", out.scalar_type());
  check_status(fp4gemm_combine_part(&args, device, current_stream(device)));
}

Tensor combine_tree(std::vector<Tensor> parts, Tensor const& topk_ids, int64_t num_experts,
                    int64_t first_token, ScalarType out_dtype) {
  int32_t const device = device_of("topk_ids", topk_ids);
  fp4gemm_combine_tree_args_t args = FP4GEMM_COMBINE_TREE_ARGS_INIT;
  set_ids(args, topk_ids, device);
  STD_TORCH_CHECK(first_token >= 0, "first_token: is ", first_token, ", must be at least 0");
  Buffers const buffers("parts", parts, device, first_token);
  STD_TORCH_CHECK(first_token + args.num_tokens <= buffers.rows, "first_token: is ", first_token, ", with ",
                  args.num_tokens, " tokens must be at most ", buffers.rows, ", the tokens of parts");
  args.num_experts = narrow("num_experts", num_experts);
  args.d = buffers.columns;
  args.parts = buffers.addresses.data();
  args.num_ranks = buffers.count();
  args.part_dtype = dtype_of("parts", buffers.type);
  Tensor const out = empty(args.num_tokens, args.d, out_dtype, device);
  args.out = out.mutable_data_ptr();
  args.out_dtype = dtype_of("out_dtype", out_dtype);
  check_status(fp4gemm_combine_tree(&args, device, current_stream(device)));
  return out;
}

}  // namespace fp4gemm_torch
