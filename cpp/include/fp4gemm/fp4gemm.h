/* The C interface of fp4gemm: NVFP4 quantization, decoding, dense and grouped GEMM with every scale vector in
 * the epilogue, and the routing of mixtures of experts.
 *
 * The GEMM computes, with A (m,k), B (n,k), C and D (m,n) all row-major,
 *
 *     D[i,j] = cast( act( z[i,j] ) + beta * C[i,j] )
 *     z[i,j] = alpha * ( alpha_col[j] * ( alpha_row[i] * acc[i,j] ) ) + bias[j]
 *     acc[i,j] = sum over l of  (q_a[i,l] * s_a[i,l/16]) * (q_b[j,l] * s_b[j,l/16])
 *
 * where q is an e2m1 value and s the e4m3 scale of its block of 16 along k. Every multiplication and addition
 * rounds once to fp32 (to nearest even, never contracted to an FMA), in the order of the brackets; the cast
 * rounds once more. A term that is absent is neither multiplied nor added. acc is an fp32 sum whose order
 * depends on the kernel: where all partial sums fit in fp32, as with Gaussian data, it is exact.
 *
 * With A in FP4GEMM_FORMAT_E4M3 (W4A8), acc[i,j] = 8 * sum over l of a[i,l] * e4m3(q_b[j,l] * s_b[j,l/16] /
 * 8) instead, rounded to nearest even. The products are exact, and the sum has the order and the precision of
 * the FP8 tensor cores; see use_fast_accum. A from the FP8 cast of fp4gemm_quantize represents x[i,l] ~ a *
 * amax[i] / 448, so that alpha = 1 / (448 * 6 * e4m3_max_b).
 *
 * An operand from fp4gemm_quantize represents  x[i,l] ~ q * s * amax[i] / (6 * e4m3_max) , so a GEMM of two
 * such operands needs alpha_row = amax of A, alpha_col = amax of B and
 * alpha = 1 / (36 * e4m3_max_a * e4m3_max_b).
 *
 * Conventions
 *
 * - Pointers are device pointers unless said otherwise. Sizes and strides are in elements unless the name
 *   says bytes.
 * - codes: (rows, k/2) bytes with contiguous rows. A byte holds two e2m1 codes, the one of even k in its low
 *   nibble.
 * - scales: e4m3 bytes in the 128x4 swizzled layout. With rp = rows rounded up to 128 and cp = k/16 rounded
 *   up to 4 there are rp*cp bytes, and the scale of (row r, block c) has the offset
 *       ((r/128) * (cp/4) + c/4) * 512  +  (r%32)*16 + ((r%128)/32)*4 + c%4 .
 *   The padding must be zero bytes; fp4gemm_quantize writes it so. A scale is a number from 0 to 448, a byte
 *   from 0x00 to 0x7E: no NaN, and a clear sign bit. No function looks at the values. With a sign bit that is
 *   set, a product is not defined: the tensor cores of Blackwell ignore the bit, other kernels do not.
 * - `device` is a CUDA device ordinal and `stream` a stream of it. No function allocates memory, synchronises
 *   or reads an environment variable; each may be captured in a CUDA graph. All are thread-safe.
 * - Every function that can fail returns a status. After a failure fp4gemm_last_error() returns one sentence
 *   for this thread that names the argument, the value it had and the value required.
 * - Argument structs begin with struct_size. Initialize each with its FP4GEMM_*_INIT macro, which is a call
 *   of the struct's fp4gemm_*_init function. Fields that this function does not set are 0. A library whose
 *   struct has another size refuses the call. Before version 1.0 any minor version may change the structs.
 * - An int that says yes or no, such as b_is_constant, must be 0 or 1.
 */
#ifndef FP4GEMM_FP4GEMM_H_
#define FP4GEMM_FP4GEMM_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define FP4GEMM_VERSION_MAJOR 0
#define FP4GEMM_VERSION_MINOR 2
#define FP4GEMM_VERSION_PATCH 0
#define FP4GEMM_VERSION (FP4GEMM_VERSION_MAJOR * 10000 + FP4GEMM_VERSION_MINOR * 100 + FP4GEMM_VERSION_PATCH)

#if defined(_WIN32)
#define FP4GEMM_API
#else
#define FP4GEMM_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The same type as cudaStream_t, declared here so that no CUDA header is needed. NULL is the legacy default
 * stream. */
struct CUstream_st;
typedef struct CUstream_st* fp4gemm_stream_t;

typedef enum fp4gemm_status {
  FP4GEMM_SUCCESS = 0,
  FP4GEMM_ERROR_INVALID_ARGUMENT = 1, /* an argument is wrong; nothing was launched */
  FP4GEMM_ERROR_NOT_SUPPORTED = 2,    /* no kernel of this build serves the arguments on this device */
  FP4GEMM_ERROR_WORKSPACE = 3,        /* the workspace is missing, too small or misaligned */
  FP4GEMM_ERROR_CUDA = 4,             /* a CUDA call failed */
  FP4GEMM_ERROR_NOT_LOADED = 5        /* a kernel must be compiled and loaded first: generated.h */
} fp4gemm_status_t;

typedef enum fp4gemm_dtype { FP4GEMM_BF16 = 0, FP4GEMM_FP16 = 1, FP4GEMM_FP32 = 2 } fp4gemm_dtype_t;

/* How many amax values a tensor has: one, or one per row (a token, or an output channel of a weight). */
typedef enum fp4gemm_scaling { FP4GEMM_SCALING_TENSOR = 0, FP4GEMM_SCALING_ROW = 1 } fp4gemm_scaling_t;

/* What a GEMM operand holds. Kernels for devices with FP4 tensor cores read NVFP4 only. scales is NULL except
 * for NVFP4, MXFP8 and MXFP4. */
