// scaled_mm and scaled_grouped_mm on CUDA tensors.
#include "gemm_ops.hpp"

namespace fp4gemm_torch {
namespace {

/// The shape of a matrix, or of a stack of matrices, that is (rows, k) elements each.
struct OperandShape {
  int64_t matrices, rows, k;
};

OperandShape operand_shape(char const* name, Tensor const& data, std::optional<Tensor> const& scales) {
  int64_t const dims = data.dim();
  STD_TORCH_CHECK(dims == 2 || dims == 3, name, ": has ", dims, " dimensions, must have 2, or 3 for experts");
  return {dims == 3 ? data.size(0) : 1, data.size(dims - 2),
          data.size(dims - 1) * (scales.has_value() ? 2 : 1)};
}

/// The shape of B. Prepacked it says nothing itself: b_rows are its rows, k is that of A.
OperandShape shape_of_b(Tensor const& b, std::optional<Tensor> const& scale_b, int64_t b_rows, int64_t k) {
  STD_TORCH_CHECK(b_rows >= 0, "b_rows: got ", b_rows, ", must be at least 0");
  if (b_rows == 0) {
    return operand_shape("b", b, scale_b);
  }
  int64_t const dims = b.dim();
  STD_TORCH_CHECK(dims == 1 || dims == 2, "b: has ", dims, " dimensions, must have 1, or 2 for experts");
  STD_TORCH_CHECK(!scale_b.has_value(), "scale_b: must be None for a prepacked b");
  int64_t const bytes = fp4gemm_prepacked_bytes(b_rows, k);
  STD_TORCH_CHECK(b.size(dims - 1) == bytes, "b: has ", b.size(dims - 1), " bytes a matrix, must have ",
                  bytes, ", prepacked (", b_rows, ", ", k, ")");
  return {dims == 2 ? b.size(0) : 1, b_rows, k};
}

/// Whether D and A are divided by rows: b is a matrix for each group.
bool is_by_rows(Tensor const& b, int64_t b_rows) { return b_rows > 0 || b.dim() == 3; }

/// The rows of a matrix of b.
int64_t rows_of_b(Tensor const& b, int64_t b_rows) { return b_rows > 0 ? b_rows : b.size(b.dim() - 2); }

fp4gemm_operand_t prepacked_operand(Tensor const& b, int32_t device) {
  check_contiguous("b", b, ScalarType::Byte, device);
  return {b.const_data_ptr(), nullptr, FP4GEMM_FORMAT_PREPACKED};
}

/// An operand with its scales, of scale_rows rows for each matrix before padding, or one that is decoded
/// already, or (A) never was quantized.
fp4gemm_operand_t operand_of(char const* name, char const* scale_name, Tensor const& data,
                             std::optional<Tensor> const& scales, OperandShape const& shape,
                             int64_t scale_rows, int32_t device) {
  if (!scales.has_value() && data.scalar_type() == ScalarType::BFloat16) {
    check_contiguous(name, data, ScalarType::BFloat16, device);
    return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_BF16};
  }
  if (!scales.has_value()) {
    check_contiguous(name, data, ScalarType::Half, device);
    return {data.const_data_ptr(), nullptr, FP4GEMM_FORMAT_FP16};
  }
  check_contiguous(name, data, ScalarType::Byte, device);
  check_stacked_scales(scale_name, *scales, data.dim() == 3 ? shape.matrices : 0, scale_rows, shape.k,
                       device);
  return {data.const_data_ptr(), scales->const_data_ptr(), FP4GEMM_FORMAT_NVFP4};
}

/// What every GEMM takes besides its operands, group ends and vectors.
struct Terms {
  double alpha;
  std::optional<std::string> const& kernel;
  int64_t activation;
  std::optional<Tensor> const& c;
  double beta;
  bool batch_invariant;
  int64_t b_rows;  // of a prepacked b; else 0
};

/// Columns of D: the gated activation makes one of two.
int64_t columns_of_d(int64_t n, int64_t activation) {
  return activation == FP4GEMM_ACTIVATION_SWIGLU ? n / 2 : n;
}

/// Rows of a (.., rows, n) tensor that is D or C: their stride.
int64_t row_stride(char const* name, Tensor const& t, int64_t rows, int64_t n) {
  int64_t const dims = t.dim();
  STD_TORCH_CHECK(n <= 1 || t.stride(dims - 1) == 1, name, ": stride along n is ", t.stride(dims - 1),
                  ", must be 1");
  bool const several = dims == 3 && t.size(0) > 1;  // so that the stride of a single row counts too
  int64_t const stride = n > 0 && (rows > 1 || (rows == 1 && several)) ? t.stride(dims - 2) : n;
  if (several && rows > 0 && n > 0) {
    STD_TORCH_CHECK(t.stride(0) == rows * stride, name, ": stride along groups is ", t.stride(0),
                    ", must be ", rows * stride);
  }
  return stride;
}

template <class Args>
void set_terms(Args& args, Terms const& terms, Tensor const& out, int32_t device) {
  args.alpha = static_cast<float>(terms.alpha);
  args.activation = static_cast<fp4gemm_activation_t>(terms.activation);
  args.out_dtype = dtype_of("out", out.scalar_type());
  args.d = out.mutable_data_ptr();
  args.d_row_stride = row_stride("out", out, args.m, columns_of_d(args.n, terms.activation));
  if (terms.c.has_value()) {
    Tensor const& c = *terms.c;
    check_device("c", c, device);
    STD_TORCH_CHECK(c.scalar_type() == out.scalar_type(), "c: its type must be that of the output");
    check_dims("c", c, out.dim());
    for (int64_t i = 0; i < c.dim(); ++i) {
      STD_TORCH_CHECK(c.size(i) == out.size(i), "c: size ", i, " is ", c.size(i), ", must be ", out.size(i));
    }
    args.c = c.const_data_ptr();
    args.c_row_stride = row_stride("c", c, args.m, args.n);
    args.beta = static_cast<float>(terms.beta);
  }
  args.batch_invariant = terms.batch_invariant ? 1 : 0;
  args.kernel = terms.kernel.has_value() ? terms.kernel->c_str() : nullptr;
}

/// Runs a call in a workspace of its own, from torch's allocator.
template <class Args>
void run_in_workspace(Args const& args, int32_t device,
                      fp4gemm_status_t (*workspace_bytes)(Args const*, int, size_t*),
                      fp4gemm_status_t (*run)(Args const*, void*, size_t, int, fp4gemm_stream_t)) {
  size_t bytes = 0;
  check_status(workspace_bytes(&args, device, &bytes));
  std::optional<Tensor> workspace;
  void* data = nullptr;
  if (bytes > 0) {
    workspace = empty(static_cast<int64_t>(bytes), -1, ScalarType::Byte, device);
    data = workspace->mutable_data_ptr();
  }
  check_status(run(&args, data, bytes, device, current_stream(device)));
}

/// scaled_mm into an existing (m, n) tensor of which the rows are contiguous.
void run_scaled_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& scale_a,
                   std::optional<Tensor> const& scale_b, std::optional<Tensor> const& alpha_row,
                   std::optional<Tensor> const& alpha_col, std::optional<Tensor> const& bias,
                   Terms const& terms, Tensor const& out) {
  int32_t const device = a.get_device_index();
  bool const is_prepacked = terms.b_rows > 0;
  check_dims("a", a, 2);
  check_dims("b", b, is_prepacked ? 1 : 2);
  OperandShape const shape_a = operand_shape("a", a, scale_a);
  OperandShape const shape_b = shape_of_b(b, scale_b, terms.b_rows, shape_a.k);
  STD_TORCH_CHECK(shape_b.k == shape_a.k, "b: k is ", shape_b.k, ", must be ", shape_a.k, " as of a");
  fp4gemm_dense_args_t args = FP4GEMM_DENSE_ARGS_INIT;
  args.m = shape_a.rows;
  args.n = shape_b.rows;
  args.k = shape_a.k;
  args.a = operand_of("a", "scale_a", a, scale_a, shape_a, args.m, device);
  args.b = is_prepacked ? prepacked_operand(b, device)
                        : operand_of("b", "scale_b", b, scale_b, shape_b, args.n, device);
  if (alpha_row.has_value()) {
    args.alpha_row = {check_vector("alpha_row", *alpha_row, args.m, true, device), alpha_row->size(0)};
  }
  if (alpha_col.has_value()) {
    args.alpha_col = {check_vector("alpha_col", *alpha_col, args.n, true, device), alpha_col->size(0)};
  }
  if (bias.has_value()) {
    args.bias = check_vector("bias", *bias, args.n, false, device);
  }
  set_terms(args, terms, out, device);
  run_in_workspace(args, device, fp4gemm_dense_workspace_bytes, fp4gemm_dense);
}

