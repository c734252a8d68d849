// The calls of gpu.c and experts.c from C++17: a product that quantizes its tokens, products in groups with
// weights whose scales are in the plain order of a checkpoint, and a block of experts with a plain
// activation. Compares with the host.
#include "gpu.h"

#include <fp4gemm/experts.h>
#include <fp4gemm/scales.h>

#include <vector>

namespace {

/// A matrix of exact values, on the host.
struct Matrix {
  int rows, columns;
  std::vector<uint16_t> values;

  Matrix(int seed, int rows, int columns) : rows(rows), columns(columns) {
    for (int i = 0; i < rows * columns; ++i) {
      values.push_back(to_bf16(exact_value(seed, i / columns, i % columns)));
    }
  }

  double at(int row, int column) const { return of_bf16(values[row * columns + column]); }
  void* on_device() const { return gpu_put(values.data(), values.size() * sizeof(values[0])); }
};

/// The codes, scales and amaxes of a matrix that fp4gemm_quantize wrote.
fp4gemm_quantized_t quantize(Matrix const& matrix) {
  int64_t scale_rows = 0, scale_columns = 0;
  fp4gemm_padded_scale_shape(matrix.rows, matrix.columns, &scale_rows, &scale_columns);
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  args.m = matrix.rows;
  args.k = matrix.columns;
  args.x = matrix.on_device();
  args.x_row_stride = matrix.columns;
  args.row.codes = static_cast<uint8_t*>(gpu_empty(matrix.values.size() / 2));
  args.row.scales = static_cast<uint8_t*>(gpu_empty(scale_rows * scale_columns));
  args.row.amax = static_cast<float*>(gpu_empty(sizeof(float) * matrix.rows));
  gpu_expect(fp4gemm_quantize(&args, 0, nullptr));
  return args.row;
}

/// The results that the host wants, and the sums of the magnitudes of their terms.
struct Want {
  std::vector<double> value, scale;
  explicit Want(int size) : value(size), scale(size) {}

