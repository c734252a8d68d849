// gemm and gemm_out on CUDA tensors, dense and grouped.
#include "gemm_ops.hpp"

#include "fp4gemm/generated.h"
#include "gemm_call.hpp"

namespace fp4gemm_torch {

bool is_gated(int64_t activation) {
  if (activation == FP4GEMM_ACTIVATION_NONE) {
    return false;
  }
  fp4gemm_activation_info_t info{};
  for (int i = 0; i < fp4gemm_activation_count(); ++i) {
    check_status(fp4gemm_activation_info(i, &info));
    if (info.activation == activation) {
      return info.is_gated != 0;
    }
  }
  STD_TORCH_CHECK(false, "activation: is ", activation, ", must be the number of an activation, below ",
                  fp4gemm_activation_count());
}

namespace {

/// The shape of a matrix, or of a stack of matrices, that is (rows, k) elements each.
struct OperandShape {
  int64_t matrices, rows, k;
};

/// The shape of an operand. Codes, which have scales and are bytes, hold two elements in each.
OperandShape operand_shape(char const* name, Tensor const& data, std::optional<Tensor> const& scales) {
  int64_t const dims = data.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, name, ": has ", dims, " dimensions, must have 2, or 3 for experts");
  return {dims == 3 ? data.size(0) : 1, data.size(dims - 2),
          data.size(dims - 1) * (scales.has_value() && !is_fp8(data) ? 2 : 1)};
}

/// The shape of B. Prepacked bytes have no shape of their own: b_rows are the rows, and k is that of A.
OperandShape shape_of_b(Tensor const& b, std::optional<Tensor> const& scale_b, int64_t b_rows, int64_t k) {
  if (b_rows == 0) {
    return operand_shape("b", b, scale_b);
  }
  STD_TORCH_CHECK(!scale_b.has_value(), "scale_b: must be None for a prepacked b");
  int64_t const dims = b.dim();
  int64_t const bytes = prepacked_bytes(b, b_rows, k);
  STD_TORCH_CHECK(b.size(dims - 1) == bytes, "b: has ", b.size(dims - 1), " bytes a matrix, must have ",
                  bytes, ", prepacked (", b_rows, ", ", k, ")");
  return {dims == 2 ? b.size(0) : 1, b_rows, k};
}

/// An operand with scales (scale_rows rows for each matrix, before padding), or one that was decoded before
/// or, as A, never quantized or quantized to e4m3 without block scales.
fp4gemm_operand_t operand_of(char const* name, char const* scale_name, Tensor const& data,
                             std::optional<Tensor> const& scales, OperandShape const& shape,
                             int64_t scale_rows, int32_t device) {
  if (!scales.has_value() && data.scalar_type() == ScalarType::BFloat16) {
    check_contiguous(name, data, ScalarType::BFloat16, device);
    return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_BF16};
  }
  if (!scales.has_value() && is_fp8(data)) {
    check_contiguous(name, data, ScalarType::Float8_e4m3fn, device);
    return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_E4M3};
  }
  if (!scales.has_value()) {
    check_contiguous(name, data, ScalarType::Half, device);
    return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_FP16};
  }
  return packed_operand(name, scale_name, data, *scales, data.dim() == 3 ? shape.matrices : 0, scale_rows,
                        shape.k, device, /*may_be_mxfp4=*/true);
}

/// The arguments of both operators, with the names of their schemas, and what follows from them.
struct Call {
  Tensor const& a;
  Tensor const& b;
  std::optional<Tensor> const& scale_a;
  std::optional<Tensor> const& scale_b;
  std::optional<Tensor> const& offs;
  double alpha;
  std::optional<Tensor> const& alpha_groups;
  std::optional<Tensor> const& alpha_row;
  std::optional<Tensor> const& alpha_col;
  std::optional<Tensor> const& bias;
  int64_t activation;
  std::optional<Tensor> const& c;
  double beta;
  bool batch_invariant;
  bool use_fast_accum;
  int64_t b_rows;  // of a prepacked b; else 0
  std::optional<std::string> const& kernel;
  bool halves_columns = false;  // D has n / 2 columns because of a formula that takes pairs