typedef enum fp4gemm_format {
  FP4GEMM_FORMAT_NVFP4 = 0, /* data: codes, scales: swizzled e4m3 */
  FP4GEMM_FORMAT_FP16 = 1,  /* data: (rows, k) fp16: values times their block scales (exact); or, as A with
                               an NVFP4 or prepacked B, activations that were never quantized */
  FP4GEMM_FORMAT_BF16 = 2,  /* A only. data: (rows, k) bf16, activations that were never quantized */
  FP4GEMM_FORMAT_PREPACKED = 3, /* B only. data: the bytes that fp4gemm_prepack wrote */
  FP4GEMM_FORMAT_FP32 = 4,      /* A with quantize_a only. data: (rows, k) fp32 */
  FP4GEMM_FORMAT_E4M3 = 5,      /* A only. data: (rows, k) e4m3, in the order of the FP8 kernels along k */
  FP4GEMM_FORMAT_PREPACKED_FP8 = 6, /* B only. data: the bytes that fp4gemm_prepack_fp8 wrote */
  FP4GEMM_FORMAT_MXFP8 = 7, /* both, or A beside a B in MXFP4. data: (rows, k) e4m3, scales: swizzled e8m0,
                               one for each 32 */
  FP4GEMM_FORMAT_MXFP4 = 8  /* both, or B beside an A in MXFP8. data: codes as of NVFP4, scales: as of MXFP8.
                               Beside MXFP8 and on Blackwell, B is expanded to MXFP8 in each call unless k is a
                               multiple of 128; then data must be at a multiple of 32 bytes */
} fp4gemm_format_t;

/* ---- errors and versions ---- */

/* "success", "invalid argument", ...; never NULL. */
FP4GEMM_API const char* fp4gemm_status_string(fp4gemm_status_t status);

/* The error of this thread's last call that failed; "" before the first failure. The text is valid until the
 * next call that fails. */
FP4GEMM_API const char* fp4gemm_last_error(void);

/* FP4GEMM_VERSION of the loaded library, as a number and as text ("0.1.0"). */
FP4GEMM_API int fp4gemm_version(void);
FP4GEMM_API const char* fp4gemm_version_string(void);

/* What the library was built with: CUDART_VERSION (0 without CUDA); the version of the CUTLASS headers and
 * the list of architectures, as text, "" without CUDA. */
FP4GEMM_API int fp4gemm_cuda_version(void);
FP4GEMM_API const char* fp4gemm_cutlass_version(void);
FP4GEMM_API const char* fp4gemm_built_archs(void);

/* ---- quantize, dequantize, decode ---- */

/* The shape of the swizzled scales of a (rows, k) tensor: rows rounded up to 128, k/16 rounded up to 4. */
FP4GEMM_API void fp4gemm_padded_scale_shape(int64_t rows, int64_t k, int64_t* scale_rows,
                                            int64_t* scale_cols);

/* 1 if this build quantizes, dequantizes and decodes on devices of compute capability arch/10 . arch%10;
 * else 0. */
FP4GEMM_API int fp4gemm_quantize_supported(int arch);

/* The factor e by which elements are multiplied; S is the encode scale of the row or tensor and s the scale
 * of the block. */
typedef enum fp4gemm_encode {
  FP4GEMM_ENCODE_TE = 0, /* TransformerEngine >= 2.14: min(1 / (s * (1/S)), FLT_MAX) */
  FP4GEMM_ENCODE_TE_PER_TOKEN =
      1,                  /* TransformerEngine's pull request 3045: min(S / s, FLT_MAX), 0 if s is 0 */
  FP4GEMM_ENCODE_EDEN = 2 /* that of TE, and scales that are corrected and rounded stochastically, below */
} fp4gemm_encode_t;

/* Whether a block may map its largest magnitude to 4 instead of 6: never, or where that makes the sum of
 * absolute (MAE) or square (MSE) errors smaller. */
typedef enum fp4gemm_four_over_six {
  FP4GEMM_FOUR_OVER_SIX_NONE = 0,
  FP4GEMM_FOUR_OVER_SIX_MAE = 1,
  FP4GEMM_FOUR_OVER_SIX_MSE = 2
} fp4gemm_four_over_six_t;

/* The 16-point Hadamard transform, which is applied to every block first: sign flips, fp32 butterflies of
 * stride 1, 2, 4 and 8, and a multiplication by 1/4. The result is rounded to bf16 (TransformerEngine's
 * default) or kept in fp32. */
typedef enum fp4gemm_hadamard {
  FP4GEMM_HADAMARD_NONE = 0,
  FP4GEMM_HADAMARD_BF16 = 1,
  FP4GEMM_HADAMARD_FP32 = 2
} fp4gemm_hadamard_t;

/* One direction of a quantized matrix: the rows of x (blocks along k) or the rows of x^T (blocks along m). */
typedef struct fp4gemm_quantized {
  uint8_t* codes;  /* out (rows, columns/2), 16-byte aligned; NULL: this direction is not computed */
  uint8_t* scales; /* out, swizzled with zero padding, 16-byte aligned */
  float* amax;     /* out: A, which is max |x|, NaN ignored. Row scaling: (rows), or (num_groups, rows) for
                      `column` in groups. Tensor scaling: (1), or in groups (rows) for `row`, the A of a group in
                      each of its rows, and (num_groups) for `column` */
  const float* amax_given; /* NULL: A is computed. Otherwise it is used as it is, in the shape of amax, except
                              that tensor scaling of `row` in groups needs (num_groups). amax may then be NULL
                              and is written only for tensor scaling of `row` in groups */
  fp4gemm_hadamard_t hadamard;
  void* decoded; /* in place of codes and scales, which are then NULL: out (rows, columns) fp16, 16-byte
                    aligned, each value times its block scale (exact), for FP4GEMM_FORMAT_FP16. Only where the
                    other direction is not computed */
  uint8_t* fp8;  /* in place of codes and scales, which are then NULL: out (rows, columns) e4m3, 16-byte
                    aligned, the FP8 cast below. Only for `row` alone, with row scaling, an amax that is
                    computed, and the defaults of all options; columns is a multiple of 64 */
} fp4gemm_quantized_t;

static inline fp4gemm_quantized_t fp4gemm_quantized_init(void) {
  fp4gemm_quantized_t quantized;
  memset(&quantized, 0, sizeof(quantized));
  return quantized;
}
#define FP4GEMM_QUANTIZED_INIT fp4gemm_quantized_init()

