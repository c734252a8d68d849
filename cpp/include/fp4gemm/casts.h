/* The options of the cast by which a product quantizes its activations: a GEMM that takes them, beside
 * fp4gemm_gemm (fp4gemm.h), which quantizes with their defaults; and a part of fp4gemm_experts_args_t
 * (experts.h). */
#ifndef FP4GEMM_CASTS_H_
#define FP4GEMM_CASTS_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Options of fp4gemm_quantize, with the meanings and the limits that fp4gemm_quantize_args_t gives them. */
typedef struct fp4gemm_cast {
  fp4gemm_encode_t encode;
  fp4gemm_four_over_six_t four_over_six; /* not NONE: encode is FP4GEMM_ENCODE_TE */
  int fast_error;                        /* 0 without four_over_six */
  int e4m3_max;                          /* 448, or 256 with four_over_six */
  const int32_t* residual_channels;      /* only of a GEMM without groups; NULL: none */
  int num_residual_channels;
} fp4gemm_cast_t;

static inline fp4gemm_cast_t fp4gemm_cast_init(void) {
  fp4gemm_cast_t cast;
  memset(&cast, 0, sizeof(cast));
  cast.e4m3_max = 448;
  return cast;
}
#define FP4GEMM_CAST_INIT fp4gemm_cast_init()

/* fp4gemm_gemm, and the query of its workspace, where args->quantize_a is FP4GEMM_QUANTIZE_A_ROW or
 * FP4GEMM_QUANTIZE_A_TENSOR and A is quantized by these options. alpha is then to be 1 / (36 * e4m3_max of
 * the cast * e4m3_max of B). Other options than those of FP4GEMM_CAST_INIT exclude a_rows, and A is quantized
 * in a launch of its own. With residual channels k is that of B, and A is (m, k - num_residual_channels); the
 * last columns of B are to be columns residual_channels of it again. */
FP4GEMM_API fp4gemm_status_t fp4gemm_gemm_with_cast_workspace_bytes(const fp4gemm_gemm_args_t* args,
                                                                    const fp4gemm_cast_t* cast, int device,
                                                                    size_t* bytes);
FP4GEMM_API fp4gemm_status_t fp4gemm_gemm_with_cast(const fp4gemm_gemm_args_t* args,
                                                    const fp4gemm_cast_t* cast, void* workspace,
                                                    size_t workspace_bytes, int device,
                                                    fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