  int32_t device() const { return a.get_device_index(); }
  bool is_prepacked() const { return b_rows > 0; }
  bool is_grouped() const { return offs.has_value(); }
  int64_t num_groups() const { return is_grouped() ? offs->size(0) : 0; }
  /// b holds a matrix for each group.
  bool is_ragged_m() const { return is_grouped() && b.dim() == (is_prepacked() ? 2 : 3); }
  bool is_ragged_k() const { return is_grouped() && !is_ragged_m(); }

  /// What the other members rely on; the C interface checks the rest.
  void check_dimensions() const {
    STD_TORCH_CHECK(b_rows >= 0 && b_rows <= INT32_MAX, "b_rows: is ", b_rows, ", must be between 0 and ",
                    INT32_MAX);
    check_dims("a", a, 2);
    check_fast_accum(use_fast_accum, is_fp8(a) && !scale_a.has_value());
    if (is_grouped()) {
      check_dims("offs", *offs, 1);
      check_contiguous("offs", *offs, ScalarType::Int, device());
      STD_TORCH_CHECK(num_groups() > 0, "offs: is empty, must have one end for each group");
      STD_TORCH_CHECK(num_groups() <= INT32_MAX, "offs: has ", num_groups(), " ends, must have at most ",
                      INT32_MAX);
    } else {
      STD_TORCH_CHECK(!alpha_groups.has_value(), "alpha_groups: must be None without offs");
    }
    if (is_prepacked()) {
      check_dims("b", b, is_grouped() ? 2 : 1);
    } else if (!is_grouped()) {
      check_dims("b", b, 2);
    } else {
      STD_TORCH_CHECK(b.dim() == 2 || b.dim() == 3, "b: has ", b.dim(), " dimensions, must have 2 or 3");
    }
  }

  /// The columns of D.
  int64_t columns_of_d() const {
    int64_t const n = is_prepacked() ? b_rows : b.size(b.dim() - 2);
    return halves_columns || is_gated(activation) ? n / 2 : n;
  }
};

/// The stride between the rows of `t`, which is D or C: (rows, columns), or (groups, rows, columns) with the
/// rows of all groups equally far apart.
int64_t row_stride(char const* name, Tensor const& t, int64_t rows, int64_t columns) {
  int64_t const dims = t.dim();
  check_unit_stride(name, t, "n");
  bool const several = dims == 3 && t.size(0) > 1;  // then the stride matters for a single row too
  int64_t const stride = columns > 0 && (rows > 1 || (rows == 1 && several)) ? t.stride(dims - 2) : columns;
  if (several && rows > 0 && columns > 0) {
    STD_TORCH_CHECK(t.stride(0) == rows * stride, name, ": stride along groups is ", t.stride(0),
                    ", must be ", rows * stride);
  }
  return stride;
}

/// Sets the sizes, the groups and the operands: m and k are those of A, n is that of B.
void set_operands(fp4gemm_gemm_args_t& args, Call const& call) {
  int32_t const device = call.device();
  OperandShape const shape_a = operand_shape("a", call.a, call.scale_a);
  OperandShape const shape_b = shape_of_b(call.b, call.scale_b, call.b_rows, shape_a.k);
  STD_TORCH_CHECK(shape_b.k == shape_a.k, "b: k is ", shape_b.k, ", must be ", shape_a.k, " as of a");
  args.m = shape_a.rows;
  args.n = shape_b.rows;
  args.k = shape_a.k;
  int64_t scale_rows_a = args.m;
  if (call.is_grouped()) {
    args.ragged = call.is_ragged_m() ? FP4GEMM_RAGGED_M : FP4GEMM_RAGGED_K;
    args.num_groups = static_cast<int>(call.num_groups());
    args.offs = static_cast<int32_t const*>(call.offs->const_data_ptr());
  }
  if (call.is_ragged_m()) {
    STD_TORCH_CHECK(shape_b.matrices == args.num_groups, "b: has ", shape_b.matrices, " matrices, must have ",
                    args.num_groups, " as offs");
    scale_rows_a = fp4gemm_grouped_scale_rows(args.m, args.num_groups);
  }
  args.a = operand_of("a", "scale_a", call.a, call.scale_a, shape_a, scale_rows_a, device);
  args.b = call.is_prepacked() ? prepacked_operand("b", call.b, is_fp8(call.a), device)
                               : operand_of("b", "scale_b", call.b, call.scale_b, shape_b, args.n, device);
  // The bytes of a prepacked weight come from prepack, which ends with an empty kernel, or from a copy of
  // contiguous bytes, which is no kernel. If a kernel of torch writes them, another ordinary launch must
  // follow it before the product: docs/hopper.md and the docstring of PrepackedTensor say so.
  args.b_is_constant = call.is_prepacked() ? 1 : 0;
}