/// A float32 vector of `length` numbers (or one) that all groups share, or one of them for each group.
fp4gemm_grouped_vector_t group_vector(char const* name, std::optional<Tensor> const& t, int64_t groups,
                                      int64_t length, int32_t device) {
  if (!t.has_value()) {
    return {nullptr, 0, 0};
  }
  int64_t const dims = t->dim();
  STD_TORCH_CHECK(dims == 1 || dims == 2, name, ": has ", dims, " dimensions, must have 1, or 2 for groups");
  int64_t const numel = t->size(dims - 1);
  STD_TORCH_CHECK(numel == 1 || numel == length, name, ": last size is ", numel, ", must be 1 or ", length);
  STD_TORCH_CHECK(dims == 1 || t->size(0) == groups, name, ": first size is ", t->size(0), ", must be ",
                  groups);
  check_contiguous(name, *t, ScalarType::Float, device);
  return {static_cast<float const*>(t->const_data_ptr()), numel, dims == 2 ? numel : 0};
}

/// scaled_grouped_mm into an existing tensor: (m, n), or (groups, m, n) where b is a matrix.
void run_scaled_grouped_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> const& scale_a,
                           std::optional<Tensor> const& scale_b, Tensor const& offs,
                           std::optional<Tensor> const& alpha_groups, std::optional<Tensor> const& alpha_row,
                           std::optional<Tensor> const& alpha_col, std::optional<Tensor> const& bias,
                           Terms const& terms, Tensor const& out) {
  int32_t const device = a.get_device_index();
  bool const is_prepacked = terms.b_rows > 0;
  check_dims("a", a, 2);
  if (is_prepacked) {
    check_dims("b", b, 2);
  }
  OperandShape const shape_a = operand_shape("a", a, scale_a);
  OperandShape const shape_b = shape_of_b(b, scale_b, terms.b_rows, shape_a.k);
  STD_TORCH_CHECK(shape_b.k == shape_a.k, "b: k is ", shape_b.k, ", must be ", shape_a.k, " as of a");
  check_contiguous("offs", offs, ScalarType::Int, device);
  check_dims("offs", offs, 1);
  bool const by_rows = is_by_rows(b, terms.b_rows);
  fp4gemm_grouped_args_t args = FP4GEMM_GROUPED_ARGS_INIT;
  args.ragged = by_rows ? FP4GEMM_RAGGED_ROWS : FP4GEMM_RAGGED_DEPTH;
  args.m = shape_a.rows;
  args.n = shape_b.rows;
  args.k = shape_a.k;
  args.num_groups = static_cast<int>(offs.size(0));
  args.offs = static_cast<int32_t const*>(offs.const_data_ptr());
  STD_TORCH_CHECK(!by_rows || shape_b.matrices == args.num_groups, "b: has ", shape_b.matrices,
                  " matrices, must have ", args.num_groups, " as offs");
  int64_t const scale_rows_a = by_rows ? fp4gemm_grouped_scale_rows(args.m, args.num_groups) : args.m;
  args.a = operand_of("a", "scale_a", a, scale_a, shape_a, scale_rows_a, device);
  args.b = is_prepacked ? prepacked_operand(b, device)
                        : operand_of("b", "scale_b", b, scale_b, shape_b, args.n, device);
  args.alpha_row = group_vector("alpha_row", alpha_row, args.num_groups, args.m, device);
  args.alpha_col = group_vector("alpha_col", alpha_col, args.num_groups, args.n, device);
  args.bias = group_vector("bias", bias, args.num_groups, args.n, device);
  if (alpha_groups.has_value()) {
    args.alpha_groups = check_vector("alpha", *alpha_groups, args.num_groups, false, device);
  }
  set_terms(args, terms, out, device);
  run_in_workspace(args, device, fp4gemm_grouped_workspace_bytes, fp4gemm_grouped);
}

}  // namespace

