/* A block of experts in one call: the routing of the tokens, two grouped products with the quantization of
 * their rows, and the weighted sum of what the experts of each token computed. */
#ifndef FP4GEMM_EXPERTS_H_
#define FP4GEMM_EXPERTS_H_

#include "fp4gemm/casts.h"
#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The weights of all experts in one of the two products: a matrix W[e] (n, k) for each expert e. */
typedef struct fp4gemm_expert_weights {
  int64_t n; /* rows of each matrix, a multiple of 32, of 64 for FP8 tokens; of w13 with a gated
                activation a multiple of twice as much */
  fp4gemm_operand_t operand; /* the matrices one after the other, as B of a GEMM that is ragged in m:
                                FP4GEMM_FORMAT_NVFP4; or FP4GEMM_FORMAT_PREPACKED, or with FP8 tokens
                                FP4GEMM_FORMAT_PREPACKED_FP8 */
  int is_constant;           /* 1: the promise of b_is_constant in fp4gemm_gemm_args_t */
  int e4m3_max;              /* 448 or 256: the bound of the block scales, as in fp4gemm_quantize_args_t */
  fp4gemm_scaling_t scaling; /* FP4GEMM_SCALING_ROW: amax is (num_experts, n); FP4GEMM_SCALING_TENSOR: it is
                                (num_experts) */
  const float* amax;
  const float* bias; /* (num_experts, n), or NULL */
} fp4gemm_expert_weights_t;

static inline fp4gemm_expert_weights_t fp4gemm_expert_weights_init(void) {
  fp4gemm_expert_weights_t weights;
  memset(&weights, 0, sizeof(weights));
  weights.e4m3_max = 448;
  weights.scaling = FP4GEMM_SCALING_ROW;
  return weights;
}
#define FP4GEMM_EXPERT_WEIGHTS_INIT fp4gemm_expert_weights_init()

typedef struct fp4gemm_experts_args {
  size_t struct_size;
  int64_t num_tokens;       /* t; t * top_k is at most INT32_MAX */
  int top_k;                /* slots of a token, at least 1 */
  int num_experts;          /* 1 to 2048 */
  int64_t d;                /* elements of a token, a multiple of 32; of 64 for FP8 tokens */
  const void* x;            /* (t, d) contiguous, 16-byte aligned */
  fp4gemm_dtype_t x_dtype;  /* FP4GEMM_FP32 only if quantize_a is not FP4GEMM_QUANTIZE_A_NONE */
  const void* topk_ids;     /* (t, top_k) int32_t or int64_t: the expert of each slot, as for fp4gemm_route */
  int ids_are_64_bits;      /* 1: topk_ids are int64_t */
  const void* topk_weights; /* (t, top_k); NULL: all are 1 */
  fp4gemm_dtype_t weights_dtype;
  fp4gemm_expert_weights_t w13;    /* k = d; with a gated activation, gate and up are interleaved rows */
  fp4gemm_expert_weights_t w2;     /* n = d; k is the n of w13, or half of it with a gated activation */
  fp4gemm_activation_t activation; /* of the first product */
  /* What the rows of x and of h are quantized to. FP4GEMM_QUANTIZE_A_ROW: NVFP4, each row with an amax of its
   * own. FP4GEMM_QUANTIZE_A_TENSOR: NVFP4, the rows of each expert with one amax. FP4GEMM_QUANTIZE_A_FP8: FP8
   * tokens, each row with an amax of its own. FP4GEMM_QUANTIZE_A_NONE: they are not quantized, and x must be
   * bf16 or fp16. */
  fp4gemm_quantize_a_t quantize_a;
  fp4gemm_cast_t cast; /* how they are quantized to NVFP4; FP4GEMM_CAST_INIT without that */
  int batch_invariant; /* this and the following as in fp4gemm_gemm_args_t, for both products */
  int use_fast_accum;
  void* out; /* out (t, d) of the type of x, contiguous, 16-byte aligned */
} fp4gemm_experts_args_t;

static inline fp4gemm_experts_args_t fp4gemm_experts_args_init(void) {
  fp4gemm_experts_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  args.weights_dtype = FP4GEMM_FP32;
  args.w13 = fp4gemm_expert_weights_init();
  args.w2 = fp4gemm_expert_weights_init();
  args.activation = FP4GEMM_ACTIVATION_SWIGLU;
  args.quantize_a = FP4GEMM_QUANTIZE_A_ROW;
  args.cast = fp4gemm_cast_init();
  return args;
}
#define FP4GEMM_EXPERTS_ARGS_INIT fp4gemm_experts_args_init()

/* Bytes of workspace that fp4gemm_experts needs for these arguments on this device. Pointers are not used. */
FP4GEMM_API fp4gemm_status_t fp4gemm_experts_workspace_bytes(const fp4gemm_experts_args_t* args, int device,
                                                             size_t* bytes);

/* With the routing of fp4gemm_route, which gives row r to the token i = token_of_row[r] and to its expert e,
 *
 *     h[r]   = cast( act( Q(x[i]) W13[e]^T + bias13[e] ) )
 *     y[r]   = cast( Q(h[r]) W2[e]^T + bias2[e] )
 *     out[i] = fp4gemm_combine of the rows y that are those of token i, with its topk_weights
 *
 * where Q is what quantize_a and cast say, and each product is the grouped fp4gemm_gemm of the rows, with the
 * amaxes of the weights and alpha for their e4m3_max. h has the type of x, or bf16 where x is fp32; y has the
 * type of x. A slot that names no expert contributes nothing. The bits are those of the single calls:
 * fp4gemm_route; fp4gemm_gemm_with_cast of the rows of x that token_of_row names; fp4gemm_gemm_with_cast;
 * fp4gemm_combine. The host never reads topk_ids, so that a captured graph may be replayed with
 * other ids.
 *
 * workspace: at least that many bytes, 256-byte aligned, as in fp4gemm_gemm. Where no kernel serves a product
 * on this device, the error is that of fp4gemm_gemm, whose a is x or h and whose b is w13 or w2. */
FP4GEMM_API fp4gemm_status_t fp4gemm_experts(const fp4gemm_experts_args_t* args, void* workspace,
                                             size_t workspace_bytes, int device, fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