/// Sets the terms of the epilogue, D, and what decides the selection of the kernel: the output type, the
/// activation, batch_invariant and, in place of a selection, the kernel's name. A term that is absent keeps
/// the value of FP4GEMM_GEMM_ARGS_INIT.
void set_terms(fp4gemm_gemm_args_t& args, Call const& call, Tensor const& out) {
  int32_t const device = call.device();
  args.alpha = static_cast<float>(call.alpha);
  args.alpha_row = vector_of("alpha_row", call.alpha_row, args.num_groups, args.m, device);
  args.alpha_col = vector_of("alpha_col", call.alpha_col, args.num_groups, args.n, device);
  args.bias = vector_of("bias", call.bias, args.num_groups, args.n, device);
  if (call.alpha_groups.has_value()) {
    args.alpha_groups = check_vector("alpha_groups", *call.alpha_groups, args.num_groups, false, device);
  }
  args.activation = static_cast<fp4gemm_activation_t>(narrow("activation", call.activation));
  args.out_dtype = dtype_of("out", out.scalar_type());
  args.d = out.mutable_data_ptr();
  args.d_row_stride = row_stride("out", out, args.m, call.columns_of_d());
  if (call.c.has_value()) {
    Tensor const& c = *call.c;
    check_device("c", c, device);
    STD_TORCH_CHECK(c.scalar_type() == out.scalar_type(), "c: dtype is ", name_of(c.scalar_type()),
                    ", must be ", name_of(out.scalar_type()), " as of out");
    check_dims("c", c, out.dim());
    for (int64_t i = 0; i < c.dim(); ++i) {
      STD_TORCH_CHECK(c.size(i) == out.size(i), "c: size ", i, " is ", c.size(i), ", must be ", out.size(i));
    }
    args.c = c.const_data_ptr();
    args.c_row_stride = row_stride("c", c, args.m, call.columns_of_d());
    args.beta = static_cast<float>(call.beta);
  }
  args.batch_invariant = call.batch_invariant ? 1 : 0;
  args.use_fast_accum = call.use_fast_accum ? 1 : 0;
  args.kernel = call.kernel.has_value() ? call.kernel->c_str() : nullptr;
}

/// A result of the call: (m, columns), or (groups, m, columns) ragged in k.
Tensor empty_result(Call const& call, ScalarType dtype) {
  int64_t const m = call.a.size(0);
  return call.is_ragged_k() ? empty3(call.num_groups(), m, call.columns_of_d(), dtype, call.device())
                            : empty(m, call.columns_of_d(), dtype, call.device());
}

/// The numbers of a formula that is compiled at run time, in the order of the parameter `form`.
enum FormField {
  kTakesPairs,
  kNumResults,
  kTakesBias,
  kTakesC,
  kNumRows,
  kNumColumns,
  kNumGroups,
  kNumMatrices,
  kFormFields
};