typedef struct fp4gemm_quantize_args {
  size_t struct_size;
  int64_t m, k;  /* k is a positive multiple of 16; m may be 0, and must be a multiple of 16 if `column` is
                    computed without groups */
  const void* x; /* (m, k), or (x_num_rows, k) with x_rows; 16-byte aligned */
  int64_t x_row_stride; /* elements; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t x_dtype;
  fp4gemm_scaling_t scaling;
  fp4gemm_quantized_t row;    /* x with blocks along k */
  fp4gemm_quantized_t column; /* x^T, (k, m), with blocks along m */
  int block_rows;             /* 1, or 16: blocks of 16 x 16, with tensor scaling */
  fp4gemm_encode_t encode;
  fp4gemm_four_over_six_t four_over_six;
  int fast_error;           /* 1: four over six computes the errors in the scaled domain */
  int e4m3_max;             /* 448, or 256 with four over six and with FP4GEMM_ENCODE_EDEN */
  unsigned hadamard_signs;  /* bit r set: element r of a block is negated before the transform */
  const int64_t* rng_state; /* {seed, offset} on the device for stochastic rounding; NULL: to nearest even */
  const int32_t* offs; /* (num_groups) cumulative ends of groups of rows, on the device; NULL: no groups */
  int num_groups;
  const int32_t* x_rows; /* (m) on the device: row i of the input is row x_rows[i] of x, or zeros if that is
                            outside of 0..x_num_rows - 1; NULL: row i of x. Only with row scaling of `row`
                            whose amax is computed, and the defaults of the options above */
  int64_t x_num_rows;    /* rows of x, with x_rows */
  const int32_t*
      residual_channels;     /* (num_residual_channels) on the device, distinct numbers of columns of x:
                                `row` has k + num_residual_channels columns, below; NULL: k columns */
  int num_residual_channels; /* 0, or a positive multiple of 32 that is at most k */
} fp4gemm_quantize_args_t;

static inline fp4gemm_quantize_args_t fp4gemm_quantize_args_init(void) {
  fp4gemm_quantize_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.scaling = FP4GEMM_SCALING_ROW;
  args.block_rows = 1;
  args.e4m3_max = 448;
  return args;
}
#define FP4GEMM_QUANTIZE_ARGS_INIT fp4gemm_quantize_args_init()

/* NVFP4 quantization with the bits of TransformerEngine >= 2.14. With A the amax of the row or of the tensor,
 * a the amax of the block, and B = e4m3_max,
 *
 *     S    = min(6 B / A, FLT_MAX) , or 1 where that is 0
 *     s    = e4m3( min(a * (S * (1/6)), FLT_MAX) )
 *     code = e2m1( x * e ) ,  e = min(1 / (s * (1/S)), FLT_MAX)  (see fp4gemm_encode_t)
 *
 * Each operation rounds once to fp32; e4m3 and e2m1 round to nearest even and saturate. NaN elements become
 * code 7 (+6).
 *
 * Four over six: with b = (a / 6) * S the scale of a block is s4 = e4m3(min(b * 1.5, 448)) instead of
 * s6 = e4m3(min(b, 448)) if its error, sum |v - x| or sum (v - x)^2, is smaller; v = ((q s) A) / (6 B). With
 * fast_error the terms are (q s) - x S instead of v - x.
 *
 * Stochastic rounding: block number i of the result (row by row) uses 128 bits of Philox4x32-10 with key =
 * seed and counter = (offset, i), for `column` (offset + 1, i). Byte j of them belongs to element j, which is
 * rounded away from zero if floor(256 f) + byte >= 256, where f in [0, 1) is the position of the element
 * between its two e2m1 neighbours.
 *
 * FP4GEMM_ENCODE_EDEN requires FP4GEMM_HADAMARD_FP32, rng_state and e4m3_max = 256, for `row` or `column`
 * alone. The signs of the transform are hadamard_signs XOR the 16 highest bits of seed * 0x9E3779B97F4A7C15
 * mod 2^64. Codes are rounded to nearest. With z_i = x_i * e and q_i the value of its code,
 *
 *     s    = e4m3( min(a * (S * 0.1646875), FLT_MAX) )
 *     c    = min(s * (sum z_i * z_i / sum z_i * q_i), 448) , or 0 where s is 0
 *     scale = e4m3(c), stochastically: floor((bits of fp32 c * 2^-120 + low 20 bits of the draw) / 2^20)
 *
 * Each sum is folded by halves: terms 8 apart are added first, then 4, 2 and 1. The low 20 bits are those of
 * the first word of the draw of the block, as for stochastic rounding.
 *
 * Groups, `row`: group g has rows offs[g-1] .. offs[g]-1 of x. Its scales begin at the next multiple of 128
 * rows of the scale buffer, which has fp4gemm_grouped_scale_rows rows. Tensor scaling treats each group as a
 * tensor of its own. Rows from offs[num_groups - 1] on get codes and amax of zero. The ends must ascend
 * within 0..m. They are not checked, but no value of theirs makes a kernel leave the buffers.
 *
 * Groups, `column`: x^T has fp4gemm_grouped_columns(m, num_groups) columns. The columns of each group begin
 * at the next multiple of 64. Columns that hold no row are zero, and so are their scales, which have the
 * ordinary swizzled layout of such a matrix. Each group has A of its own, one per row of x^T or one, which is
 * 0 for a group without rows. `row` and `column` in one call are the results of the two calls for one each.
 *
 * Residual channels c: columns k + j of `row` are the codes, scales or decoded values of the errors
 *
 *     d[i, j] = x[i, c[j]] - q * ((s * A) * (1 / (6 B)))
 *
 * with the value q of the code and the block scale s of element (i, c[j]), cast in blocks of 16 as x is, with
 * the same A. Each operation rounds once to fp32. The error of a number outside of 0..k - 1 is 0; the numbers
 * are not checked otherwise. Only with blocks along k of one row, without groups, x_rows, Hadamard,
 * stochastic rounding, `column` and fp8.
 *
 * FP8 cast, where row.fp8 is given: one scale for each row,
 *
 *     code = e4m3( x * e ) ,  e = min(448 / A, FLT_MAX), or 1 where A is 0 or infinite
 *
 * with the same roundings; a NaN element becomes 0x7F. It represents x ~ code * A / 448. Within each 64
 * elements of a row, byte 32 w + 16 h + 4 q + b is the code of element 16 q + 8 w + 4 h + b (w and h are 0 or
 * 1, q and b 0 to 3): 4 bytes each, transposed as a 4 x 4 matrix, which is the order in which Hopper's
 * kernels multiply. Rows from offs[num_groups - 1] on get codes and amax of zero.
 *
 * Not supported: block_rows = 16 with row scaling, groups, Hadamard, stochastic rounding or another encode
 * than that of TE; four over six with Hadamard, stochastic rounding or another encode; Hadamard on `row`
 * together with `column`. */
