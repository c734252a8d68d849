/* Quantizes, multiplies, and multiplies in groups on a GPU, from C99, and compares with the host. */
#include "gpu.h"

enum { kM = 40, kN = 128, kK = 256, kGroups = 3 };

static uint16_t x[kM * kK], w[kGroups * kN * kK], d[kM * kN];
static double want[kM * kN], scale[kM * kN];

/* An NVFP4 matrix on the device. */
struct quantized {
  uint8_t *codes, *scales;
  float* amax;
};

/* Quantizes (rows, kK) bf16 values of the host, in groups if offs is not NULL. */
static struct quantized quantize(const uint16_t* values, int rows, const int32_t* offs, int num_groups) {
  int64_t scale_rows = 0, scale_columns = 0;
  fp4gemm_padded_scale_shape(rows, kK, &scale_rows, &scale_columns);
  if (offs != NULL) {
    scale_rows = fp4gemm_grouped_scale_rows(rows, num_groups);
  }
  struct quantized result;
  result.codes = (uint8_t*)gpu_empty((size_t)rows * kK / 2);
  result.scales = (uint8_t*)gpu_empty((size_t)(scale_rows * scale_columns));
  result.amax = (float*)gpu_empty(sizeof(float) * (size_t)rows);
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT; /* one amax for each row, bf16 */
  args.m = rows;
  args.k = kK;
  args.x = gpu_put(values, sizeof(uint16_t) * (size_t)rows * kK);
  args.x_row_stride = kK;
  args.row.codes = result.codes;
  args.row.scales = result.scales;
  args.row.amax = result.amax;
  args.offs = offs;
  args.num_groups = num_groups;
  gpu_expect(fp4gemm_quantize(&args, 0, NULL));
  return result;
}

/* x times the weights: those of the first group, or in groups if offs is not NULL. */
static int multiply(const char* what, const int32_t* offs, int num_groups) {
  struct quantized const a = quantize(x, kM, offs, num_groups);
  struct quantized const b = quantize(w, kGroups * kN, NULL, 0); /* kN is a multiple of 128: a stack */
  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.m = kM;
  args.n = kN;
  args.k = kK;
  args.num_groups = num_groups;
  args.offs = offs;
  args.a.data = a.codes;
  args.a.scales = a.scales;
  args.b.data = b.codes;
  args.b.scales = b.scales;
  args.alpha_row.data = a.amax;
  args.alpha_row.numel = kM;
  args.alpha_col.data = b.amax;
  args.alpha_col.numel = kN;
  args.alpha_col.group_stride = offs != NULL ? kN : 0;
  args.alpha = 1.0f / (36.0f * 448.0f * 448.0f);
  args.d = gpu_empty(sizeof(d));
  args.d_row_stride = kN;
  size_t bytes = 0;
  gpu_expect(fp4gemm_gemm_workspace_bytes(&args, 0, &bytes));
  gpu_expect(fp4gemm_gemm(&args, gpu_empty(bytes), bytes, 0, NULL));
  gpu_get(d, args.d, sizeof(d));
  return count_wrong(what, d, want, scale, kM * kN);
}

/* Sets `want` to the products of the rows of x and the weights of their groups, which end at `ends`. */
static void compute(const int32_t* ends) {
  for (int i = 0; i < kM; ++i) {
    int group = 0;
    while (ends != NULL && i >= ends[group]) {
      ++group;
    }
    for (int j = 0; j < kN; ++j) {
      want[i * kN + j] = scale[i * kN + j] = 0;
      for (int l = 0; l < kK; ++l) {
        double const term = (double)of_bf16(x[i * kK + l]) * of_bf16(w[(group * kN + j) * kK + l]);
        want[i * kN + j] += term;
        scale[i * kN + j] += fabs(term);
      }
    }
  }
}

int main(void) {
  if (gpu_begin() == 0) {
    return 0;
  }
  for (int i = 0; i < kM * kK; ++i) {
    x[i] = to_bf16(exact_value(1, i / kK, i % kK));
  }
  for (int i = 0; i < kGroups * kN * kK; ++i) {
    w[i] = to_bf16(exact_value(2, i / kK, i % kK));
  }
  int32_t const ends[kGroups] = {17, 17, kM}; /* the second group has no rows */
  compute(NULL);
  int wrong = multiply("multiply", NULL, 0);
  compute(ends);
  wrong += multiply("multiply in groups", (const int32_t*)gpu_put(ends, sizeof(ends)), kGroups);
  return wrong == 0 ? 0 : 1;
}