/// The formula's inputs and further outputs.
fp4gemm_generated_t generated_of(Call const& call, fp4gemm_gemm_args_t const& args,
                                 std::vector<int64_t> const& form, std::vector<Tensor> const& inputs,
                                 std::vector<double> const& scalars, std::vector<Tensor> const& aux) {
  int32_t const device = call.device();
  STD_TORCH_CHECK(form.size() == kFormFields, "form: has ", form.size(), " numbers, must have ",
                  static_cast<int>(kFormFields));
  fp4gemm_generated_t generated = FP4GEMM_GENERATED_INIT;
  int* const fields[kFormFields] = {&generated.takes_pairs, &generated.num_results, &generated.takes_bias,
                                    &generated.takes_c,     &generated.num_rows,    &generated.num_columns,
                                    &generated.num_groups,  &generated.num_matrices};
  int64_t total = 0;
  for (int i = 0; i < kFormFields; ++i) {
    int64_t const most =
        i >= kNumRows ? (i == kNumMatrices ? FP4GEMM_GENERATED_MOST_MATRICES : FP4GEMM_GENERATED_MOST_VECTORS)
                      : 2;
    int64_t const value = form[static_cast<size_t>(i)];
    STD_TORCH_CHECK(value >= 0 && value <= most, "form: number ", i, " is ", value,
                    ", must be between 0 and ", most);
    *fields[i] = static_cast<int>(value);
    total += i >= kNumRows ? value : 0;
  }
  STD_TORCH_CHECK(static_cast<int64_t>(inputs.size()) == total, "inputs: has ", inputs.size(),
                  " tensors, must have ", total);
  STD_TORCH_CHECK(scalars.size() <= FP4GEMM_GENERATED_MOST_SCALARS, "scalars: has ", scalars.size(),
                  ", must have at most ", FP4GEMM_GENERATED_MOST_SCALARS);
  STD_TORCH_CHECK(aux.size() <= FP4GEMM_GENERATED_MOST_AUX, "aux: has ", aux.size(),
                  " tensors, must have at most ", FP4GEMM_GENERATED_MOST_AUX);
  int64_t const columns = generated.takes_pairs != 0 ? args.n / 2 : args.n;  // of inputs
  auto next = inputs.begin();
  for (int i = 0; i < generated.num_rows; ++i) {
    generated.rows[i] = vector_of("inputs by row", *next++, args.num_groups, args.m, device);
  }
  for (int i = 0; i < generated.num_columns; ++i) {
    generated.columns[i] = vector_of("inputs by column", *next++, args.num_groups, columns, device);
  }
  for (int i = 0; i < generated.num_groups; ++i) {
    generated.groups[i] = check_vector("inputs by group", *next++, args.num_groups, false, device);
  }
  auto const matrix_of = [&](char const* name, Tensor const& t, int64_t width) {
    int64_t const lead = call.is_ragged_k() ? 1 : 0;
    check_device(name, t, device);
    check_dims(name, t, 2 + lead);
    STD_TORCH_CHECK(lead == 0 || t.size(0) == args.num_groups, name, ": has ", t.size(0),
                    " groups, must have ", args.num_groups);
    STD_TORCH_CHECK(t.size(lead) == args.m && t.size(lead + 1) == width, name, ": is (", t.size(lead), ", ",
                    t.size(lead + 1), "), must be (", args.m, ", ", width, ")");
    return fp4gemm_generated_matrix_t{const_cast<void*>(t.const_data_ptr()),
                                      row_stride(name, t, args.m, width), dtype_of(name, t.scalar_type())};
  };
  for (int i = 0; i < generated.num_matrices; ++i) {
    generated.matrices[i] = matrix_of("inputs like D", *next++, columns);
  }
  generated.num_scalars = static_cast<int>(scalars.size());
  for (size_t i = 0; i < scalars.size(); ++i) {
    generated.scalars[i] = static_cast<float>(scalars[i]);
  }
  generated.num_aux = static_cast<int>(aux.size());
  for (size_t i = 0; i < aux.size(); ++i) {
    generated.aux[i] = matrix_of("aux", aux[i], call.columns_of_d());
  }
  return generated;
}

/// Checks the device and the shape of a result: (m, columns), or (groups, m, columns) ragged in k.
void check_result(char const* name, Call const& call, Tensor const& out) {
  check_device(name, out, call.device());
  int64_t const lead = call.is_ragged_k() ? 1 : 0;
  check_dims(name, out, 2 + lead);
  STD_TORCH_CHECK(lead == 0 || out.size(0) == call.num_groups(), name, ": has ", out.size(0),
                  " groups, must have ", call.num_groups());
  STD_TORCH_CHECK(out.size(lead) == call.a.size(0) && out.size(lead + 1) == call.columns_of_d(), name,
                  ": is (", out.size(lead), ", ", out.size(lead + 1), "), must be (", call.a.size(0), ", ",
                  call.columns_of_d(), ")");
}

/// Runs the call. out: (m, n), or (groups, m, n) ragged in k.
void run(Call const& call, Tensor const& out) {
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  set_operands(args, call);
  set_terms(args, call, out);
  call_gemm(args, call.device());
}

}  // namespace

Tensor gemm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a, std::optional<Tensor> scale_b,
            std::optional<Tensor> offs, double alpha, std::optional<Tensor> alpha_groups,
            std::optional<Tensor> alpha_row, std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
            int64_t activation, std::optional<Tensor> c, double beta, bool batch_invariant,
            bool use_fast_accum, int64_t b_rows, std::optional<std::string> kernel, ScalarType out_dtype) {
  Call const call{a,         b,    scale_a,    scale_b, offs, alpha,           alpha_groups,   alpha_row,
                  alpha_col, bias, activation, c,       beta, batch_invariant, use_fast_accum, b_rows,
                  kernel};
  call.check_dimensions();
  Tensor out = empty_result(call, out_dtype);
  run(call, out);
  return out;
}

