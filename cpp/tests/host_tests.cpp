// Host tests of the GEMM's C interface: the messages for wrong arguments, which need no memory, whether B may
// be fresh, the sizes of prepacked weights, and the texts of statuses. No GPU is used.
#include <cstdlib>
#include <new>

#include "checks.hpp"
#include "extent.hpp"
#include "fp4gemm/generated.h"
#include "kernel.hpp"

namespace {

bool has_memory = true;  // false: operator new throws

}  // namespace

// These replace the operators of the library, too.
void* operator new(size_t bytes) {
  void* const memory = has_memory ? std::malloc(bytes) : nullptr;
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

fp4gemm_gemm_args_t good_gemm() {
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.m = 4;
  args.n = 8;
  args.k = 32;
  args.a = {address(), address(), FP4GEMM_FORMAT_NVFP4};
  args.b = args.a;
  args.d = address(65536);
  args.d_row_stride = 8;
  return args;
}

template <class Change>
void bad_gemm(char const* what, Change change, char const* text) {
  fp4gemm_gemm_args_t args = good_gemm();
  change(args);
  size_t bytes = 0;
  expect_error(what, fp4gemm_gemm_workspace_bytes(&args, 0, &bytes), FP4GEMM_ERROR_INVALID_ARGUMENT, text);
  expect_error(what, fp4gemm_gemm(&args, nullptr, 0, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT, text);
}

void test_gemm_errors() {
  using Args = fp4gemm_gemm_args_t;
  bad_gemm("m", [](Args& a) { a.m = -1; }, "m: is -1");
  bad_gemm("n", [](Args& a) { a.n = 12; }, "n: is 12, must be a multiple of 8");
  bad_gemm(
      "n fp32",
      [](Args& a) {
        a.n = 6;
        a.out_dtype = FP4GEMM_FP32;
      },
      "n: is 6, must be a multiple of 4");
  bad_gemm("k", [](Args& a) { a.k = 48; }, "k: is 48, must be a multiple of 32");
  bad_gemm("k zero", [](Args& a) { a.k = 0; }, "k: is 0");
  bad_gemm("huge m", [](Args& a) { a.m = int64_t{1} << 40; }, "m: is 1099511627776");
  bad_gemm("out_dtype", [](Args& a) { a.out_dtype = static_cast<fp4gemm_dtype_t>(9); }, "out_dtype: is 9");
  bad_gemm("a", [](Args& a) { a.a.format = static_cast<fp4gemm_format_t>(9); }, "a: format is 9");
  bad_gemm(
      "mxfp8 a", [](Args& a) { a.a.format = FP4GEMM_FORMAT_MXFP8; },
      "b: format is 0, must be FP4GEMM_FORMAT_MXFP8 or FP4GEMM_FORMAT_MXFP4 with a in FP4GEMM_FORMAT_MXFP8");
  bad_gemm(
      "mxfp8 b", [](Args& a) { a.b.format = FP4GEMM_FORMAT_MXFP8; },
      "a: format is 0, must be FP4GEMM_FORMAT_MXFP8 with b in FP4GEMM_FORMAT_MXFP8");
  bad_gemm(
      "mxfp4 b", [](Args& a) { a.b.format = FP4GEMM_FORMAT_MXFP4; },
      "a: format is 0, must be FP4GEMM_FORMAT_MXFP8 or FP4GEMM_FORMAT_MXFP4 with b in FP4GEMM_FORMAT_MXFP4");
  bad_gemm(
      "mxfp4 a", [](Args& a) { a.a.format = FP4GEMM_FORMAT_MXFP4; },
      "b: format is 0, must be FP4GEMM_FORMAT_MXFP4 with a in FP4GEMM_FORMAT_MXFP4");
  bad_gemm(
      "mxfp4 a, mxfp8 b",
      [](Args& a) {
        a.a.format = FP4GEMM_FORMAT_MXFP4;
        a.b.format = FP4GEMM_FORMAT_MXFP8;
      },
      "b: format is 7, must be FP4GEMM_FORMAT_MXFP4 with a in FP4GEMM_FORMAT_MXFP4");
  bad_gemm(
      "mxfp8 with quantize_a",
      [](Args& a) {
        a.a.format = FP4GEMM_FORMAT_BF16;
        a.b.format = FP4GEMM_FORMAT_MXFP8;
        a.quantize_a = FP4GEMM_QUANTIZE_A_ROW;
      },
      "quantize_a: is 1, must be FP4GEMM_QUANTIZE_A_NONE with an operand in FP4GEMM_FORMAT_MXFP8");
  bad_gemm(
      "mxfp8 with fast sums",
      [](Args& a) {
        a.a.format = a.b.format = FP4GEMM_FORMAT_MXFP8;
        a.use_fast_accum = 1;
      },
      "use_fast_accum: is 1, must be 0 unless a is e4m3");
  bad_gemm(
      "mxfp8 along k",
      [](Args& a) {
        a.a.format = a.b.format = FP4GEMM_FORMAT_MXFP8;
        a.ragged = FP4GEMM_RAGGED_K;
        a.num_groups = 1;
        a.offs = static_cast<int32_t const*>(address());
        a.k = 192;
      },
      "k: is 192, must be a multiple of 128");
  bad_gemm("b", [](Args& a) { a.b.format = static_cast<fp4gemm_format_t>(5); }, "b: format is 5");
  bad_gemm("b_is_constant", [](Args& a) { a.b_is_constant = 2; }, "b_is_constant: is 2, must be 0 or 1");
  bad_gemm(
      "batch_invariant", [](Args& a) { a.batch_invariant = -1; }, "batch_invariant: is -1, must be 0 or 1");
  bad_gemm("struct_size", [](Args& a) { a.struct_size = 3; }, "args: struct_size is 3");
  expect_error("null args", fp4gemm_gemm(nullptr, nullptr, 0, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "args: is null");
  fp4gemm_gemm_args_t const args = good_gemm();
  expect_error("null bytes", fp4gemm_gemm_workspace_bytes(&args, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT,
               "bytes: is null");
}

/// Pointers and strides, which only the call itself has.
template <class Change>
void bad_call(char const* what, Change change, char const* text) {
  fp4gemm_gemm_args_t args = good_gemm();
  change(args);
  expect_error(what, fp4gemm_gemm(&args, nullptr, 0, 0, nullptr), FP4GEMM_ERROR_INVALID_ARGUMENT, text);
}

void test_gemm_pointer_errors() {
  using Args = fp4gemm_gemm_args_t;
  bad_call("a", [](Args& a) { a.a.data = nullptr; }, "a: is null");
  bad_call("scale_b", [](Args& a) { a.b.scales = address(8); }, "scale_b: is 0x1008");
  bad_call("d", [](Args& a) { a.d = nullptr; }, "d: is null");
  bad_call("d_row_stride", [](Args& a) { a.d_row_stride = 7; }, "d_row_stride: is 7, must be at least the 8");
  bad_call(
      "odd d_row_stride", [](Args& a) { a.d_row_stride = 12; }, "d_row_stride: is 12 elements of 2 bytes");
  bad_call(
      "d_row_stride whose bytes overflow",
      [](Args& a) {
        a.out_dtype = FP4GEMM_FP32;
        a.d_row_stride = int64_t{1} << 62;
      },
      "d_row_stride: is 4611686018427387904, must be at most");
  bad_call("c_row_stride", [](Args& a) { a.c_row_stride = 8; }, "c_row_stride: is 8, must be 0 without c");
}

/// D, and what a formula writes, are apart from all that is read; c may be D itself.
void test_outputs_are_apart() {
  using Args = fp4gemm_gemm_args_t;
  // 4 rows of codes (64 bytes), scales (512), D (4 rows of 16 bytes that are 32 apart), and numbers.
  auto const at = [](int offset) { return static_cast<float*>(address(offset)); };
  auto const call = [&](auto change, char const* text) {
    bad_call(
        text,
        [&](Args& a) {
          a.a = {at(0), at(1024), FP4GEMM_FORMAT_NVFP4};
          a.b = {at(2048), at(4096), FP4GEMM_FORMAT_NVFP4};
          a.alpha_row = {at(5120), 4, 0};
          a.alpha_col = {at(6144), 8, 0};
          a.bias = {at(7168), 8, 0};
          a.d = at(8192);
          a.d_row_stride = 16;
          change(a);
        },
        text);
  };
  call([&](Args& a) { a.d = at(48); }, "d: overlaps a, must be apart from it");
  call([&](Args& a) { a.d = at(2048 - 96); }, "d: overlaps b,");
  call([&](Args& a) { a.d = at(1024 + 496); }, "d: overlaps scale_a,");
  call([&](Args& a) { a.d = at(4096 + 496); }, "d: overlaps scale_b,");
  call([&](Args& a) { a.d = at(5120); }, "d: overlaps alpha_row,");
  call([&](Args& a) { a.d = at(6144 + 16); }, "d: overlaps alpha_col,");
  call([&](Args& a) { a.bias.data = at(8192 + 96); }, "d: overlaps bias,");
  call(
      [&](Args& a) {
        a.c = at(8192 + 32);
        a.c_row_stride = 16;
      },
      "c: overlaps d, must be d itself or apart from it");
  call(
      [&](Args& a) {
        a.c = at(8192);
        a.c_row_stride = 24;
      },
      "c: overlaps d,");
  // A prepacked weight, and tokens with a stride that the call quantizes.
  call(
      [&](Args& a) {
        a.b = {at(16384), nullptr, FP4GEMM_FORMAT_PREPACKED};
        a.d = at(16384 + 2304 - 16);
      },
      "d: overlaps b,");
  call(
      [&](Args& a) {
        a.a = {at(8192 + 96 + 15 * 16 - 4096), nullptr, FP4GEMM_FORMAT_BF16};
        a.alpha_row = {};
        a.quantize_a = FP4GEMM_QUANTIZE_A_ROW;
        a.a_row_stride = 1024;
      },
      "d: overlaps a,");
  auto const grouped = [&](Args& a) {
    a.k = 64;
    a.num_groups = 2;
    a.offs = reinterpret_cast<int32_t*>(at(12288));
    a.b.data = at(16384);
    a.b.scales = at(20480);
    a.a.scales = at(24576);
  };
  call(
      [&](Args& a) {
        grouped(a);
        a.d = at(12288);
      },
      "d: overlaps offs,");
  call(
      [&](Args& a) {
        grouped(a);
        a.alpha_groups = at(8192);
      },
      "d: overlaps alpha_groups,");
  call(
      [&](Args& a) {  // each group has a matrix of 8 rows of 32 bytes, and scales of 128 rows
        grouped(a);
        a.d = at(16384 + 2 * 8 * 32 - 16);
      },
      "d: overlaps b,");
  call(
      [&](Args& a) {
        grouped(a);
        a.d = at(20480 + 2 * 512 - 16);
      },
      "d: overlaps scale_b,");
  call(
      [&](Args& a) {  // the scales of each group begin at a multiple of 128 rows
        grouped(a);
        a.d = at(24576 + 2 * 512 - 16);
      },
      "d: overlaps scale_a,");

  // A has as many columns as k without the residual channels, and D follows it.
  auto const with_residuals = [&](int d) {
    Args a = good_gemm();
    a.k = 64;
    a.a = {at(0), nullptr, FP4GEMM_FORMAT_BF16};
    a.quantize_a = FP4GEMM_QUANTIZE_A_ROW;
    a.b = {at(16384), at(20480), FP4GEMM_FORMAT_NVFP4};
    a.d = at(d);
    fp4gemm_cast_t cast = FP4GEMM_CAST_INIT;
    cast.residual_channels = reinterpret_cast<int32_t*>(at(24576));
    cast.num_residual_channels = 32;
    (void)fp4gemm_gemm_with_cast(&a, &cast, nullptr, 0, 0, nullptr);
    return std::string(fp4gemm_last_error());
  };
  CHECK(with_residuals(4 * 64 - 16) == "d: overlaps a, must be apart from it", "%s",
        with_residuals(4 * 64 - 16).c_str());
  CHECK(with_residuals(4 * 64).find("overlaps") == std::string::npos, "%s", with_residuals(4 * 64).c_str());

  fp4gemm_generated_t generated = FP4GEMM_GENERATED_INIT;
  generated.num_matrices = generated.num_aux = generated.takes_c = 1;
  auto const formula = [&](int matrix, int aux, int c, char const* text) {
    Args a = good_gemm();
    a.c = at(c);
    a.c_row_stride = 8;
    generated.matrices[0] = {at(matrix), 8, FP4GEMM_FP32};
    generated.aux[0] = {at(aux), 16, FP4GEMM_BF16};
    fp4gemm_cast_t const cast = FP4GEMM_CAST_INIT;
    expect_error(text, fp4gemm_gemm_generated(&a, &cast, &generated, nullptr, 0, 0, nullptr),
                 FP4GEMM_ERROR_INVALID_ARGUMENT, text);
  };
  formula(65536 + 48, 16384, 8192, "d: overlaps generated.matrices,");
  formula(32768, 65536 + 48, 8192, "generated.aux: overlaps d,");
  formula(32768, 32768 + 112, 8192, "generated.aux: overlaps generated.matrices,");
  formula(32768, 8192 + 48, 8192, "generated.aux: overlaps c,");
  formula(32768, 16384, 65536, "c: overlaps d, must be apart from it");
}

void test_extents() {
  using fp4gemm::Extent;
  using fp4gemm::overlap;
  auto const rows = [](int offset, int64_t count, int64_t width, int64_t stride) {
    return Extent::of_rows(address(offset), count, width, stride, 1);
  };
  struct Case {
    Extent x, y;
    bool wanted;
    char const* what;
  };
  Case const cases[] = {
      {rows(0, 4, 16, 16), rows(64, 4, 16, 16), false, "adjacent"},
      {rows(0, 4, 16, 16), rows(48, 4, 16, 16), true, "a row in common"},
      {rows(0, 4, 16, 64), rows(16, 4, 48, 64), false, "columns of one buffer"},
      {rows(16, 4, 48, 64), rows(0, 4, 16, 64), false, "columns of one buffer, in the other order"},
      {rows(0, 4, 32, 64), rows(16, 4, 48, 64), true, "columns in common"},
      {rows(0, 4, 16, 64), rows(48, 4, 32, 64), true, "columns that go on in the next row"},
      {rows(0, 4, 16, 64), rows(144, 1, 48, 48), false, "a row in the columns that are left"},
      {rows(144, 1, 49, 49), rows(0, 4, 16, 64), true, "a row that is too long for them"},
      {rows(0, 4, 16, 64), rows(16, 4, 16, 48), true, "other strides"},
      {rows(0, 0, 16, 16), rows(0, 4, 16, 16), false, "no rows"},
      {rows(0, 4, 0, 16), rows(0, 4, 16, 16), false, "no columns"},
      {rows(64, 2, 16, INT64_MAX / 2), rows(0, 1, 16, 16), false, "before a stride that is too large"},
      {rows(0, 9, 16, INT64_MAX / 2), rows(64, 1, 16, 16), false, "in a stride that is too large"},
  };
  for (Case const& c : cases) {
    CHECK(overlap(c.x, c.y) == c.wanted, "%s", c.what);
    CHECK(overlap(c.y, c.x) == c.wanted, "%s, exchanged", c.what);
  }
}

/// No exception leaves the library, not even where a message is made without memory.
void test_errors_without_memory() {
  fp4gemm_gemm_args_t args = good_gemm();
  args.activation = static_cast<fp4gemm_activation_t>(9);
  bool threw = false;
  fp4gemm_status_t status = FP4GEMM_SUCCESS;
  has_memory = false;
  try {
    status = fp4gemm_gemm(&args, nullptr, 0, 0, nullptr);
  } catch (std::bad_alloc const&) {
    threw = true;
  }
  has_memory = true;
  CHECK(!threw, "fp4gemm_gemm threw");
  expect_error("activation", status, FP4GEMM_ERROR_INVALID_ARGUMENT,
               "activation: is 9, must be one of 0 (none), 1 (silu), ");
}

void test_b_is_fresh() {
  using fp4gemm::b_is_fresh;
  CHECK(b_is_fresh(false, false), "no promise");
  CHECK(!b_is_fresh(true, false), "a promise about the bytes that the kernel reads");
  CHECK(b_is_fresh(true, true), "a promise about bytes that the call converts first");
  CHECK(b_is_fresh(false, true), "no promise, and a conversion");
}

void test_grouped_errors() {
  using Args = fp4gemm_gemm_args_t;
  auto const bad_grouped = [](char const* what, auto change, char const* text) {
    bad_gemm(
        what,
        [&](Args& a) {
          a.k = 64;
          a.num_groups = 2;
          a.offs = static_cast<int32_t const*>(address());
          change(a);
        },
        text);
  };
  bad_grouped(
      "num_groups", [](Args& a) { a.num_groups = -1; }, "num_groups: is -1, must be 0 (dense) or more");
  bad_grouped("ragged", [](Args& a) { a.ragged = static_cast<fp4gemm_ragged_t>(5); }, "ragged: is 5");
  bad_grouped("n", [](Args& a) { a.n = 12; }, "n: is 12, must be a multiple of 8");
  bad_grouped("k, ragged m", [](Args& a) { a.k = 48; }, "k: is 48, must be a multiple of 32");
  bad_grouped("offs", [](Args& a) { a.offs = nullptr; }, "offs: is null, must point at 2 elements");
  auto const ragged_k = [](Args& a) { a.ragged = FP4GEMM_RAGGED_K; };
  bad_grouped(
      "k, ragged k",
      [&](Args& a) {
        ragged_k(a);
        a.k = 96;
      },
      "k: is 96, must be a multiple of 64");
  bad_grouped(
      "gated, ragged k",
      [&](Args& a) {
        ragged_k(a);
        a.n = 16;
        a.activation = FP4GEMM_ACTIVATION_SWIGLU;
      },
      "activation: is swiglu");
  bad_grouped(
      "activation", [](Args& a) { a.activation = static_cast<fp4gemm_activation_t>(9); }, "activation: is 9");
  // What only a grouped GEMM has.
  bad_gemm("dense, ragged k", ragged_k, "ragged: is 1, must be FP4GEMM_RAGGED_M without groups");
  bad_gemm(
      "dense with offs", [](Args& a) { a.offs = static_cast<int32_t const*>(address()); },
      "offs: is 0x1000, must be null without groups");
  bad_gemm(
      "dense with alpha_groups", [](Args& a) { a.alpha_groups = static_cast<float const*>(address()); },
      "alpha_groups: is 0x1000, must be null without groups");
  // Sizes that are valid one by one, but not their products.
  bad_grouped(
      "huge b",
      [](Args& a) {
        a.num_groups = INT32_MAX;
        a.n = int64_t{1} << 30;
        a.k = int64_t{1} << 30;
      },
      "b: 2147483647 matrices of (1073741824, 1073741824) elements, must have at most");
  bad_grouped(
      "huge d",
      [&](Args& a) {
        ragged_k(a);
        a.num_groups = INT32_MAX;
        a.m = a.n = int64_t{1} << 30;
      },
      "d: 2147483647 matrices of (1073741824, 1073741824) elements, must have at most");
  bad_gemm(
      "huge a", [](Args& a) { a.m = a.k = int64_t{1} << 30; },
      "a: 1 matrices of (1073741824, 1073741824) elements, must have at most");
  CHECK(fp4gemm_grouped_columns(0, 3) == 0, "columns of no rows");
  CHECK(fp4gemm_grouped_columns(1, 3) == 64, "columns of one row");
  CHECK(fp4gemm_grouped_columns(100, 3) == 256, "columns of 100 rows in 3 groups");
}

void test_prepack() {
  struct Case {
    int64_t n, k, bytes;
  };
  Case const cases[] = {{0, 64, 0}, {1, 16, 2304}, {64, 64, 2304}, {65, 80, 4 * 2304}, {4096, 4096, 9437184}};
  for (Case const& c : cases) {
    int64_t const bytes = fp4gemm_prepacked_bytes(c.n, c.k);
    CHECK(bytes == c.bytes, "(%lld, %lld) got %lld", static_cast<long long>(c.n), static_cast<long long>(c.k),
          static_cast<long long>(bytes));
  }
  struct Bad {
    int num_matrices;
    int64_t n, k;
    void* codes;
    void* scales;
    void* packed;
    char const* text;
  };
  void* const good = address();
  Bad const bad[] = {
      {0, 64, 64, good, good, good, "num_matrices: is 0"},
      {1, -1, 64, good, good, good, "n: is -1"},
      {1, 64, 40, good, good, good, "k: is 40, must be a multiple of 16"},
      {1, 64, 0, good, good, good, "k: is 0"},
      {1 << 20, 1 << 12, 64, good, good, good, "num_matrices: 1048576 of 4096 rows, must be at most"},
      {1, 64, 64, nullptr, good, good, "codes: is null, must point at 2048"},
      {1, 64, 64, good, nullptr, good, "scales: is null"},
      {1, 64, 64, good, good, nullptr, "packed: is null, must point at 2304"},
      {1, 64, 64, address(8), good, good, "codes: is 0x1008, must be 16-byte aligned"},
      {1, 64, 64, good, address(4), good, "scales: is 0x1004, must be 16-byte aligned"},
      {1, 64, 64, good, good, address(8), "packed: is 0x1008, must be 16-byte aligned"},
  };
  for (Bad const& b : bad) {
    auto* const codes = static_cast<uint8_t*>(b.codes);
    auto* const scales = static_cast<uint8_t*>(b.scales);
    expect_error(b.text, fp4gemm_prepack(b.num_matrices, b.n, b.k, codes, scales, b.packed, 0, nullptr),
                 FP4GEMM_ERROR_INVALID_ARGUMENT, b.text);
    expect_error(b.text, fp4gemm_unprepack(b.num_matrices, b.n, b.k, b.packed, codes, scales, 0, nullptr),
                 FP4GEMM_ERROR_INVALID_ARGUMENT, b.text);
  }
}

void test_scale_shape_and_texts() {
  struct Case {
    int64_t rows, k, scale_rows, scale_cols;
  };
  Case const cases[] = {
      {0, 16, 0, 4}, {1, 16, 128, 4}, {128, 64, 128, 4}, {129, 80, 256, 8}, {8192, 8192, 8192, 512}};
  for (Case const& c : cases) {
    int64_t rows = -1;
    int64_t cols = -1;
    fp4gemm_padded_scale_shape(c.rows, c.k, &rows, &cols);
    CHECK(rows == c.scale_rows && cols == c.scale_cols, "(%lld, %lld) got (%lld, %lld)",
          static_cast<long long>(c.rows), static_cast<long long>(c.k), static_cast<long long>(rows),
          static_cast<long long>(cols));
  }
  CHECK(fp4gemm_version() == FP4GEMM_VERSION, "library is %d, header %d", fp4gemm_version(), FP4GEMM_VERSION);
  for (int status = 0; status <= 4; ++status) {
    char const* const text = fp4gemm_status_string(static_cast<fp4gemm_status_t>(status));
    CHECK(std::strlen(text) > 0 && std::strcmp(text, "unknown status") != 0, "status %d has no text", status);
  }
  CHECK(std::strcmp(fp4gemm_status_string(static_cast<fp4gemm_status_t>(99)), "unknown status") == 0,
        "status 99 has a text");
}

}  // namespace

int main() {
  test_gemm_errors();
  test_gemm_pointer_errors();
  test_outputs_are_apart();
  test_extents();
  test_errors_without_memory();
  test_b_is_fresh();
  test_grouped_errors();
  test_prepack();
  test_scale_shape_and_texts();
  return report();
}
