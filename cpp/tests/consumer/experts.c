/* Computes a block of experts on a GPU, from C99, and compares with the host.
 *
 * The first weights are chosen so that h is exact too. All rows of the gate are 6 in column 0, where x is 6:
 * z' = 36, and silu(36) = 36 in fp32. Row j of up is 6 in column source(e, j): h[j] = 36 * 6 * x[source(e,
 * j)].
 */
#include "fp4gemm/experts.h"

#include "gpu.h"

enum { kTokens = 45, kTopK = 2, kExperts = 4, kD = 128, kH = kD };

static uint16_t x[kTokens * kD], w13[kExperts * 2 * kH * kD], w2[kExperts * kD * kH], out[kTokens * kD];
static int32_t ids[kTokens * kTopK];
static float topk_weights[kTokens * kTopK];
static double want[kTokens * kD], scale[kTokens * kD];

/* The column of x that column j of h comes from, in expert e. It is in the same block of 16, and the first of
 * a block stays the first, so that each block of h holds the amax of its row. */
static int source(int e, int j) { return j % 16 == 0 ? j : j / 16 * 16 + 1 + (j % 16 - 1 + 3 * e) % 15; }

static void make_block(void) {
  for (int i = 0; i < kTokens * kD; ++i) {
    x[i] = to_bf16(exact_value(1, i / kD, i % kD));
  }
  for (int e = 0; e < kExperts; ++e) {
    for (int j = 0; j < kH; ++j) {
      w13[((e * kH + j) * 2 + 0) * kD] = to_bf16(6.0f);
      w13[((e * kH + j) * 2 + 1) * kD + source(e, j)] = to_bf16(6.0f);
    }
  }
  for (int i = 0; i < kExperts * kD * kH; ++i) {
    w2[i] = to_bf16(exact_value(2, i / kH, i % kH));
  }
  for (int i = 0; i < kTokens; ++i) {
    ids[kTopK * i] = i % 5 == 4 ? -1 : i % kExperts; /* -1: this slot names no expert */
    ids[kTopK * i + 1] = (i + 1 + i / 7 % 3) % kExperts;
    topk_weights[kTopK * i] = 0.5f;
    topk_weights[kTopK * i + 1] = 0.25f;
  }
}

static void compute(void) {
  for (int i = 0; i < kTokens; ++i) {
    for (int slot = 0; slot < kTopK; ++slot) {
      int const e = ids[kTopK * i + slot];
      for (int c = 0; e >= 0 && c < kD; ++c) {
        for (int j = 0; j < kH; ++j) {
          double const h = 36.0 * 6.0 * of_bf16(x[i * kD + source(e, j)]);
          double const term = topk_weights[kTopK * i + slot] * h * of_bf16(w2[(e * kD + c) * kH + j]);
          want[i * kD + c] += term;
          scale[i * kD + c] += fabs(term);
        }
      }
    }
  }
}

/* Sets weights to the quantized matrices (n, kD) of all experts. n is a multiple of 128, so that a stack of
 * matrices is quantized as one. */
static void quantize(fp4gemm_expert_weights_t* weights, const uint16_t* values, int n) {
  int const rows = kExperts * n;
  int64_t scale_rows = 0, scale_columns = 0;
  fp4gemm_padded_scale_shape(rows, kD, &scale_rows, &scale_columns);
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  args.m = rows;
  args.k = kD;
  args.x = gpu_put(values, sizeof(uint16_t) * (size_t)rows * kD);
  args.x_row_stride = kD;
  args.row.codes = (uint8_t*)gpu_empty((size_t)rows * kD / 2);
  args.row.scales = (uint8_t*)gpu_empty((size_t)(scale_rows * scale_columns));
  args.row.amax = (float*)gpu_empty(sizeof(float) * (size_t)rows);
  gpu_expect(fp4gemm_quantize(&args, 0, NULL));
  weights->n = n;
  weights->operand.data = args.row.codes;
  weights->operand.scales = args.row.scales;
  weights->amax = args.row.amax;
}

/* Puts the weights into the order in which Hopper's kernels read them. */
static void prepack(fp4gemm_expert_weights_t* weights) {
  fp4gemm_operand_t* const operand = &weights->operand;
  void* const packed = gpu_empty((size_t)(kExperts * fp4gemm_prepacked_bytes(weights->n, kD)));
  gpu_expect(fp4gemm_prepack(kExperts, weights->n, kD, (const uint8_t*)operand->data,
                             (const uint8_t*)operand->scales, packed, 0, NULL));
  operand->data = packed;
  operand->scales = NULL;
  operand->format = FP4GEMM_FORMAT_PREPACKED;
  weights->is_constant = 1; /* nothing writes them any more */
}

static int run(const char* what, fp4gemm_experts_args_t* args) {
  args->out = gpu_empty(sizeof(out));
  size_t bytes = 0;
  gpu_expect(fp4gemm_experts_workspace_bytes(args, 0, &bytes));
  gpu_expect(fp4gemm_experts(args, gpu_empty(bytes), bytes, 0, NULL));
  gpu_get(out, args->out, sizeof(out));
  return count_wrong(what, out, want, scale, kTokens * kD);
}

int main(void) {
  int const device_arch = gpu_begin();
  if (device_arch == 0) {
    return 0;
  }
  make_block();
  compute();
  fp4gemm_experts_args_t args = FP4GEMM_EXPERTS_ARGS_INIT; /* SwiGLU; tokens become NVFP4; all is bf16 */
  args.num_tokens = kTokens;
  args.top_k = kTopK;
  args.num_experts = kExperts;
  args.d = kD;
  args.x = gpu_put(x, sizeof(x));
  args.topk_ids = gpu_put(ids, sizeof(ids));
  args.topk_weights = gpu_put(topk_weights, sizeof(topk_weights));
  quantize(&args.w13, w13, 2 * kH);
  quantize(&args.w2, w2, kD);
  int wrong = run("experts", &args);
  if (fp4gemm_kernel_arch(device_arch) == 90) {
    prepack(&args.w13);
    prepack(&args.w2);
    wrong += run("experts, prepacked", &args);
    args.quantize_a = FP4GEMM_QUANTIZE_A_NONE;
    wrong += run("experts, tokens that are not quantized", &args);
  }
  return wrong == 0 ? 0 : 1;
}
