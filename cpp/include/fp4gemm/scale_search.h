/* NVFP4 quantization with a search for the block scales: for weights, which are quantized once. The result is
 * an ordinary NVFP4 tensor, as of fp4gemm_quantize (fp4gemm.h). */
#ifndef FP4GEMM_SCALE_SEARCH_H_
#define FP4GEMM_SCALE_SEARCH_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fp4gemm_quantize_searched_args {
  size_t struct_size;
  int64_t m, k;         /* k is a positive multiple of 16; m may be 0 */
  const void* x;        /* (m, k), 16-byte aligned */
  int64_t x_row_stride; /* elements; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t x_dtype;
  fp4gemm_scaling_t scaling;
  int block_rows;          /* 1, or 16: blocks of 16 x 16, with tensor scaling */
  int e4m3_max;            /* 448 or 256: the bound of the standard scales. 256 leaves room for larger ones */
  int fp8_operand;         /* 0, or 1: x is multiplied as FP8 values too (FP4GEMM_FORMAT_E4M3) */
  const float* importance; /* (k), on the device; NULL: 1 for all. The values are not checked */
  uint8_t* codes;          /* this and the following as in fp4gemm_quantized_t: out (m, k/2) */
  uint8_t* scales;         /* out, swizzled with zero padding */
  float* amax;             /* out: (m) for row scaling, else (1) */
  const float* amax_given; /* NULL, or in place of the computed one; amax may then be NULL */
} fp4gemm_quantize_searched_args_t;

static inline fp4gemm_quantize_searched_args_t fp4gemm_quantize_searched_args_init(void) {
  fp4gemm_quantize_searched_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.scaling = FP4GEMM_SCALING_ROW;
  args.block_rows = 1;
  args.e4m3_max = 256;
  return args;
}
#define FP4GEMM_QUANTIZE_SEARCHED_ARGS_INIT fp4gemm_quantize_searched_args_init()

/* With the formulas of fp4gemm_quantize (FP4GEMM_ENCODE_TE), c the e4m3 code of the standard scale of a
 * block, A the amax of its row or tensor, h the importance and B = e4m3_max, each block uses the scale of the
 * smallest
 *
 *     E = sum of ((q * ((s * A) * (1 / (6 B))) - x)^2 * h)
 *
 * among the codes c', c' + 1, .., c' + 6, c' - 1, .., c' - 6 with c' = max(c, 1), each clamped to 1..126,
 * and the first of them where several are equal. Each operation rounds once to fp32. The 16 terms of a row of
 * a block are folded by halves (term i and term i + 8, then i + 4, i + 2, i + 1), and so are the sums of the
 * rows of a 16 x 16 block. A block of zeros has the scale 0. A comparison with NaN is false.
 *
 * With fp8_operand, E is the mean of the squared errors of the NVFP4 values and of the FP8 values
 * v = 8 * e4m3(q * s / 8), which products with FP8 tokens have in place of q * s. With z = (v - q * s) / 2,
 *
 *     E = sum of ((((q * s + z) * p - x)^2 + (z * p)^2) * h)        p = A * (1 / (6 B)) */
FP4GEMM_API fp4gemm_status_t fp4gemm_quantize_searched(const fp4gemm_quantize_searched_args_t* args,
                                                       int device, fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