FP4GEMM_API fp4gemm_status_t fp4gemm_quantize(const fp4gemm_quantize_args_t* args, int device,
                                              fp4gemm_stream_t stream);

/* Rows of the scale buffer of m rows in num_groups groups: enough for all group ends, a multiple of 128. */
FP4GEMM_API int64_t fp4gemm_grouped_scale_rows(int64_t m, int num_groups);

typedef struct fp4gemm_silu_and_mul_quantize_args {
  size_t struct_size;
  int64_t m, k;            /* of the result */
  const void* x;           /* (m, 2k): gate in the first k columns, up in the last k; 16-byte aligned */
  int64_t x_row_stride;    /* elements; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t x_dtype; /* FP4GEMM_BF16 or FP4GEMM_FP16 */
  uint8_t* codes;          /* this and the following as in fp4gemm_quantize with row scaling */
  uint8_t* scales;
  float* amax;
  const int32_t* offs;
  int num_groups;
  void* decoded; /* this and the following as in fp4gemm_quantized_t; at most one of them is given */
  uint8_t* fp8;
} fp4gemm_silu_and_mul_quantize_args_t;

static inline fp4gemm_silu_and_mul_quantize_args_t fp4gemm_silu_and_mul_quantize_args_init(void) {
  fp4gemm_silu_and_mul_quantize_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}
#define FP4GEMM_SILU_AND_MUL_QUANTIZE_ARGS_INIT fp4gemm_silu_and_mul_quantize_args_init()

/* fp4gemm_quantize, with row scaling, of y = cast(cast(gate / (1 + exp(-gate))) * up); casts are to the type
 * of x. */
FP4GEMM_API fp4gemm_status_t fp4gemm_silu_and_mul_quantize(const fp4gemm_silu_and_mul_quantize_args_t* args,
                                                           int device, fp4gemm_stream_t stream);

typedef struct fp4gemm_rms_norm_quantize_args {
  size_t struct_size;
  int64_t m, k;            /* k at most 65536 */
  const void* x;           /* (m, k), 16-byte aligned */
  int64_t x_row_stride;    /* elements; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t x_dtype; /* FP4GEMM_BF16 or FP4GEMM_FP16 */
  const void* weight;      /* (k) of the type of x, 16-byte aligned, or NULL */
  const void* residual;    /* (m, k) contiguous, of the type of x, 16-byte aligned, or NULL */
  void*
      sum; /* out (m, k) contiguous: cast(x + residual); NULL if and only if residual is. May be residual. */
  float epsilon;
  uint8_t* codes; /* this and the following as in fp4gemm_quantize with row scaling */
  uint8_t* scales;
  float* amax;
  void* decoded; /* this and the following as in fp4gemm_quantized_t; at most one of them is given */
  uint8_t* fp8;
} fp4gemm_rms_norm_quantize_args_t;

static inline fp4gemm_rms_norm_quantize_args_t fp4gemm_rms_norm_quantize_args_init(void) {
  fp4gemm_rms_norm_quantize_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.epsilon = 1e-6f;
  return args;
}
#define FP4GEMM_RMS_NORM_QUANTIZE_ARGS_INIT fp4gemm_rms_norm_quantize_args_init()

/* fp4gemm_quantize, with row scaling, of y = cast(weight * cast(h * (1 / sqrt(mean(h^2) + epsilon)))) where
 * h = cast(x + residual). The sum of squares is an fp32 sum of pairwise halves: within each block of 16
 * first, then over the blocks. */
FP4GEMM_API fp4gemm_status_t fp4gemm_rms_norm_quantize(const fp4gemm_rms_norm_quantize_args_t* args,
                                                       int device, fp4gemm_stream_t stream);

typedef struct fp4gemm_dequantize_args {
  size_t struct_size;
  int64_t m, k;          /* k a positive multiple of 16; m may be 0 */
  const uint8_t* codes;  /* (m, k/2), 16-byte aligned */
  const uint8_t* scales; /* swizzled, 16-byte aligned; or compact */
  const float* amax;     /* (m) or (1), see scaling */
  fp4gemm_scaling_t scaling;
  int e4m3_max;           /* 448 or 256 */
  int scales_are_compact; /* scales: (m, k/16) in plain order */
  const int32_t* offs;    /* groups as in fp4gemm_quantize, amax (m); or NULL */
  int num_groups;
  void* y; /* out (m, k) contiguous, 16-byte aligned */
  fp4gemm_dtype_t y_dtype;
} fp4gemm_dequantize_args_t;

static inline fp4gemm_dequantize_args_t fp4gemm_dequantize_args_init(void) {
  fp4gemm_dequantize_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.scaling = FP4GEMM_SCALING_ROW;
  args.e4m3_max = 448;
  args.y_dtype = FP4GEMM_FP32;
  return args;
}
#define FP4GEMM_DEQUANTIZE_ARGS_INIT fp4gemm_dequantize_args_init()

/* y = cast( q * ((s * amax) * (1 / (6 * e4m3_max))) ). Each operation rounds once to fp32. Rows outside of
 * all groups become zero. */
FP4GEMM_API fp4gemm_status_t fp4gemm_dequantize(const fp4gemm_dequantize_args_t* args, int device,
                                                fp4gemm_stream_t stream);

/* The element types of MXFP8. */
typedef enum fp4gemm_fp8 { FP4GEMM_E4M3 = 0, FP4GEMM_E5M2 = 1 } fp4gemm_fp8_t;

typedef struct fp4gemm_mxfp8_args {
  size_t struct_size;
  int64_t m, k;          /* of x or y; k is a positive multiple of 32, and so is m if is_transposed without
                            groups */
  const void* x;         /* quantize: in (m, k), 16-byte aligned */
  int64_t x_row_stride;  /* quantize: elements; rows must start on 16-byte boundaries */
  void* y;               /* dequantize: out (m, k) contiguous, 16-byte aligned */
  fp4gemm_dtype_t dtype; /* of x or y */
  int is_transposed;     /* quantize: blocks along m; values (k, m) and scales are those of x^T */
  fp4gemm_fp8_t fp8;
  uint8_t* values; /* (m, k), 16-byte aligned; written by quantize, read by dequantize */
  uint8_t* scales; /* e8m0, one per 32, swizzled as the scales of NVFP4 with k/32 in place of k/16, or compact
                      (m, k/32) */
  int scales_are_compact;
  const int32_t* offs; /* (num_groups) cumulative ends of groups of rows of x or y, on the device; NULL: no
                          groups. Only with swizzled scales */
  int num_groups;
} fp4gemm_mxfp8_args_t;

