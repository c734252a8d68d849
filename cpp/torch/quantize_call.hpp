// What the operators that quantize share: the input and the groups of a call, and the shapes of its results.
#pragma once

#include <type_traits>

#include "quantize_ops.hpp"
#include "tensors.hpp"

namespace fp4gemm_torch {

#define FP4GEMM_AS_FIELD(type, name, initial, schema, member) type name = initial;
#define FP4GEMM_AS_ARGUMENT(type, name, initial, schema, member) , name
#define FP4GEMM_OF_OPTIONS(type, name, initial, schema, member) , options.name
#define FP4GEMM_AS_SET(type, name, initial, schema, member) \
  set_option(args, member, #name, options.name, device);

/// The options of the quantize operators, in the order of their schemas. hadamard is that of the direction
/// that the operator rotates.
struct QuantizeOptions {
  bool per_row = true;
  int64_t block_rows = 1;
  FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_FIELD)
};

/// In place of the member of an option that each direction has, and that the operator sets there.
struct OfDirection {};

inline void set_option(fp4gemm_quantize_args_t&, OfDirection, char const*, int64_t, int32_t) {}

/// Sets a member of the arguments from a number or a flag.
template <class Member, class Value>
void set_option(fp4gemm_quantize_args_t& args, Member fp4gemm_quantize_args_t::* member, char const* name,
                Value const& value, int32_t /*device*/) {
  if constexpr (std::is_same_v<Value, int64_t>) {
    args.*member = static_cast<Member>(narrow(name, value));
  } else {
    args.*member = static_cast<Member>(value);
  }
}

/// Sets a member of the arguments to the memory of {seed, offset}, if it is given.
inline void set_option(fp4gemm_quantize_args_t& args, int64_t const* fp4gemm_quantize_args_t::* member,
                       char const* name, std::optional<Tensor> const& value, int32_t device) {
  if (!value.has_value()) {
    return;
  }
  check_dtype(name, *value, ScalarType::Long);
  check_device(name, *value, device);
  STD_TORCH_CHECK(value->dim() == 1 && value->size(0) == 2 && value->is_contiguous(), name,
                  ": must be a contiguous vector of 2 elements");
  args.*member = static_cast<int64_t const*>(value->const_data_ptr());
}

/// Sets the options of a call, except for hadamard.
inline void set_options(fp4gemm_quantize_args_t& args, QuantizeOptions const& options, int32_t device) {
  args.scaling = options.per_row ? FP4GEMM_SCALING_ROW : FP4GEMM_SCALING_TENSOR;
  args.block_rows = narrow("block_rows", options.block_rows);
  FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_SET)
}

inline fp4gemm_hadamard_t hadamard_of(QuantizeOptions const& options) {
  return static_cast<fp4gemm_hadamard_t>(narrow("hadamard", options.hadamard));
}

/// Sets x (m, k), which must have unit stride along k, and its sizes. k must be a multiple of `step`.
template <class Args>
void set_input(Args& args, Tensor const& x, int64_t step = 16) {
  STD_TORCH_CHECK(x.dim() == 2, "x: has ", x.dim(), " dimensions, must have 2");
  check_unit_stride("x", x, "k");
  args.m = x.size(0);
  args.k = x.size(1);
  STD_TORCH_CHECK(args.k > 0 && args.k % step == 0, "x: k is ", args.k, ", must be a positive multiple of ",
                  step);
  args.x = x.const_data_ptr();
  args.x_row_stride = args.m > 1 ? x.stride(0) : args.k;  // the stride of a single row may be any number
}

/// Sets the ends of groups and their number, if there are groups.
template <class Args>
void set_groups(Args& args, std::optional<Tensor> const& offs, int32_t device) {
  if (!offs.has_value()) {
    return;
  }
  check_dtype("offs", *offs, ScalarType::Int);
  check_device("offs", *offs, device);
  STD_TORCH_CHECK(offs->dim() == 1 && offs->size(0) >= 1 && offs->is_contiguous(),
                  "offs: must be a contiguous vector of one element or more");
  args.offs = static_cast<int32_t const*>(offs->const_data_ptr());
  args.num_groups = narrow("offs: number of groups", offs->size(0));
}

struct Shape {
  int64_t rows;
  int64_t columns;
};

/// The shape of the scales of `rows` rows of `blocks` blocks, compact or swizzled. num_groups: groups of
/// rows, or 0.
inline Shape scale_shape(int64_t rows, int64_t blocks, bool swizzled = true, int num_groups = 0) {
  Shape shape{rows, blocks};
  if (swizzled) {
    fp4gemm_padded_scale_shape(rows, 16 * blocks, &shape.rows, &shape.columns);
  }
  if (num_groups > 0) {
    shape.rows = fp4gemm_grouped_scale_rows(rows, num_groups);
  }
  return shape;
}

struct Quantized {
  Tensor codes;
  Tensor scales;
  Tensor amax;  // without elements where it was given
};

/// Sets a new tensor for decoded values, instead of codes and scales, and returns it.
template <class Result>
Tensor set_decoded(Result& result, int64_t rows, int64_t k, int32_t device) {
  Tensor data = empty(rows, k, ScalarType::Half, device);
  result.decoded = data.mutable_data_ptr();
  return data;
}

/// k of FP8 tokens is a multiple of this.
constexpr int64_t kFp8Step = 64;

/// Sets a new tensor for e4m3 codes, instead of codes and scales, and returns it.
template <class Result>
Tensor set_fp8(Result& result, int64_t rows, int64_t k, int32_t device) {
  Tensor data = empty(rows, k, ScalarType::Float8_e4m3fn, device);
  result.fp8 = static_cast<uint8_t*>(data.mutable_data_ptr());
  return data;
}

}  // namespace fp4gemm_torch