void gemm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a, std::optional<Tensor> scale_b,
              std::optional<Tensor> offs, double alpha, std::optional<Tensor> alpha_groups,
              std::optional<Tensor> alpha_row, std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
              int64_t activation, std::optional<Tensor> c, double beta, bool batch_invariant,
              bool use_fast_accum, int64_t b_rows, std::optional<std::string> kernel, Tensor out) {
  Call const call{a,         b,    scale_a,    scale_b, offs, alpha,           alpha_groups,   alpha_row,
                  alpha_col, bias, activation, c,       beta, batch_invariant, use_fast_accum, b_rows,
                  kernel};
  call.check_dimensions();
  check_result("out", call, out);
  run(call, out);
}

namespace {

/// Whether D has half of the columns; generated_of checks the form.
bool halves_columns(std::vector<int64_t> const& form) {
  return form.size() == kFormFields && form[kTakesPairs] != 0 && form[kNumResults] == 1;
}

/// The C arguments of the operators below.
struct GeneratedCall {
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  fp4gemm_generated_t generated = FP4GEMM_GENERATED_INIT;

  GeneratedCall(Call const& call, int64_t formula, std::vector<int64_t> const& form,
                std::vector<Tensor> const& inputs, std::vector<double> const& scalars, Tensor const& out,
                std::vector<Tensor> const& aux) {
    call.check_dimensions();
    check_result("out", call, out);
    for (Tensor const& x : aux) {
      check_result("aux", call, x);
    }
    set_operands(args, call);
    set_terms(args, call, out);
    generated = generated_of(call, args, form, inputs, scalars, aux);
    generated.formula = reinterpret_cast<fp4gemm_formula_t*>(static_cast<intptr_t>(formula));
  }
};

}  // namespace

#define FP4GEMM_GENERATED_CALL           \
  Call const call{a,                     \
                  b,                     \
                  scale_a,               \
                  scale_b,               \
                  offs,                  \
                  alpha,                 \
                  alpha_groups,          \
                  alpha_row,             \
                  alpha_col,             \
                  bias,                  \
                  0,                     \
                  c,                     \
                  0.0,                   \
                  batch_invariant,       \
                  use_fast_accum,        \
                  b_rows,                \
                  kernel,                \
                  halves_columns(form)}; \
  GeneratedCall const of(call, formula, form, inputs, scalars, out, aux)

std::string gemm_generated_source(FP4GEMM_GENERATED_PARAMETERS) {
  FP4GEMM_GENERATED_CALL;
  char source[4096];
  check_status(fp4gemm_generated_source(&of.args, &of.generated, call.device(), source, sizeof(source)));
  return source;
}

void gemm_generated_load(Tensor const& cubin, FP4GEMM_GENERATED_PARAMETERS) {
  FP4GEMM_GENERATED_CALL;
  STD_TORCH_CHECK(!cubin.is_cuda() && cubin.scalar_type() == ScalarType::Byte,
                  "cubin: must be bytes in host memory");
  check_status(fp4gemm_generated_load(&of.args, &of.generated, call.device(), cubin.const_data_ptr()));
}

bool gemm_generated(FP4GEMM_GENERATED_PARAMETERS) {
  FP4GEMM_GENERATED_CALL;
  fp4gemm_cast_t const cast = FP4GEMM_CAST_INIT;
  size_t bytes = 0;
  check_status(fp4gemm_gemm_generated_workspace_bytes(&of.args, &cast, &of.generated, call.device(), &bytes));
  std::optional<Tensor> workspace;
  void* data = nullptr;
  if (bytes > 0) {
    workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, call.device());
    data = workspace->mutable_data_ptr();
  }
  fp4gemm_status_t const status = fp4gemm_gemm_generated(&of.args, &cast, &of.generated, data, bytes,
                                                         call.device(), current_stream(call.device()));
  if (status == FP4GEMM_ERROR_NOT_LOADED) {
    return false;
  }
  check_status(status);
  return true;
}

#undef FP4GEMM_GENERATED_CALL

}  // namespace fp4gemm_torch