static inline fp4gemm_mxfp8_args_t fp4gemm_mxfp8_args_init(void) {
  fp4gemm_mxfp8_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}
#define FP4GEMM_MXFP8_ARGS_INIT fp4gemm_mxfp8_args_init()

/* MXFP8 quantization: scale = the least power of two >= max |x| / 448 (57344 for e5m2), value = fp8(x /
 * scale). The maximum ignores NaN, and a NaN element stays NaN; infinity saturates.
 *
 * Groups: group g has rows offs[g-1] .. offs[g]-1 of x. Its scales begin at the next multiple of 128 rows of
 * the scale buffer, which has fp4gemm_grouped_scale_rows(m, num_groups) rows; values of rows from
 * offs[num_groups - 1] on are zero. With is_transposed, values and scales are those of x^T, which has
 * fp4gemm_grouped_scale_rows(m, num_groups) columns: the columns of each group begin at the next multiple of
 * 128, and columns that hold no row are zero. The ends must ascend within 0..m. They are not checked, but no
 * value of theirs makes a kernel leave the buffers. */
FP4GEMM_API fp4gemm_status_t fp4gemm_mxfp8_quantize(const fp4gemm_mxfp8_args_t* args, int device,
                                                    fp4gemm_stream_t stream);

/* y = cast(value * scale). Rows outside of all groups become zero. */
FP4GEMM_API fp4gemm_status_t fp4gemm_mxfp8_dequantize(const fp4gemm_mxfp8_args_t* args, int device,
                                                      fp4gemm_stream_t stream);

/* How the scale of a block of MXFP4 follows from its largest magnitude: the power of two of the magnitude
 * over that of 4, which is the rule of the OCP specification; or the least power of two >= magnitude / 6, for
 * which no element saturates. */
typedef enum fp4gemm_mxfp4_scale { FP4GEMM_MXFP4_FLOOR = 0, FP4GEMM_MXFP4_CEIL = 1 } fp4gemm_mxfp4_scale_t;

typedef struct fp4gemm_mxfp4_args {
  size_t struct_size;
  int64_t m, k;          /* of x or y; k is a positive multiple of 32, and so is m if is_transposed without
                            groups */
  const void* x;         /* quantize: in (m, k), 16-byte aligned */
  int64_t x_row_stride;  /* quantize: elements; rows must start on 16-byte boundaries */
  void* y;               /* dequantize: out (m, k) contiguous, 16-byte aligned */
  fp4gemm_dtype_t dtype; /* of x or y */
  int is_transposed;     /* quantize: blocks along m; codes (k, m/2) and scales are those of x^T */
  fp4gemm_mxfp4_scale_t scale; /* quantize */
  uint8_t*
      codes; /* (m, k/2), 16-byte aligned, low nibble = even k; written by quantize, read by dequantize */
  uint8_t* scales; /* as of fp4gemm_mxfp8_args_t */
  int scales_are_compact;
  const int32_t* offs; /* as of fp4gemm_mxfp8_args_t */
  int num_groups;
} fp4gemm_mxfp4_args_t;

static inline fp4gemm_mxfp4_args_t fp4gemm_mxfp4_args_init(void) {
  fp4gemm_mxfp4_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}
#define FP4GEMM_MXFP4_ARGS_INIT fp4gemm_mxfp4_args_init()

/* MXFP4 quantization: the scale of a block by args->scale, code = e2m1(x / scale), nearest even and
 * saturating. A block with a NaN or an infinity gets the scale 255, NaN, and codes 0. Groups: as of
 * fp4gemm_mxfp8_quantize. */
FP4GEMM_API fp4gemm_status_t fp4gemm_mxfp4_quantize(const fp4gemm_mxfp4_args_t* args, int device,
                                                    fp4gemm_stream_t stream);

/* y = cast(value * scale). Rows outside of all groups become zero. */
FP4GEMM_API fp4gemm_status_t fp4gemm_mxfp4_dequantize(const fp4gemm_mxfp4_args_t* args, int device,
                                                      fp4gemm_stream_t stream);

/* y = q * s in fp16, which is exact (|y| <= 2688). y is (m, k), contiguous and 16-byte aligned. It is an
 * operand of FP4GEMM_FORMAT_FP16: GEMMs on devices without FP4 tensor cores need not decode a weight that was
 * decoded here once. */
FP4GEMM_API fp4gemm_status_t fp4gemm_decode(int64_t m, int64_t k, const uint8_t* codes, const uint8_t* scales,
                                            void* y, int device, fp4gemm_stream_t stream);

/* ---- prepacked weights, for devices without FP4 tensor cores ---- */

/* Bytes of one (n, k) weight in the order in which Hopper's kernels stream it: 2304 for every 64 x 64
 * elements begun, which is 0.5625 per element if n and k are multiples of 64. k is a multiple of 16. */
FP4GEMM_API int64_t fp4gemm_prepacked_bytes(int64_t n, int64_t k);

/* Rearranges num_matrices weights (n, k), codes and swizzled scales one matrix after the other, into
 * num_matrices * fp4gemm_prepacked_bytes bytes of `packed` (cpp/cutlass_evt/mainloop/nvfp4_packing.hpp has
 * the layout). fp4gemm_unprepack restores every byte. Pointers are 16-byte aligned. The layout may change
 * with the version of this library: store and exchange the codes and scales instead.
 *
 * With b_is_constant, fp4gemm_gemm reads prepacked weights while the previous kernel on the stream still
 * runs, before griddepcontrol.wait, after which alone CUDA guarantees that the previous kernel's writes are
 * visible. The promise holds right after this call, which ends with an empty kernel of an ordinary launch:
 * one such launch after the kernel that writes B suffices. It also holds after cudaMemcpyAsync and
 * cudaMemsetAsync, and after any kernel that was itself complete: an event of another stream, a
 * synchronisation or an ordinary launch came after it. It is broken if the previous kernel itself writes B.
 */
