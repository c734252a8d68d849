/* Kernels of training beside the quantizers and the products of fp4gemm.h: SwiGLU and its gradients. */
#ifndef FP4GEMM_TRAINING_H_
#define FP4GEMM_TRAINING_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The arguments that both directions of SwiGLU have. */
typedef struct fp4gemm_swiglu_args {
  size_t struct_size;
  int64_t m, f;            /* f is a positive multiple of 8; m may be 0 */
  fp4gemm_dtype_t dtype;   /* of all matrices: FP4GEMM_BF16 or FP4GEMM_FP16 */
  const void* gate;        /* (m, f), 16-byte aligned; rows must start on 16-byte boundaries */
  int64_t gate_row_stride; /* elements */
  const void* up;          /* (m, f), as gate */
  int64_t up_row_stride;
  const float* weights; /* (m), or NULL, which stands for ones */
  void* y;              /* fp4gemm_swiglu: out (m, f), contiguous, 16-byte aligned */
  const void* dy;       /* this and the following of fp4gemm_swiglu_backward: (m, f), as gate */
  int64_t dy_row_stride;
  void* dgate;     /* out (m, f), contiguous, 16-byte aligned */
  void* dup;       /* out (m, f), contiguous, 16-byte aligned */
  float* dweights; /* out (m); not written where weights is NULL */
} fp4gemm_swiglu_args_t;

static inline fp4gemm_swiglu_args_t fp4gemm_swiglu_args_init(void) {
  fp4gemm_swiglu_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}
#define FP4GEMM_SWIGLU_ARGS_INIT fp4gemm_swiglu_args_init()

/* y = cast(fl(h * w)) with h = cast(fl(s * u)) and s = cast(silu(g)), for the elements g of gate and u of up
 * and the weight w of their row, where fl(.) is one fp32 operation and cast(.) rounds to dtype. silu(g) is
 * g / (1 + exp(-g)) rounded to fp32, and -0 for g < -88.75. Without weights, y = h. */
FP4GEMM_API fp4gemm_status_t fp4gemm_swiglu(const fp4gemm_swiglu_args_t* args, int device,
                                            fp4gemm_stream_t stream);

/* The gradients of fp4gemm_swiglu, for the elements d of dy:
 *
 *     dh    = cast(fl(d * w)), or d without weights
 *     dup   = cast(fl(dh * s))
 *     dgate = cast(fl(cast(fl(dh * u)) * D))
 *     dweights = the sum over the row of fl(d * h)
 *     D = fl(q * fl(1 + fl(g * fl(1 - q)))), q = fl(1 / fl(1 + e(g))), and D = 0 for g < -87
 *
 * e(g) is the exponential of the activations: exp(-g), with g clamped to -87..87 (docs/epilogue.md). The sum
 * has a fixed order. Chunks of 8 elements are folded by halves: t[j] and t[j + 4] are added, then those at
 * distance 2 and 1. p[l] = ((0 + chunk l) + chunk l + 128) + ..., and the 128 p are folded by halves too. */
FP4GEMM_API fp4gemm_status_t fp4gemm_swiglu_backward(const fp4gemm_swiglu_args_t* args, int device,
                                                     fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