Tensor scaled_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                 std::optional<Tensor> scale_b, double alpha, std::optional<Tensor> alpha_row,
                 std::optional<Tensor> alpha_col, std::optional<Tensor> bias, ScalarType out_dtype,
                 std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c, double beta,
                 bool batch_invariant, int64_t b_rows) {
  Tensor out =
      empty(a.size(0), columns_of_d(rows_of_b(b, b_rows), activation), out_dtype, a.get_device_index());
  run_scaled_mm(a, b, scale_a, scale_b, alpha_row, alpha_col, bias,
                {alpha, kernel, activation, c, beta, batch_invariant, b_rows}, out);
  return out;
}

void scaled_mm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                   std::optional<Tensor> scale_b, double alpha, std::optional<Tensor> alpha_row,
                   std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                   std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c,
                   double beta, bool batch_invariant, int64_t b_rows, Tensor out) {
  check_device("out", out, a.get_device_index());
  check_dims("out", out, 2);
  check_shape("out", out, a.size(0), columns_of_d(rows_of_b(b, b_rows), activation));
  run_scaled_mm(a, b, scale_a, scale_b, alpha_row, alpha_col, bias,
                {alpha, kernel, activation, c, beta, batch_invariant, b_rows}, out);
}

Tensor scaled_grouped_mm(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                         std::optional<Tensor> scale_b, Tensor const& offs, double alpha,
                         std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row,
                         std::optional<Tensor> alpha_col, std::optional<Tensor> bias, ScalarType out_dtype,
                         std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c,
                         double beta, bool batch_invariant, int64_t b_rows) {
  int32_t const device = a.get_device_index();
  Tensor out = is_by_rows(b, b_rows)
                   ? empty(a.size(0), columns_of_d(rows_of_b(b, b_rows), activation), out_dtype, device)
                   : empty3(offs.size(0), a.size(0), b.size(0), out_dtype, device);
  run_scaled_grouped_mm(a, b, scale_a, scale_b, offs, alpha_groups, alpha_row, alpha_col, bias,
                        {alpha, kernel, activation, c, beta, batch_invariant, b_rows}, out);
  return out;
}