FP4GEMM_API fp4gemm_status_t fp4gemm_prepack(int num_matrices, int64_t n, int64_t k, const uint8_t* codes,
                                             const uint8_t* scales, void* packed, int device,
                                             fp4gemm_stream_t stream);

/* The inverse of fp4gemm_prepack; the padding of the scales becomes zero. */
FP4GEMM_API fp4gemm_status_t fp4gemm_unprepack(int num_matrices, int64_t n, int64_t k, const void* packed,
                                               uint8_t* codes, uint8_t* scales, int device,
                                               fp4gemm_stream_t stream);

/* The same three functions for weights that are multiplied by tokens in e4m3: 4608 bytes for every 64 rows
 * and 128 of k begun (cpp/cutlass_evt/mainloop/nvfp4_fp8_packing.hpp has the layout); k is a multiple of
 * 64. */
FP4GEMM_API int64_t fp4gemm_prepacked_fp8_bytes(int64_t n, int64_t k);
FP4GEMM_API fp4gemm_status_t fp4gemm_prepack_fp8(int num_matrices, int64_t n, int64_t k, const uint8_t* codes,
                                                 const uint8_t* scales, void* packed, int device,
                                                 fp4gemm_stream_t stream);
FP4GEMM_API fp4gemm_status_t fp4gemm_unprepack_fp8(int num_matrices, int64_t n, int64_t k, const void* packed,
                                                   uint8_t* codes, uint8_t* scales, int device,
                                                   fp4gemm_stream_t stream);

/* ---- GEMM ---- */

typedef struct fp4gemm_operand {
  const void* data;   /* 16-byte aligned */
  const void* scales; /* 16-byte aligned; NULL unless the format is FP4GEMM_FORMAT_NVFP4 */
  fp4gemm_format_t format;
} fp4gemm_operand_t;

/* An fp32 multiplier or addend: a vector (numel is the length of that side of D), one number (numel 1) or
 * absent (data NULL, numel and group_stride 0). In a grouped GEMM the numbers of group g+1 begin group_stride
 * numbers after those of group g; 0: all groups share them. In a dense GEMM group_stride is 0. */
typedef struct fp4gemm_vector {
  const float* data;
  int64_t numel;
  int64_t group_stride;
} fp4gemm_vector_t;

/* act(z). Each function consists of single fp32 operations that round to nearest even, so that every backend
 * gives the same bits:
 *     exp2(t): n = round(t), f = t - n, 2^n * (1 + f (c1 + f (c2 + ... f c6)))   within 1e-7 of 2^t
 *     e(u) = exp2(min(max(-u, -87), 87) * log2(e))
 * Where -u is beyond 87, SiLU and both GELUs of a very negative z give z / (1 + exp(87)), about 1.6e-38 z, in
 * place of a number that is closer to 0. The tail of GELU for z below -5.5 is right absolutely, not
 * relatively.
 */
typedef enum fp4gemm_activation {
  FP4GEMM_ACTIVATION_NONE = 0,
  FP4GEMM_ACTIVATION_SILU = 1,      /* z / (1 + e(z)) */
  FP4GEMM_ACTIVATION_GELU_TANH = 2, /* z / (1 + e(u)), u = z (1.5957691 + 0.071354814 (z z)) */
  FP4GEMM_ACTIVATION_RELU2 = 3,     /* max(z, 0)^2 */
  /* Gated: D[i,j] = cast( silu(z[i,2j]) * z[i,2j+1] ). Gate and up are interleaved rows of B, and D has n/2
   * columns. D is bf16 or fp16, n is a multiple of 16, C is absent, and groups are ragged in m. */
  FP4GEMM_ACTIVATION_SWIGLU = 4,
  /* z / (1 + e(u)), u = z (g0 + s (g1 + s (g2 + ... s g8))), s = min(z z, 30.25): within 3e-7 max(1, |z|) of
   * 0.5 z (1 + erf(z / sqrt(2))). The coefficients are 1.59577537, 0.0726476759, -4.65867997e-05,
   * -0.000118352342, 9.45786996e-06, -4.16529645e-07, 1.10171632e-08, -1.63144137e-10, 1.03947591e-12 */
  FP4GEMM_ACTIVATION_GELU = 5,
  /* Gated as FP4GEMM_ACTIVATION_SWIGLU, with z' = z[i,2j] and z" = z[i,2j+1].
   * SWIGLU_OAI, of GPT-OSS: g / (1 + e(1.702 g)) * (1 + min(max(z", -7), 7)), g = min(z', 7)
   * GEGLU_TANH: gelu_tanh(z') * z"
   * SWIGLU_LIMIT10, of DeepSeek-V4: silu(min(z', 10)) * min(max(z", -10), 10) */
  FP4GEMM_ACTIVATION_SWIGLU_OAI = 6,
  FP4GEMM_ACTIVATION_GEGLU_TANH = 7,
  FP4GEMM_ACTIVATION_SWIGLU_LIMIT10 = 8
} fp4gemm_activation_t;

/* What the library knows of an activation, so that callers need no table of their own. */
typedef struct fp4gemm_activation_info {
  fp4gemm_activation_t activation;
  const char* name; /* "none", "silu", "gelu_tanh", ... */
  int is_gated;     /* 1: D has n/2 columns, and a kernel with a gated epilogue computes it */
} fp4gemm_activation_info_t;

/* The activations, in ascending order of their numbers. */
FP4GEMM_API int fp4gemm_activation_count(void);
FP4GEMM_API fp4gemm_status_t fp4gemm_activation_info(int index, fp4gemm_activation_info_t* info);

/* Which size differs from group to group in a grouped GEMM.
 *
 * M (the experts of a mixture): group g multiplies rows offs[g-1] .. offs[g]-1 of A (m, k) by B[g] of
 *   (num_groups, n, k) and writes the same rows of D (m, n). The scales of A are those of a quantization in
 *   groups: the scales of each group begin at the next multiple of 128 rows. The scales of each B[g] are
 *   those of an (n, k) matrix, one after the other. Rows of D from offs[num_groups - 1] on are not written.
 * K (the gradients of the weights): D is (num_groups, m, n), and D[g] is the product over the part of k that
 *   belongs to group g. A (m, k) and B (n, k) are the `column` results of quantizations in groups: group g
 * has offs[g] - offs[g-1] elements of k, padded with zeros to a multiple of 64, and k =
 * fp4gemm_grouped_columns(tokens, num_groups). D[g] of an empty group is act(bias) + beta * C: exactly zero
 * without them. */
