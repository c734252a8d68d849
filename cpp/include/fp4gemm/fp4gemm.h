/* The C interface of fp4gemm: NVFP4 quantize, decode and dense GEMM with every scale vector in the epilogue.
 *
 * The GEMM computes, with A (m,k), B (n,k) and D (m,n) all row-major,
 *
 *     D[i,j] = cast( alpha * ( alpha_col[j] * ( alpha_row[i] * acc[i,j] ) ) + bias[j] )
 *     acc[i,j] = sum over l of  (q_a[i,l] * s_a[i,l/16]) * (q_b[j,l] * s_b[j,l/16])
 *
 * where q is an e2m1 value and s the e4m3 scale of its block of 16 along k. Every multiplication and the
 * addition round once to fp32 (to nearest even, never contracted to an FMA), in the order of the brackets;
 * the cast rounds once more. acc is an fp32 sum whose order depends on the kernel: where all partial sums fit
 * in fp32, as with Gaussian data, it is exact.
 *
 * An operand that fp4gemm_quantize made stands for  x[i,l] ~ q * s * amax[i] / (6 * e4m3_max) , so a GEMM of
 * two such operands takes alpha_row = amax of A, alpha_col = amax of B and
 * alpha = 1 / (36 * e4m3_max_a * e4m3_max_b).
 *
 * Conventions
 *
 * - Pointers are device pointers unless said otherwise. Sizes and strides are in elements unless the name
 *   says bytes.
 * - codes: (rows, k/2) bytes, two e2m1 codes a byte, low nibble = even k, rows contiguous.
 * - scales: e4m3 bytes in the 128x4 swizzled layout. With rp = rows rounded up to 128 and cp = k/16 rounded
 * up to 4 there are rp*cp bytes, and the scale of (row r, block c) lies at
 *       ((r/128) * (cp/4) + c/4) * 512  +  (r%32)*16 + ((r%128)/32)*4 + c%4 .
 *   The padding must be zero bytes; fp4gemm_quantize writes it so.
 * - `device` is a CUDA device ordinal and `stream` a stream of it. No function allocates memory, synchronises
 *   or reads an environment variable; each may be captured in a CUDA graph. All are thread-safe.
 * - Every function that can fail returns a status; fp4gemm_last_error() then holds one sentence for this
 * thread that names the argument, the value it had and the value wanted.
 * - Argument structs begin with struct_size; fill them with the FP4GEMM_*_INIT macros. A library whose struct
 *   is laid out differently refuses the call, so that nothing is misread. Before version 1.0 any minor
 * version may change them.
 */
#ifndef FP4GEMM_FP4GEMM_H_
#define FP4GEMM_FP4GEMM_H_

#include <stddef.h>
#include <stdint.h>

#define FP4GEMM_VERSION_MAJOR 0
#define FP4GEMM_VERSION_MINOR 1
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

/* The type that cudaStream_t is an alias of, so that no CUDA header is needed here. NULL is the legacy
 * default stream. */
struct CUstream_st;
typedef struct CUstream_st* fp4gemm_stream_t;

typedef enum fp4gemm_status {
  FP4GEMM_SUCCESS = 0,
  FP4GEMM_ERROR_INVALID_ARGUMENT = 1, /* an argument is wrong; nothing was launched */
  FP4GEMM_ERROR_NOT_SUPPORTED = 2,    /* no kernel of this build serves the arguments on this device */
  FP4GEMM_ERROR_WORKSPACE = 3,        /* the workspace is missing, too small or misaligned */
  FP4GEMM_ERROR_CUDA = 4              /* a CUDA call failed */
} fp4gemm_status_t;

typedef enum fp4gemm_dtype { FP4GEMM_BF16 = 0, FP4GEMM_FP16 = 1, FP4GEMM_FP32 = 2 } fp4gemm_dtype_t;

/* How many amax values a tensor has: one, or one a row (a token, or an output channel of a weight). */
typedef enum fp4gemm_scaling { FP4GEMM_SCALING_TENSOR = 0, FP4GEMM_SCALING_ROW = 1 } fp4gemm_scaling_t;

