// The checks of the arguments of fp4gemm_gemm.
#include "gemm_args.hpp"

#include <algorithm>
#include <cstdio>

#include "extent.hpp"

namespace fp4gemm {
namespace {

fp4gemm_status_t check_format_of_a(GemmArgs const& args) {
  fp4gemm_format_t const a = args.a.format;
  if (quantizes_a(args)) {
    FP4GEMM_CHECK(a == FP4GEMM_FORMAT_BF16 || a == FP4GEMM_FORMAT_FP16 || a == FP4GEMM_FORMAT_FP32,
                  "a: format is %d, must be FP4GEMM_FORMAT_BF16, FP4GEMM_FORMAT_FP16 or FP4GEMM_FORMAT_FP32 "
                  "with quantize_a",
                  static_cast<int>(a));
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(a == FP4GEMM_FORMAT_NVFP4 || a == FP4GEMM_FORMAT_FP16 || a == FP4GEMM_FORMAT_BF16 ||
                    a == FP4GEMM_FORMAT_E4M3,
                "a: format is %d, must be FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_BF16 or "
                "FP4GEMM_FORMAT_E4M3",
                static_cast<int>(a));
  FP4GEMM_CHECK(a != FP4GEMM_FORMAT_BF16 || args.b.format != FP4GEMM_FORMAT_FP16,
                "b: format is FP4GEMM_FORMAT_FP16, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_PREPACKED "
                "with a in FP4GEMM_FORMAT_BF16");
  return FP4GEMM_SUCCESS;
}

/// FP8 tokens have weights prepacked for them, or NVFP4 ones, and nothing else has such weights.
fp4gemm_status_t check_fp8(GemmArgs const& args) {
  fp4gemm_format_t const b = args.b.format;
  if (!multiplies_fp8(args)) {
    FP4GEMM_CHECK(b != FP4GEMM_FORMAT_PREPACKED_FP8,
                  "b: format is FP4GEMM_FORMAT_PREPACKED_FP8, must be another unless a is e4m3 or quantize_a "
                  "is FP4GEMM_QUANTIZE_A_FP8");
    FP4GEMM_CHECK(args.use_fast_accum == 0,
                  "use_fast_accum: is %d, must be 0 unless a is e4m3 or quantize_a is FP4GEMM_QUANTIZE_A_FP8",
                  args.use_fast_accum);
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(
      b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_PREPACKED_FP8,
      "b: format is %d, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_PREPACKED_FP8 with a in e4m3",
      static_cast<int>(b));
  FP4GEMM_CHECK(!is_ragged_k(args), "a: is e4m3, must be another format for groups that are ragged in k");
  FP4GEMM_CHECK(args.k % Rules::kFp8K == 0, "k: is %lld, must be a multiple of %d with a in e4m3", ll(args.k),
                Rules::kFp8K);
  return check_flag("use_fast_accum", args.use_fast_accum);
}

/// Operands of an MX format multiply those of the same format, MXFP8 ones also a B in MXFP4, and nothing
/// else.
fp4gemm_status_t check_mx(GemmArgs const& args) {
  constexpr char kMxfp8[] = "FP4GEMM_FORMAT_MXFP8";
  constexpr char kMxfp4[] = "FP4GEMM_FORMAT_MXFP4";
  constexpr char kEither[] = "FP4GEMM_FORMAT_MXFP8 or FP4GEMM_FORMAT_MXFP4";
  fp4gemm_format_t const a = args.a.format;
  fp4gemm_format_t const b = args.b.format;
  FP4GEMM_CHECK(
      !quantizes_a(args), "quantize_a: is %d, must be FP4GEMM_QUANTIZE_A_NONE with an operand in %s",
      static_cast<int>(args.quantize_a), (is_mx(a) ? a : b) == FP4GEMM_FORMAT_MXFP8 ? kMxfp8 : kMxfp4);
  FP4GEMM_CHECK(!is_mx(a) || multiplies_mx(a, b), "b: format is %d, must be %s with a in %s",
                static_cast<int>(b), a == FP4GEMM_FORMAT_MXFP8 ? kEither : kMxfp4,
                a == FP4GEMM_FORMAT_MXFP8 ? kMxfp8 : kMxfp4);
  FP4GEMM_CHECK(multiplies_mx(a, b), "a: format is %d, must be %s with b in %s", static_cast<int>(a),
                b == FP4GEMM_FORMAT_MXFP8 ? kMxfp8 : kEither, b == FP4GEMM_FORMAT_MXFP8 ? kMxfp8 : kMxfp4);
  FP4GEMM_CHECK(args.use_fast_accum == 0, "use_fast_accum: is %d, must be 0 unless a is e4m3",
                args.use_fast_accum);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_formats(GemmArgs const& args) {
  fp4gemm_format_t const a = args.a.format;
  fp4gemm_format_t const b = args.b.format;
  if (is_mx(a) || is_mx(b)) {
    return check_mx(args);
  }
  FP4GEMM_TRY(check_format_of_a(args));
  FP4GEMM_CHECK(b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_FP16 || b == FP4GEMM_FORMAT_PREPACKED ||
                    b == FP4GEMM_FORMAT_PREPACKED_FP8,
                "b: format is %d, must be FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_FP16, "
                "FP4GEMM_FORMAT_PREPACKED or FP4GEMM_FORMAT_PREPACKED_FP8",
                static_cast<int>(b));
  FP4GEMM_TRY(check_fp8(args));
  FP4GEMM_CHECK(
      !is_ragged_k(args) || (a != FP4GEMM_FORMAT_BF16 && b != FP4GEMM_FORMAT_PREPACKED),
      "%s: format is %d, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_FP16 for groups that are ragged in k",
      a == FP4GEMM_FORMAT_BF16 ? "a" : "b", static_cast<int>(a == FP4GEMM_FORMAT_BF16 ? a : b));
  return FP4GEMM_SUCCESS;
}

/// Checks quantize_a and the fields that belong to it, except for pointers.
fp4gemm_status_t check_quantization(GemmArgs const& args) {
  FP4GEMM_CHECK(args.quantize_a >= FP4GEMM_QUANTIZE_A_NONE && args.quantize_a <= FP4GEMM_QUANTIZE_A_FP8,
                "quantize_a: is %d, must be a fp4gemm_quantize_a_t", static_cast<int>(args.quantize_a));
  FP4GEMM_CHECK(
      args.a_rows == nullptr || args.quantize_a == FP4GEMM_QUANTIZE_A_ROW || quantizes_a_to_fp8(args),
      "a_rows: is %p, must be null unless quantize_a is FP4GEMM_QUANTIZE_A_ROW or "
      "FP4GEMM_QUANTIZE_A_FP8",
      static_cast<void const*>(args.a_rows));
  if (args.a_rows == nullptr) {
    FP4GEMM_CHECK(args.a_num_rows == 0, "a_num_rows: is %lld, must be 0 without a_rows", ll(args.a_num_rows));
  } else {
    FP4GEMM_TRY(check_size("a_num_rows", args.a_num_rows, 0, 1));
    FP4GEMM_CHECK(product_is_at_most(Rules::kMaxElements, 1, args.a_num_rows, args.k),
                  "a_num_rows: is %lld rows of %lld elements, must have at most %lld elements in all",
                  ll(args.a_num_rows), ll(args.k), ll(Rules::kMaxElements));
  }
  if (!quantizes_a(args)) {
    FP4GEMM_CHECK(args.a_row_stride == 0, "a_row_stride: is %lld, must be 0 without quantize_a",
                  ll(args.a_row_stride));
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(!is_ragged_k(args),
                "quantize_a: is %d, must be FP4GEMM_QUANTIZE_A_NONE for groups that are ragged in k",
                static_cast<int>(args.quantize_a));
  return args.a_row_stride == 0 ? FP4GEMM_SUCCESS
                                : check_row_stride("a_row_stride", args.a_row_stride, columns_of_a(args),
                                                   dtype_bytes(a_dtype(args)));
}

/// Checks the fields that make a GEMM dense or grouped.
fp4gemm_status_t check_groups(GemmArgs const& args) {
  FP4GEMM_CHECK(args.num_groups >= 0, "num_groups: is %d, must be 0 (dense) or more", args.num_groups);
  FP4GEMM_CHECK(args.ragged == FP4GEMM_RAGGED_M || args.ragged == FP4GEMM_RAGGED_K,
                "ragged: is %d, must be FP4GEMM_RAGGED_M or FP4GEMM_RAGGED_K", static_cast<int>(args.ragged));
  if (is_grouped(args)) {
    FP4GEMM_TRY(check_buffer("offs", args.offs, args.num_groups, sizeof(int32_t)));
  } else {
    FP4GEMM_CHECK(args.ragged == FP4GEMM_RAGGED_M, "ragged: is %d, must be FP4GEMM_RAGGED_M without groups",
                  static_cast<int>(args.ragged));
    FP4GEMM_CHECK(args.offs == nullptr, "offs: is %p, must be null without groups",
                  static_cast<void const*>(args.offs));
    FP4GEMM_CHECK(args.alpha_groups == nullptr, "alpha_groups: is %p, must be null without groups",
                  static_cast<void const*>(args.alpha_groups));
  }
  return FP4GEMM_SUCCESS;
}

/// Checks the product of three sizes that are valid themselves; sums of bytes then fit in 64 bits.
fp4gemm_status_t check_elements(char const* name, int64_t matrices, int64_t rows, int64_t columns) {
  FP4GEMM_CHECK(product_is_at_most(Rules::kMaxElements, matrices, rows, columns),
                "%s: %lld matrices of (%lld, %lld) elements, must have at most %lld elements in all", name,
                ll(matrices), ll(rows), ll(columns), ll(Rules::kMaxElements));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_operand(char const* name, char const* scale_name, fp4gemm_operand_t const& operand,
                               int64_t elems) {
  FP4GEMM_TRY(check_buffer(name, operand.data, elems));
  if (operand.format == FP4GEMM_FORMAT_NVFP4 || is_mx(operand.format)) {
    return check_buffer(scale_name, operand.scales,
                        elems / (is_mx(operand.format) ? Rules::kMxK : Rules::kQuantizeK));
  }
  FP4GEMM_CHECK(operand.scales == nullptr,
                "%s: is %p, must be null for an operand that is not nvfp4, mxfp8 or mxfp4", scale_name,
                operand.scales);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_vector(char const* name, fp4gemm_vector_t const& vector, int64_t length,
                              bool may_be_number, bool may_differ) {
  if (vector.data == nullptr) {
    FP4GEMM_CHECK(vector.numel == 0 && vector.group_stride == 0,
                  "%s: data is null but numel is %lld and group_stride %lld, must be 0", name,
                  ll(vector.numel), ll(vector.group_stride));
    return FP4GEMM_SUCCESS;
  }
  if (may_be_number) {
    FP4GEMM_CHECK(vector.numel == 1 || vector.numel == length, "%s: numel is %lld, must be 1 or %lld", name,
                  ll(vector.numel), ll(length));
  } else {
    FP4GEMM_CHECK(vector.numel == length, "%s: numel is %lld, must be %lld", name, ll(vector.numel),
                  ll(length));
  }
  if (may_differ) {
    FP4GEMM_CHECK(vector.group_stride == 0 || vector.group_stride >= vector.numel,
                  "%s: group_stride is %lld, must be 0 or at least %lld", name, ll(vector.group_stride),
                  ll(vector.numel));
  } else {
    FP4GEMM_CHECK(vector.group_stride == 0, "%s: group_stride is %lld, must be 0", name,
                  ll(vector.group_stride));
  }
  return check_buffer(name, vector.data, vector.numel, sizeof(float));
}

/// A vector of one element is a number, which the epilogue broadcasts.
cutlass_evt::EpilogueVector vector_of(fp4gemm_vector_t const& v) {
  return {v.data, v.group_stride, v.numel != 1};
}

/// A matrix that a formula reads or writes: `columns` are its own.
fp4gemm_status_t check_generated_matrix(char const* name, fp4gemm_generated_matrix_t const& matrix,
                                        GemmArgs const& args, int64_t columns) {
  FP4GEMM_TRY(check_buffer(name, matrix.data, num_d(args) * args.m * columns));
  return check_row_stride(name, matrix.row_stride, columns, dtype_bytes(matrix.dtype));
}

/// Checks the pointers of a formula.
fp4gemm_status_t check_generated_pointers(GemmArgs const& args) {
  fp4gemm_generated_t const& generated = *args.generated;
  int64_t const columns = generated.takes_pairs != 0 ? args.n / 2 : args.n;  // of its inputs
  for (int i = 0; i < generated.num_rows; ++i) {
    FP4GEMM_CHECK(generated.rows[i].data != nullptr, "generated.rows: number %d is null", i);
    FP4GEMM_TRY(check_vector("generated.rows", generated.rows[i], args.m, true, is_ragged_k(args)));
  }
  for (int i = 0; i < generated.num_columns; ++i) {
    FP4GEMM_CHECK(generated.columns[i].data != nullptr, "generated.columns: number %d is null", i);
    FP4GEMM_TRY(check_vector("generated.columns", generated.columns[i], columns, true, is_grouped(args)));
  }
  for (int i = 0; i < generated.num_groups; ++i) {
    FP4GEMM_TRY(check_buffer("generated.groups", generated.groups[i], args.num_groups, sizeof(float)));
  }
  for (int i = 0; i < generated.num_matrices; ++i) {
    FP4GEMM_TRY(check_generated_matrix("generated.matrices", generated.matrices[i], args, columns));
  }
  for (int i = 0; i < generated.num_aux; ++i) {
    FP4GEMM_TRY(check_generated_matrix("generated.aux", generated.aux[i], args, columns_of_d(args)));
  }
  FP4GEMM_CHECK((args.bias.data != nullptr) == (generated.takes_bias != 0),
                "bias: data is %p, must %s with this formula", static_cast<void const*>(args.bias.data),
                generated.takes_bias != 0 ? "be given" : "be null");
  return FP4GEMM_SUCCESS;
}

int element_bits(fp4gemm_format_t format) {
  switch (format) {
    case FP4GEMM_FORMAT_NVFP4:
    case FP4GEMM_FORMAT_MXFP4: return 4;
    case FP4GEMM_FORMAT_E4M3:
    case FP4GEMM_FORMAT_MXFP8: return 8;
    case FP4GEMM_FORMAT_FP32: return 32;
    default: return 16;
  }
}

/// The values or codes of an operand of (rows, k) for each matrix. Only an A that is quantized has a stride.
Extent extent_of(fp4gemm_operand_t const& operand, int64_t matrices, int64_t rows, int64_t k,
                 int64_t row_stride = 0) {
  if (operand.format == FP4GEMM_FORMAT_PREPACKED) {
    return Extent::of_bytes(operand.data, matrices * fp4gemm_prepacked_bytes(rows, k));
  }
  if (operand.format == FP4GEMM_FORMAT_PREPACKED_FP8) {
    return Extent::of_bytes(operand.data, matrices * fp4gemm_prepacked_fp8_bytes(rows, k));
  }
  int const bits = element_bits(operand.format);
  return row_stride > k ? Extent::of_rows(operand.data, rows, k, row_stride, bits / 8)
                        : Extent::of_bytes(operand.data, matrices * rows * k * bits / 8);
}

/// The block scales of an operand, of scale_rows rows, padding included.
Extent extent_of_scales(fp4gemm_operand_t const& operand, int64_t scale_rows, int64_t k) {
  int64_t const blocks = k / (is_mx(operand.format) ? Rules::kMxK : kBlock);
  return Extent::of_bytes(operand.scales, scale_rows * num_words_of(blocks) * kScaleWord);
}

Extent extent_of(fp4gemm_vector_t const& vector, GemmArgs const& args) {
  int64_t const elems = (is_grouped(args) ? args.num_groups - 1 : 0) * vector.group_stride + vector.numel;
  return Extent::of_bytes(vector.data, elems * static_cast<int64_t>(sizeof(float)));
}

Extent extent_of(fp4gemm_generated_matrix_t const& matrix, GemmArgs const& args, int64_t columns) {
  return Extent::of_rows(matrix.data, num_d(args) * args.m, columns, matrix.row_stride,
                         dtype_bytes(matrix.dtype));
}

/// Refuses an output that overlaps what the call reads, or another output. A kernel writes parts of D while
/// it still reads what it needs for other parts.
class Apart {
 public:
  explicit Apart(GemmArgs const& args) : args_(args) {
    int64_t const bytes_of_offs = args.num_groups * static_cast<int64_t>(sizeof(float));
    int64_t const rows_of_a = args.a_rows == nullptr ? args.m : args.a_num_rows;
    int64_t const stride_of_a = quantizes_a(args) ? a_row_stride(args) : 0;
    add("a", extent_of(args.a, 1, rows_of_a, columns_of_a(args), stride_of_a));
    add("b", extent_of(args.b, num_b(args), args.n, args.k));
    bool const by_group = is_ragged_m(args);
    add("scale_a",
        extent_of_scales(args.a, scale_rows_of(args.m, by_group ? args.offs : nullptr, args.num_groups),
                         args.k));
    add("scale_b", extent_of_scales(args.b, num_b(args) * scale_rows_of(args.n), args.k));
    add("offs", Extent::of_bytes(args.offs, bytes_of_offs));
    add("a_rows", Extent::of_bytes(args.a_rows, args.m * static_cast<int64_t>(sizeof(int32_t))));
    add("alpha_groups", Extent::of_bytes(args.alpha_groups, bytes_of_offs));
    add("alpha_row", extent_of(args.alpha_row, args));
    add("alpha_col", extent_of(args.alpha_col, args));
    add("bias", extent_of(args.bias, args));
    if (args.generated != nullptr) {
      add_inputs(*args.generated);
    }
  }

  fp4gemm_status_t check() {
    int64_t const rows = num_d(args_) * args_.m;
    int64_t const columns = columns_of_d(args_);
    int const bytes = dtype_bytes(args_.out_dtype);
    Extent const c = Extent::of_rows(args_.c, rows, columns, args_.c_row_stride, bytes);
    Extent const d = Extent::of_rows(args_.d, rows, columns, args_.d_row_stride, bytes);
    int const num_aux = args_.generated == nullptr ? 0 : args_.generated->num_aux;
    FP4GEMM_TRY(check("d", d));
    FP4GEMM_CHECK(!overlap(c, d) || (num_aux == 0 && c.is_same(d)), "c: overlaps d, must be %sapart from it",
                  num_aux == 0 ? "d itself or " : "");
    add("c", c);
    add("d", d);
    for (int i = 0; i < num_aux; ++i) {
      Extent const aux = extent_of(args_.generated->aux[i], args_, columns);
      FP4GEMM_TRY(check("generated.aux", aux));
      add("generated.aux", aux);
    }
    return FP4GEMM_SUCCESS;
  }

 private:
  struct Named {
    char const* name;
    Extent extent;
  };
  static constexpr int kMost =
      12 + 3 * FP4GEMM_GENERATED_MOST_VECTORS + FP4GEMM_GENERATED_MOST_MATRICES + FP4GEMM_GENERATED_MOST_AUX;

  void add(char const* name, Extent const& extent) {
    if (!extent.is_empty()) {
      named_[num_++] = {name, extent};
    }
  }

  void add_inputs(fp4gemm_generated_t const& generated) {
    int64_t const columns = generated.takes_pairs != 0 ? args_.n / 2 : args_.n;
    for (int i = 0; i < generated.num_rows; ++i) {
      add("generated.rows", extent_of(generated.rows[i], args_));
    }
    for (int i = 0; i < generated.num_columns; ++i) {
      add("generated.columns", extent_of(generated.columns[i], args_));
    }
    for (int i = 0; i < generated.num_groups; ++i) {
      add("generated.groups",
          Extent::of_bytes(generated.groups[i], args_.num_groups * static_cast<int64_t>(sizeof(float))));
    }
    for (int i = 0; i < generated.num_matrices; ++i) {
      add("generated.matrices", extent_of(generated.matrices[i], args_, columns));
    }
  }

  fp4gemm_status_t check(char const* name, Extent const& written) const {
    for (int i = 0; i < num_; ++i) {
      FP4GEMM_CHECK(!overlap(named_[i].extent, written), "%s: overlaps %s, must be apart from it", name,
                    named_[i].name);
    }
    return FP4GEMM_SUCCESS;
  }

  GemmArgs const& args_;
  Named named_[kMost];
  int num_ = 0;
};

static_assert(FP4GEMM_GENERATED_MOST_VECTORS == cutlass_evt::kMostGeneratedVectors &&
                  FP4GEMM_GENERATED_MOST_MATRICES == cutlass_evt::kMostGeneratedMatrices &&
                  FP4GEMM_GENERATED_MOST_SCALARS == cutlass_evt::kMostGeneratedScalars &&
                  FP4GEMM_GENERATED_MOST_AUX == cutlass_evt::kMostGeneratedAux,
              "generated.h and cutlass_evt must have the same limits");
static_assert(static_cast<int>(cutlass_evt::OutputType::kBf16) == FP4GEMM_BF16 &&
                  static_cast<int>(cutlass_evt::OutputType::kFp16) == FP4GEMM_FP16 &&
                  static_cast<int>(cutlass_evt::OutputType::kFp32) == FP4GEMM_FP32,
              "fp4gemm.h and cutlass_evt must number the output types alike");

}  // namespace

fp4gemm_status_t check_activation(fp4gemm_activation_t activation) {
  if (activation_info(activation) != nullptr) {
    return FP4GEMM_SUCCESS;
  }
  // No std::string: it may throw, and no exception leaves the library.
  char names[400] = "";
  size_t length = 0;
  for (ActivationInfo const& row : kActivations) {
    int const written = std::snprintf(names + length, sizeof(names) - length, "%s%d (%s)",
                                      length == 0 ? "" : ", ", static_cast<int>(row.number), row.name);
    length = std::min(length + static_cast<size_t>(written), sizeof(names) - 1);
  }
  return fail(FP4GEMM_ERROR_INVALID_ARGUMENT, "activation: is %d, must be one of %s",
              static_cast<int>(activation), names);
}

cutlass_evt::EpilogueArguments epilogue_of(GemmArgs const& args) {
  cutlass_evt::EpilogueArguments epilogue;
  epilogue.alpha = args.alpha;
  epilogue.alpha_groups = args.alpha_groups;
  epilogue.per_row[cutlass_evt::kAlphaRow] = vector_of(args.alpha_row);
  epilogue.per_column[cutlass_evt::kAlphaCol] = vector_of(args.alpha_col);
  epilogue.per_column[cutlass_evt::kBias] = vector_of(args.bias);
  epilogue.activation = static_cast<cutlass_evt::Activation>(args.activation);
  epilogue.c = args.c;
  epilogue.c_row_stride = args.c_row_stride;
  epilogue.beta = args.beta;
  epilogue.d = args.d;
  epilogue.d_row_stride = args.d_row_stride;
  epilogue.output = static_cast<cutlass_evt::OutputType>(args.out_dtype);
  return epilogue;
}

fp4gemm_status_t check_generated(GemmArgs const& args) {
  fp4gemm_generated_t const& generated = *args.generated;
  FP4GEMM_CHECK(generated.struct_size == sizeof(generated),
                "generated: struct_size is %lld, must be %lld; initialize the struct with its _INIT macro",
                ll(static_cast<int64_t>(generated.struct_size)), ll(sizeof(generated)));
  FP4GEMM_TRY(check_flag("generated.takes_pairs", generated.takes_pairs));
  FP4GEMM_TRY(check_flag("generated.takes_bias", generated.takes_bias));
  FP4GEMM_TRY(check_flag("generated.takes_c", generated.takes_c));
  FP4GEMM_CHECK(generated.num_results == 1 || (generated.num_results == 2 && generated.takes_pairs != 0),
                "generated.num_results: is %d, must be 1, or with pairs 1 or 2", generated.num_results);
  struct {
    char const* name;
    int count, most;
  } const numbers[] = {
      {"num_rows", generated.num_rows, FP4GEMM_GENERATED_MOST_VECTORS},
      {"num_columns", generated.num_columns, FP4GEMM_GENERATED_MOST_VECTORS},
      {"num_groups", generated.num_groups, FP4GEMM_GENERATED_MOST_VECTORS},
      {"num_matrices", generated.num_matrices, FP4GEMM_GENERATED_MOST_MATRICES},
      {"num_scalars", generated.num_scalars, FP4GEMM_GENERATED_MOST_SCALARS},
      {"num_aux", generated.num_aux, FP4GEMM_GENERATED_MOST_AUX},
  };
  for (auto const& number : numbers) {
    FP4GEMM_CHECK(number.count >= 0 && number.count <= number.most,
                  "generated.%s: is %d, must be between 0 and %d", number.name, number.count, number.most);
  }
  for (int i = 0; i < generated.num_matrices; ++i) {
    FP4GEMM_TRY(check_dtype("generated.matrices: dtype", generated.matrices[i].dtype));
  }
  for (int i = 0; i < generated.num_aux; ++i) {
    FP4GEMM_TRY(check_dtype("generated.aux: dtype", generated.aux[i].dtype));
  }
  FP4GEMM_CHECK(args.activation == FP4GEMM_ACTIVATION_NONE,
                "activation: is %s, must be none with a formula of the caller's", activation_name(args));
  FP4GEMM_CHECK(generated.num_groups == 0 || is_grouped(args),
                "generated.num_groups: is %d, must be 0 without groups", generated.num_groups);
  FP4GEMM_CHECK((args.c != nullptr) == (generated.takes_c != 0), "c: is %p, must %s with this formula",
                args.c, generated.takes_c != 0 ? "be given" : "be null");
  return check_size("n", args.n, 0, generated.takes_pairs != 0 ? 16 : 8);
}

cutlass_evt::GeneratedInputs generated_inputs_of(GemmArgs const& args) {
  fp4gemm_generated_t const& generated = *args.generated;
  cutlass_evt::GeneratedInputs inputs;
  for (int i = 0; i < generated.num_rows; ++i) {
    inputs.rows[i] = vector_of(generated.rows[i]);
  }
  for (int i = 0; i < generated.num_columns; ++i) {
    inputs.columns[i] = vector_of(generated.columns[i]);
  }
  std::copy_n(generated.groups, generated.num_groups, inputs.groups);
  for (int i = 0; i < generated.num_matrices; ++i) {
    inputs.matrices[i] = {generated.matrices[i].data, generated.matrices[i].row_stride};
  }
  for (int i = 0; i < generated.num_aux; ++i) {
    inputs.aux[i] = {generated.aux[i].data, generated.aux[i].row_stride};
  }
  std::copy_n(generated.scalars, generated.num_scalars, inputs.scalars);
  return inputs;
}

cutlass_evt::GeneratedTypes generated_types_of(GemmArgs const& args) {
  fp4gemm_generated_t const& generated = *args.generated;
  cutlass_evt::GeneratedTypes types;
  types.output = static_cast<cutlass_evt::OutputType>(args.out_dtype);
  for (int i = 0; i < generated.num_matrices; ++i) {
    types.matrices[i] = static_cast<cutlass_evt::OutputType>(generated.matrices[i].dtype);
  }
  for (int i = 0; i < generated.num_aux; ++i) {
    types.aux[i] = static_cast<cutlass_evt::OutputType>(generated.aux[i].dtype);
  }
  return types;
}

fp4gemm_status_t check_gemm_problem(GemmArgs const& args) {
  FP4GEMM_TRY(check_groups(args));
  FP4GEMM_TRY(check_dtype("out_dtype", args.out_dtype));
  FP4GEMM_TRY(check_size("m", args.m, 0, 1));
  FP4GEMM_TRY(check_activation(args.activation));
  FP4GEMM_TRY(
      check_size("n", args.n, 0, Rules::kRowBytes / dtype_bytes(args.out_dtype) * (is_gated(args) ? 2 : 1)));
  if (is_ragged_k(args)) {
    FP4GEMM_TRY(check_size("k", args.k, 0, Rules::group_columns(args.a.format), Rules::kMaxK));
  } else {
    FP4GEMM_TRY(check_size("k", args.k, Rules::kGemmK, Rules::kGemmK, Rules::kMaxK));
  }
  FP4GEMM_CHECK(!is_gated(args) || args.c == nullptr, "c: is %p, must be null with the gated activation %s",
                args.c, activation_name(args));
  FP4GEMM_CHECK(!is_gated(args) || !is_ragged_k(args),
                "activation: is %s, must not be gated for groups that are ragged in k",
                activation_name(args));
  FP4GEMM_TRY(check_elements("a", 1, args.m, args.k));
  FP4GEMM_TRY(check_elements("b", num_b(args), args.n, args.k));
  FP4GEMM_TRY(check_elements("d", num_d(args), args.m, args.n));
  FP4GEMM_TRY(check_flag("b_is_constant", args.b_is_constant));
  FP4GEMM_TRY(check_flag("batch_invariant", args.batch_invariant));
  FP4GEMM_TRY(check_formats(args));
  if (args.generated != nullptr) {
    FP4GEMM_TRY(check_generated(args));
  }
  return check_quantization(args);
}

fp4gemm_status_t check_gemm_pointers(GemmArgs const& args) {
  int const bytes = dtype_bytes(args.out_dtype);
  int64_t const out_elems = num_d(args) * args.m * columns_of_d(args);
  int64_t const rows_of_a = args.a_rows == nullptr ? args.m : args.a_num_rows;
  FP4GEMM_TRY(check_operand("a", "scale_a", args.a, rows_of_a * columns_of_a(args)));
  FP4GEMM_TRY(check_operand("b", "scale_b", args.b, num_b(args) * args.n * args.k));
  FP4GEMM_TRY(check_buffer("a_rows", args.a_rows, 0, sizeof(int32_t)));
  FP4GEMM_CHECK(!quantizes_a(args) || args.alpha_row.data == nullptr,
                "alpha_row: data is %p, must be null with quantize_a, which measures the amax of A",
                static_cast<void const*>(args.alpha_row.data));
  FP4GEMM_TRY(check_vector("alpha_row", args.alpha_row, args.m, true, is_ragged_k(args)));
  FP4GEMM_TRY(check_vector("alpha_col", args.alpha_col, args.n, true, is_grouped(args)));
  FP4GEMM_TRY(check_vector("bias", args.bias, args.n, false, is_grouped(args)));
  if (args.alpha_groups != nullptr) {
    FP4GEMM_TRY(check_buffer("alpha_groups", args.alpha_groups, args.num_groups, sizeof(float)));
  }
  if (args.c != nullptr) {
    FP4GEMM_TRY(check_buffer("c", args.c, out_elems));
    FP4GEMM_TRY(check_row_stride("c_row_stride", args.c_row_stride, columns_of_d(args), bytes));
  } else {
    FP4GEMM_CHECK(args.c_row_stride == 0, "c_row_stride: is %lld, must be 0 without c",
                  ll(args.c_row_stride));
  }
  FP4GEMM_TRY(check_buffer("d", args.d, out_elems));
  if (args.generated != nullptr) {
    FP4GEMM_TRY(check_generated_pointers(args));
  }
  FP4GEMM_TRY(check_row_stride("d_row_stride", args.d_row_stride, columns_of_d(args), bytes));
  return Apart(args).check();
}

}  // namespace fp4gemm