typedef enum fp4gemm_ragged { FP4GEMM_RAGGED_M = 0, FP4GEMM_RAGGED_K = 1 } fp4gemm_ragged_t;

/* The size along m of a `column` quantization of m rows in num_groups groups: enough for all group ends, a
 * multiple of 64. */
FP4GEMM_API int64_t fp4gemm_grouped_columns(int64_t m, int num_groups);

/* Whether fp4gemm_gemm quantizes A itself, and how many amax values it measures. */
typedef enum fp4gemm_quantize_a {
  FP4GEMM_QUANTIZE_A_NONE = 0,   /* A is an operand as it is */
  FP4GEMM_QUANTIZE_A_ROW = 1,    /* one for each row */
  FP4GEMM_QUANTIZE_A_TENSOR = 2, /* one for all rows, or for the rows of each group */
  FP4GEMM_QUANTIZE_A_FP8 = 3     /* one for each row, and A becomes FP4GEMM_FORMAT_E4M3 */
} fp4gemm_quantize_a_t;

/* A GEMM, dense (num_groups 0) or grouped. */
typedef struct fp4gemm_gemm_args {
  size_t struct_size;
  int64_t m, n, k; /* k is a positive multiple of 32, and of 64 with A in e4m3 or FP4GEMM_QUANTIZE_A_FP8;
                      ragged in k: a multiple of 64, which may be 0. Rows of D are multiples of 16 bytes. m
                      and n may be 0 */
  int num_groups;  /* 0: a dense GEMM, without ragged, offs and alpha_groups */
  fp4gemm_ragged_t ragged;
  const int32_t* offs; /* (num_groups) cumulative ends of the groups, on the device. They must ascend within
                          0..m (or the rows that were quantized, ragged in k). They are not checked, but no
                          value of theirs makes a kernel leave the buffers */
  fp4gemm_operand_t a, b;
  int b_is_constant; /* 1: a promise that the bytes of B were complete before the previous kernel on the
                        stream began. A dense kernel then reads prepacked weights while that kernel still
                        runs. See fp4gemm_prepack */
  fp4gemm_vector_t alpha_row; /* numel m or 1; ragged in m: indexed by row of A, group_stride 0 */
  fp4gemm_vector_t alpha_col; /* numel n or 1 */
  float alpha;                /* a host number, the same for all groups */
  const float* alpha_groups;  /* (num_groups) on the device, in place of alpha; or NULL */
  fp4gemm_vector_t bias;      /* numel n */
  fp4gemm_activation_t activation;
  const void* c;        /* like d, of out_dtype, 16-byte aligned; may be d; or NULL */
  int64_t c_row_stride; /* elements, as d_row_stride; 0 without c */
  float beta;
  void* d; /* out (m, n), 16-byte aligned; every element is written, nothing else. A d that overlaps
              what the call reads, but for c where that is d itself, is refused */
  int64_t d_row_stride; /* elements, at least n; rows must start on 16-byte boundaries. Ragged in k: D[g+1]
                           begins m * d_row_stride elements after D[g] */
  fp4gemm_dtype_t out_dtype;
  int batch_invariant; /* 1: select the kernel by n and k alone, so that the bits of a row of D do not depend
                          on the rows beside it */
  int use_fast_accum;  /* with A in e4m3: 0 adds the accumulators of the tensor cores, which have about 14
                          bits, to fp32 sums after at most 256 of k; 1 may keep them there for all of k */
  const char* kernel;  /* the name of a kernel to force, or NULL to let the library select one */
  /* Not NONE: a.data is (m, k) in FP4GEMM_FORMAT_BF16, FP16 or FP32, with a.scales NULL, and the call first
   * quantizes it as fp4gemm_quantize does with the defaults of its options: FP8 as it fills row.fp8, the
   * others as it fills row.codes. The bits of D are those of the two calls. The amax takes the place of
   * alpha_row, which is absent, so alpha is to be 1 / (36 * 448 * e4m3_max of B), with FP8 1 / (448 * 6 *
   * e4m3_max of B). Not for groups that are ragged in k. */
  fp4gemm_quantize_a_t quantize_a;
  int64_t a_row_stride; /* with quantize_a, in elements: rows start on 16-byte boundaries; 0: k */
  /* With FP4GEMM_QUANTIZE_A_ROW or _FP8: NULL, or (m) on the device. Row i of A is then row a_rows[i] of
   * a.data, which has a_num_rows rows; an index outside of 0..a_num_rows-1 gives a row of zeros. */
  const int32_t* a_rows;
  int64_t a_num_rows; /* 0 without a_rows */
} fp4gemm_gemm_args_t;

static inline fp4gemm_gemm_args_t fp4gemm_gemm_args_init(void) {
  fp4gemm_gemm_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.alpha = 1.0f;
  args.beta = 1.0f;
  return args;
}
#define FP4GEMM_GEMM_ARGS_INIT fp4gemm_gemm_args_init()

/* Bytes of workspace that fp4gemm_gemm needs for these arguments on this device; 0 is a possible answer. The
 * data pointers are not used; only offs, c and a_rows must be null or not as in the call, and a grouped query
 * without offs is refused. Kernels that multiply fp16 operands need room for each NVFP4 operand in fp16;
 * kernels that stream prepacked weights need room for an NVFP4 B in prepacked form and for partial sums;
 * quantize_a needs room for its result. */
FP4GEMM_API fp4gemm_status_t fp4gemm_gemm_workspace_bytes(const fp4gemm_gemm_args_t* args, int device,
                                                          size_t* bytes);

/* The GEMM above; a grouped one computes every group in one GEMM launch. The group ends are read on the
 * device alone, so that a captured graph may be replayed with other ends. workspace: at least that many
 * bytes, 256-byte aligned, in use until the stream has passed this call; its contents need no initialisation
 * and are undefined afterwards. */
FP4GEMM_API fp4gemm_status_t fp4gemm_gemm(const fp4gemm_gemm_args_t* args, void* workspace,
                                          size_t workspace_bytes, int device, fp4gemm_stream_t stream);