/* What a GEMM operand holds. Kernels of devices with FP4 tensor cores take NVFP4 alone. */
typedef enum fp4gemm_format {
  FP4GEMM_FORMAT_NVFP4 = 0, /* data: packed codes, scales: swizzled e4m3 */
  FP4GEMM_FORMAT_FP16 = 1   /* data: (rows, k) fp16, each value times its block scale (exact); scales: NULL */
} fp4gemm_format_t;

/* ---- errors and versions ---- */

/* "success", "invalid argument", ...; never NULL. */
FP4GEMM_API const char* fp4gemm_status_string(fp4gemm_status_t status);

/* What went wrong in this thread's last failing call; "" before the first failure. Valid until the next
 * failing call. */
FP4GEMM_API const char* fp4gemm_last_error(void);

/* FP4GEMM_VERSION of the library that is loaded, and the same as text ("0.1.0"). */
FP4GEMM_API int fp4gemm_version(void);
FP4GEMM_API const char* fp4gemm_version_string(void);

/* What the library was built with: CUDART_VERSION (0 = without CUDA), the version of the CUTLASS headers and
 * the list of architectures, as text; "" where there is none. */
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

typedef struct fp4gemm_quantize_args {
  size_t struct_size;
  int64_t m, k;         /* k a positive multiple of 16; m may be 0 */
  const void* x;        /* (m, k), 16-byte aligned */
  int64_t x_row_stride; /* elements; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t x_dtype;
  fp4gemm_scaling_t scaling;
  uint8_t* codes;  /* out (m, k/2), 16-byte aligned */
  uint8_t* scales; /* out, swizzled with zero padding, 16-byte aligned */
  float* amax;     /* out, (m) for row scaling, (1) for tensor scaling: max |x|, NaN ignored */
} fp4gemm_quantize_args_t;
#define FP4GEMM_QUANTIZE_ARGS_INIT \
  {sizeof(fp4gemm_quantize_args_t), 0, 0, NULL, 0, FP4GEMM_BF16, FP4GEMM_SCALING_ROW, NULL, NULL, NULL}

/* NVFP4 quantization, bit for bit as TransformerEngine >= 2.14 does it (1x16 blocks). With A the amax of the
 * row or of the tensor and a that of the block,
 *
 *     S    = min(2688 / A, FLT_MAX) , or 1 where that is 0
 *     s    = e4m3( min(a * (S * (1/6)), FLT_MAX) )
 *     code = e2m1( x * min(1 / (s * (1/S)), FLT_MAX) )
 *
 * each operation rounded once to fp32, e4m3 and e2m1 to nearest even and saturating. NaN elements become
 * code 7 (+6). */
FP4GEMM_API fp4gemm_status_t fp4gemm_quantize(const fp4gemm_quantize_args_t* args, int device,
                                              fp4gemm_stream_t stream);

typedef struct fp4gemm_dequantize_args {
  size_t struct_size;
  int64_t m, k;          /* k a positive multiple of 16; m may be 0 */
  const uint8_t* codes;  /* (m, k/2), 16-byte aligned */
  const uint8_t* scales; /* swizzled, 16-byte aligned */
  const float* amax;     /* (m) or (1), see scaling */
  fp4gemm_scaling_t scaling;
  int e4m3_max; /* 448 or 256 */
  void* y;      /* out (m, k) contiguous, 16-byte aligned */
  fp4gemm_dtype_t y_dtype;
} fp4gemm_dequantize_args_t;
#define FP4GEMM_DEQUANTIZE_ARGS_INIT \
  {sizeof(fp4gemm_dequantize_args_t), 0, 0, NULL, NULL, NULL, FP4GEMM_SCALING_ROW, 448, NULL, FP4GEMM_FP32}

/* y = cast( q * ((s * amax) * (1 / (6 * e4m3_max))) ), each operation rounded once to fp32. */
FP4GEMM_API fp4gemm_status_t fp4gemm_dequantize(const fp4gemm_dequantize_args_t* args, int device,
                                                fp4gemm_stream_t stream);

/* y (m, k) fp16, contiguous, 16-byte aligned: y = q * s, which fp16 holds exactly (|y| <= 2688). What
 * FP4GEMM_FORMAT_FP16 takes: decode a weight once here and the GEMMs on devices without FP4 tensor cores skip
 * that step. */
FP4GEMM_API fp4gemm_status_t fp4gemm_decode(int64_t m, int64_t k, const uint8_t* codes, const uint8_t* scales,
                                            void* y, int device, fp4gemm_stream_t stream);