void scaled_grouped_mm_out(Tensor const& a, Tensor const& b, std::optional<Tensor> scale_a,
                           std::optional<Tensor> scale_b, Tensor const& offs, double alpha,
                           std::optional<Tensor> alpha_groups, std::optional<Tensor> alpha_row,
                           std::optional<Tensor> alpha_col, std::optional<Tensor> bias,
                           std::optional<std::string> kernel, int64_t activation, std::optional<Tensor> c,
                           double beta, bool batch_invariant, int64_t b_rows, Tensor out) {
  check_device("out", out, a.get_device_index());
  bool const by_rows = is_by_rows(b, b_rows);
  check_dims("out", out, by_rows ? 2 : 3);
  int64_t const lead = by_rows ? 0 : 1;
  STD_TORCH_CHECK(by_rows || out.size(0) == offs.size(0), "out: has ", out.size(0), " groups, must have ",
                  offs.size(0));
  int64_t const cols = columns_of_d(rows_of_b(b, b_rows), activation);
  STD_TORCH_CHECK(out.size(lead) == a.size(0) && out.size(lead + 1) == cols, "out: is (", out.size(lead),
                  ", ", out.size(lead + 1), "), must be (", a.size(0), ", ", cols, ")");
  run_scaled_grouped_mm(a, b, scale_a, scale_b, offs, alpha_groups, alpha_row, alpha_col, bias,
                        {alpha, kernel, activation, c, beta, batch_invariant, b_rows}, out);
}

}  // namespace fp4gemm_torch