/* ---- mixtures of experts ---- */

typedef struct fp4gemm_route_args {
  size_t struct_size;
  int64_t num_tokens;    /* t; t * top_k is at most INT32_MAX */
  int top_k;             /* slots of a token, at least 1 */
  int num_experts;       /* 1 to 2048 */
  const void* topk_ids;  /* (t, top_k) int32_t or int64_t: the expert of each slot */
  int ids_are_64_bits;   /* 1: topk_ids are int64_t */
  int32_t* offs;         /* out (num_experts): offs[e] slots name an expert 0..e */
  int32_t* token_of_row; /* out (t * top_k): the token of each row, -1 from offs[num_experts - 1] on */
  int32_t* row_of_pair;  /* out (t, top_k): the row of each slot, -1 for no expert */
} fp4gemm_route_args_t;

static inline fp4gemm_route_args_t fp4gemm_route_args_init(void) {
  fp4gemm_route_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  return args;
}
#define FP4GEMM_ROUTE_ARGS_INIT fp4gemm_route_args_init()

/* Bytes of workspace that fp4gemm_route needs; 0 for a few thousand slots. The pointers are not used. */
FP4GEMM_API fp4gemm_status_t fp4gemm_route_workspace_bytes(const fp4gemm_route_args_t* args, size_t* bytes);

/* Sorts the slots of all tokens by (expert, token, slot). Each becomes a row, except for those whose id is
 * outside of 0..num_experts - 1: they name no expert. If a token names an expert twice, both slots have a
 * row. The result is the same in every run. workspace: at least that many bytes, 16-byte aligned, as in
 * fp4gemm_gemm. */
FP4GEMM_API fp4gemm_status_t fp4gemm_route(const fp4gemm_route_args_t* args, void* workspace,
                                           size_t workspace_bytes, int device, fp4gemm_stream_t stream);

typedef struct fp4gemm_combine_args {
  size_t struct_size;
  int64_t num_tokens; /* t */
  int top_k;
  int64_t num_rows; /* of y */
  int64_t d;        /* a positive multiple of 8 */
  const void* y;    /* (num_rows, d) contiguous, 16-byte aligned */
  fp4gemm_dtype_t y_dtype;
  const int32_t* row_of_pair; /* (t, top_k) */
  const void* topk_weights;   /* (t, top_k); NULL: all are 1 */
  fp4gemm_dtype_t weights_dtype;
  void* out; /* out (t, d) contiguous, 16-byte aligned */
  fp4gemm_dtype_t out_dtype;
} fp4gemm_combine_args_t;

static inline fp4gemm_combine_args_t fp4gemm_combine_args_init(void) {
  fp4gemm_combine_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  args.weights_dtype = FP4GEMM_FP32;
  return args;
}
#define FP4GEMM_COMBINE_ARGS_INIT fp4gemm_combine_args_init()

/* out[i] = cast(s) with s = 0 at first, and s = s + topk_weights[i,j] * y[row_of_pair[i,j]] for ascending j.
 * Each multiplication and addition rounds once to fp32. A slot whose row is outside of 0..num_rows - 1 is
 * skipped. */
FP4GEMM_API fp4gemm_status_t fp4gemm_combine(const fp4gemm_combine_args_t* args, int device,
                                             fp4gemm_stream_t stream);

/* ---- the architectures and the kernel table ---- */

/* A GPU architecture that this build has GEMM kernels for. */
typedef struct fp4gemm_architecture_info {
  int arch;            /* as in fp4gemm_kernel_info_t */
  const char* devices; /* the compute capabilities that its kernels serve, such as "10.0 10.3" */
  int is_executed;     /* 1: this project has executed its kernels on such hardware; 0: it has not */
} fp4gemm_architecture_info_t;

/* GEMM architectures in this build. */
FP4GEMM_API int fp4gemm_architecture_count(void);
FP4GEMM_API fp4gemm_status_t fp4gemm_architecture_info(int index, fp4gemm_architecture_info_t* info);

/* The arch of the GEMM kernels of this build that serve a device of compute capability device_arch (10*major
 * + minor), or -1 if none does. */
FP4GEMM_API int fp4gemm_kernel_arch(int device_arch);

typedef struct fp4gemm_kernel_info {
  const char* name;           /* "sm100_dense_256x128x256_c2x1_rowcol_bf16" */
  const char* mode;           /* "dense" or "grouped" */
  const char* epilogue;       /* "rowcol": the formula above; "gated": the same with a gated activation */
  int arch;                   /* the architecture that it was compiled for, such as 90 or 100 */
  int tile_m, tile_n, tile_k; /* of D, and of the contraction */
  int cluster_m, cluster_n;
  fp4gemm_dtype_t out_dtype;
  const char* operand; /* what it reads: "nvfp4"; "fp16"; or "prepacked": B prepacked, A in fp16 or, with
                          "prepacked_bf16", bf16; "prepacked_fp8": B prepacked for FP8, A in e4m3.
                          Operands in another form are converted first */
  int is_swapped;      /* it multiplies B by A and writes D transposed: efficient for few rows of A */
  int fast_accum; /* of "prepacked_fp8": the sums over k stay in the accumulators of the tensor cores, for
                     use_fast_accum */
} fp4gemm_kernel_info_t;

/* GEMM kernels in this build; the table's order never changes while a process runs. */
FP4GEMM_API int fp4gemm_kernel_count(void);
FP4GEMM_API fp4gemm_status_t fp4gemm_kernel_info(int index, fp4gemm_kernel_info_t* info);

/* The index of the kernel that fp4gemm_gemm would select on a device of that compute capability (10*major +
 * minor) with that many SMs and operands in these formats, or -1 if none serves it. A pure function of its
 * arguments: no device is needed. */
FP4GEMM_API int fp4gemm_select_kernel(int arch, int num_sms, int64_t m, int64_t n, int64_t k, int num_groups,
                                      fp4gemm_ragged_t ragged, fp4gemm_dtype_t out_dtype,
                                      fp4gemm_format_t format_a, fp4gemm_format_t format_b,
                                      int batch_invariant, int use_fast_accum,
                                      fp4gemm_activation_t activation);

#ifdef __cplusplus
}
#endif

#endif /* FP4GEMM_FP4GEMM_H_ */