/* ---- dense GEMM ---- */

typedef struct fp4gemm_operand {
  const void* data;   /* 16-byte aligned */
  const void* scales; /* 16-byte aligned; NULL for FP4GEMM_FORMAT_FP16 */
  fp4gemm_format_t format;
} fp4gemm_operand_t;

/* An fp32 multiplier: a vector (numel = m for rows, n for columns), one number (numel = 1) or absent (data
 * NULL, numel 0). */
typedef struct fp4gemm_vector {
  const float* data;
  int64_t numel;
} fp4gemm_vector_t;

typedef struct fp4gemm_dense_args {
  size_t struct_size;
  int64_t m, n, k; /* k a positive multiple of 32; rows of D a multiple of 16 bytes; m and n may be 0 */
  fp4gemm_operand_t a, b;
  fp4gemm_vector_t alpha_row; /* (m), (1) or absent */
  fp4gemm_vector_t alpha_col; /* (n), (1) or absent */
  float alpha;                /* a host number */
  const float* bias;          /* (n) or NULL */
  void* d;                    /* out (m, n), 16-byte aligned; every element is written, nothing else */
  int64_t d_row_stride;       /* elements, at least n; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t out_dtype;
  const char* kernel; /* the name of a kernel to force, or NULL to let the library select one */
} fp4gemm_dense_args_t;
#define FP4GEMM_DENSE_ARGS_INIT        \
  {sizeof(fp4gemm_dense_args_t),       \
   0,                                  \
   0,                                  \
   0,                                  \
   {NULL, NULL, FP4GEMM_FORMAT_NVFP4}, \
   {NULL, NULL, FP4GEMM_FORMAT_NVFP4}, \
   {NULL, 0},                          \
   {NULL, 0},                          \
   1.0f,                               \
   NULL,                               \
   NULL,                               \
   0,                                  \
   FP4GEMM_BF16,                       \
   NULL}

/* Bytes of workspace that fp4gemm_dense needs for these arguments on this device; the data pointers are not
 * looked at. 0 is a possible answer. Kernels that multiply fp16 need room for each
 * NVFP4 operand in fp16. */
FP4GEMM_API fp4gemm_status_t fp4gemm_dense_workspace_bytes(const fp4gemm_dense_args_t* args, int device,
                                                           size_t* bytes);

/* The GEMM above. workspace: at least that many bytes, 256-byte aligned, used until the stream has passed
 * this call; its contents need no initialisation and are undefined afterwards. */
FP4GEMM_API fp4gemm_status_t fp4gemm_dense(const fp4gemm_dense_args_t* args, void* workspace,
                                           size_t workspace_bytes, int device, fp4gemm_stream_t stream);

/* ---- the kernel table ---- */

typedef struct fp4gemm_kernel_info {
  const char* name;     /* "sm100_dense_256x128x256_c2x1_rowcol_bf16" */
  const char* mode;     /* "dense" */
  const char* epilogue; /* "rowcol": alpha * (col * (row * acc)) + bias */
  int arch;             /* 90 or 100: the family of devices that it was compiled for */
  int tile_m, tile_n, tile_k;
  int cluster_m, cluster_n;
  fp4gemm_dtype_t out_dtype;
  const char* operand; /* what it reads: "nvfp4", or "f16" (packed operands are decoded first) */
} fp4gemm_kernel_info_t;

/* GEMM kernels in this build; the table's order never changes while a process runs. */
FP4GEMM_API int fp4gemm_kernel_count(void);
FP4GEMM_API fp4gemm_status_t fp4gemm_kernel_info(int index, fp4gemm_kernel_info_t* info);

/* The index of the kernel that fp4gemm_dense would take on a device of that compute capability (10*major +
 * minor) with that many multiprocessors, or -1 if none serves it. format: FP4GEMM_FORMAT_FP16 if at least one
 * operand is decoded already. A pure function of its arguments: no device is needed. */
FP4GEMM_API int fp4gemm_select_kernel(int arch, int num_sms, int64_t m, int64_t n, int64_t k,
                                      fp4gemm_dtype_t out_dtype, fp4gemm_format_t format);

#ifdef __cplusplus
}
#endif

#endif /* FP4GEMM_FP4GEMM_H_ */