  void add(int element, double term) {
    value[element] += term;
    scale[element] += std::fabs(term);
  }
  int wrong(char const* what, void const* device) const {
    std::vector<uint16_t> got(value.size());
    gpu_get(got.data(), device, got.size() * sizeof(got[0]));
    return count_wrong(what, got.data(), value.data(), scale.data(), static_cast<int>(got.size()));
  }
};

/// D = x W^T, where the call quantizes x.
int product(Matrix const& x, Matrix const& w) {
  fp4gemm_quantized_t const b = quantize(w);
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.m = x.rows;
  args.n = w.rows;
  args.k = x.columns;
  args.a = {x.on_device(), nullptr, FP4GEMM_FORMAT_BF16};
  args.quantize_a = FP4GEMM_QUANTIZE_A_ROW;
  args.b = {b.codes, b.scales, FP4GEMM_FORMAT_NVFP4};
  args.alpha_col = {b.amax, w.rows, 0};
  args.alpha = 1.0f / (36 * 448 * 448);
  args.d = gpu_empty(sizeof(uint16_t) * x.rows * w.rows);
  args.d_row_stride = w.rows;
  size_t bytes = 0;
  gpu_expect(fp4gemm_gemm_workspace_bytes(&args, 0, &bytes));
  gpu_expect(fp4gemm_gemm(&args, gpu_empty(bytes), bytes, 0, nullptr));
  Want want(x.rows * w.rows);
  for (int i = 0; i < x.rows; ++i) {
    for (int j = 0; j < w.rows; ++j) {
      for (int l = 0; l < x.columns; ++l) {
        want.add(i * w.rows + j, x.at(i, l) * w.at(j, l));
      }
    }
  }
  return want.wrong("product", args.d);
}

/// Scales of a checkpoint: those of `matrices` weights with `rows` rows each, in plain order.
std::vector<uint8_t> plain_scales(uint8_t const* swizzled, int matrices, int rows, int columns) {
  int const tile_rows = (rows + 127) / 128, tile_columns = (columns + 3) / 4;
  std::vector<uint8_t> tiles(static_cast<size_t>(matrices) * tile_rows * tile_columns * 512), plain;
  gpu_get(tiles.data(), swizzled, tiles.size());
  for (int i = 0; i < matrices * rows * columns; ++i) {
    int const c = i % columns, r = i / columns % rows, matrix = i / columns / rows;
    int const tile = (matrix * tile_rows + r / 128) * tile_columns + c / 4;
    plain.push_back(tiles[tile * 512 + r % 32 * 16 + r % 128 / 32 * 4 + c % 4]);
  }
  return plain;
}

/// D[e] = x[e] W[e]^T of three groups of rows, the second of which is empty.
int groups(Matrix const& x, Matrix const& w) {
  constexpr int kGroups = 3;
  int const n = w.rows / kGroups, k = x.columns, columns = k / 16;
  std::vector<int32_t> const ends = {x.rows / 2, x.rows / 2, x.rows};
  auto const* const offs = static_cast<int32_t const*>(gpu_put(ends.data(), sizeof(int32_t) * kGroups));
  // The tokens of each group have scales of their own.
  fp4gemm_quantize_args_t tokens = FP4GEMM_QUANTIZE_ARGS_INIT;
  tokens.m = x.rows;
  tokens.k = k;
  tokens.x = x.on_device();
  tokens.x_row_stride = k;
  tokens.offs = offs;
  tokens.num_groups = kGroups;
  tokens.row.codes = static_cast<uint8_t*>(gpu_empty(x.values.size() / 2));
  tokens.row.scales =
      static_cast<uint8_t*>(gpu_empty(fp4gemm_grouped_scale_rows(x.rows, kGroups) * ((columns + 3) / 4 * 4)));
  tokens.row.amax = static_cast<float*>(gpu_empty(sizeof(float) * x.rows));
  gpu_expect(fp4gemm_quantize(&tokens, 0, nullptr));
  // The weights follow each other. Their scales come from a checkpoint, and each matrix is swizzled by
  // itself.
  fp4gemm_quantized_t const b = quantize(w);
  std::vector<uint8_t> const plain = plain_scales(b.scales, 1, w.rows, columns);
  auto* const scales =
      static_cast<uint8_t*>(gpu_empty(size_t{kGroups} * ((n + 127) / 128 * 128) * ((columns + 3) / 4 * 4)));
  auto const* const compact = static_cast<uint8_t const*>(gpu_put(plain.data(), plain.size()));
  gpu_expect(fp4gemm_swizzle_scales(kGroups, n, columns, compact, columns, scales, 0, nullptr));
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.m = x.rows;
  args.n = n;
  args.k = k;
  args.num_groups = kGroups;
  args.offs = offs;
  args.a = {tokens.row.codes, tokens.row.scales, FP4GEMM_FORMAT_NVFP4};
  args.b = {b.codes, scales, FP4GEMM_FORMAT_NVFP4};
  args.alpha_row = {tokens.row.amax, x.rows, 0};
  args.alpha_col = {b.amax, n, n};
  args.alpha = 1.0f / (36 * 448 * 448);
  args.d = gpu_empty(sizeof(uint16_t) * x.rows * n);
  args.d_row_stride = n;
  size_t bytes = 0;
  gpu_expect(fp4gemm_gemm_workspace_bytes(&args, 0, &bytes));
  gpu_expect(fp4gemm_gemm(&args, gpu_empty(bytes), bytes, 0, nullptr));
  Want want(x.rows * n);
  for (int i = 0; i < x.rows; ++i) {
    int const group = i < ends[0] ? 0 : 2;
    for (int j = 0; j < n; ++j) {
      for (int l = 0; l < k; ++l) {
        want.add(i * n + j, x.at(i, l) * w.at(group * n + j, l));
      }
    }
  }
  return want.wrong("groups", args.d);
}

/// One expert of two for each token. The first weights are 6 on the diagonal, so that h = 6 x exactly.
int experts(Matrix const& x) {
  int const d = x.columns;
  Matrix w13(0, 2 * d, d), w2(3, 2 * d, d);
  for (int i = 0; i < 2 * d * d; ++i) {
    w13.values[i] = to_bf16(i / d % d == i % d ? 6.0f : 0.0f);
  }
  std::vector<int64_t> ids;
  for (int i = 0; i < x.rows; ++i) {
    ids.push_back(i % 3 == 0);
  }
  fp4gemm_experts_args_t args = FP4GEMM_EXPERTS_ARGS_INIT;  // topk_weights NULL: all are 1
  args.num_tokens = x.rows;
  args.top_k = 1;
  args.num_experts = 2;
  args.d = d;
  args.x = x.on_device();
  args.topk_ids = gpu_put(ids.data(), ids.size() * sizeof(ids[0]));
  args.ids_are_64_bits = 1;
  args.activation = FP4GEMM_ACTIVATION_NONE;
  fp4gemm_quantized_t const first = quantize(w13), second = quantize(w2);
  args.w13.n = args.w2.n = d;
  args.w13.operand = {first.codes, first.scales, FP4GEMM_FORMAT_NVFP4};
  args.w13.amax = first.amax;
  args.w2.operand = {second.codes, second.scales, FP4GEMM_FORMAT_NVFP4};
  args.w2.amax = second.amax;
  args.out = gpu_empty(sizeof(uint16_t) * x.rows * d);
  size_t bytes = 0;
  gpu_expect(fp4gemm_experts_workspace_bytes(&args, 0, &bytes));
  gpu_expect(fp4gemm_experts(&args, gpu_empty(bytes), bytes, 0, nullptr));
  Want want(x.rows * d);
  for (int i = 0; i < x.rows; ++i) {
    for (int c = 0; c < d; ++c) {
      for (int j = 0; j < d; ++j) {
        want.add(i * d + c, 6 * x.at(i, j) * w2.at(static_cast<int>(ids[i]) * d + c, j));
      }
    }
  }
  return want.wrong("experts", args.out);
}

}  // namespace

int main() {
  if (gpu_begin() == 0) {
    return 0;
  }
  Matrix const x(1, 33, 128);
  return product(x, Matrix(2, 72, 128)) + groups(x, Matrix(4, 3 * 72, 128)) + experts(x) == 0 ? 0 : 1;
}
