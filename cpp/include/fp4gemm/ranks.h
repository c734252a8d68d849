/* Expert parallelism: records of quantized tokens, which travel between ranks; the rows of a rank; and the
 * weighted sums of what ranks computed. Nothing here communicates: addresses may be those of other GPUs that
 * the device can read. */
#ifndef FP4GEMM_RANKS_H_
#define FP4GEMM_RANKS_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- records ---- */

/* Bytes of a record of k elements, a multiple of 16: k/2 bytes of codes; the k/16 e4m3 block scales in plain
 * order, padded with zeros to a multiple of 4; the amax of the row, 4 bytes; and zeros. */
FP4GEMM_API int64_t fp4gemm_record_bytes(int64_t k);

typedef struct fp4gemm_quantize_records_args {
  size_t struct_size;
  int64_t m, k;         /* k is a positive multiple of 16; m may be 0 */
  const void* x;        /* (m, k), 16-byte aligned */
  int64_t x_row_stride; /* elements; rows must start on 16-byte boundaries */
  fp4gemm_dtype_t x_dtype;
  fp4gemm_four_over_six_t four_over_six; /* this and the following as in fp4gemm_quantize_args_t */
  int fast_error;
  int e4m3_max;
  const int64_t* rng_state;
  int64_t first_row; /* at least 0: row i of x uses the random numbers of row first_row + i */
  void* records;     /* out (m, fp4gemm_record_bytes(k)), 16-byte aligned */
} fp4gemm_quantize_records_args_t;

static inline fp4gemm_quantize_records_args_t fp4gemm_quantize_records_args_init(void) {
  fp4gemm_quantize_records_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.e4m3_max = 448;
  return args;
}
#define FP4GEMM_QUANTIZE_RECORDS_ARGS_INIT fp4gemm_quantize_records_args_init()

/* The records of the rows of x, as fp4gemm_quantize with row scaling and FP4GEMM_ENCODE_TE quantizes them.
 * Four over six excludes stochastic rounding. */
FP4GEMM_API fp4gemm_status_t fp4gemm_quantize_records(const fp4gemm_quantize_records_args_t* args, int device,
                                                      fp4gemm_stream_t stream);

typedef struct fp4gemm_make_records_args {
  size_t struct_size;
  int64_t m, k;          /* k is a positive multiple of 16; m may be 0 */
  const uint8_t* codes;  /* (m, k/2), 16-byte aligned */
  const uint8_t* scales; /* swizzled, 16-byte aligned */
  const float* amax;     /* (m) */
  void* records;         /* out (m, fp4gemm_record_bytes(k)), 16-byte aligned */
} fp4gemm_make_records_args_t;

static inline fp4gemm_make_records_args_t fp4gemm_make_records_args_init(void) {
  fp4gemm_make_records_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  return args;
}
#define FP4GEMM_MAKE_RECORDS_ARGS_INIT fp4gemm_make_records_args_init()

/* The records of rows that fp4gemm_quantize or a producer quantized with row scaling and without groups. */
FP4GEMM_API fp4gemm_status_t fp4gemm_make_records(const fp4gemm_make_records_args_t* args, int device,
                                                  fp4gemm_stream_t stream);

typedef struct fp4gemm_gather_records_args {
  size_t struct_size;
  int64_t m, k;               /* of the result; k is a positive multiple of 16; m may be 0 */
  const void* const* records; /* (num_buffers) on the host: buffers of num_records records each, 16-byte
                                 aligned. Record r of buffer p has the number p * num_records + r */
  int num_buffers;            /* 1 to 128 */
  int64_t num_records;
  const int32_t* rows; /* (m) on the device: the number of the record of each row. One outside of all records
                          gives a row of zeros */
  const int32_t* offs; /* (num_groups) cumulative ends of groups of rows, on the device */
  int num_groups;
  uint8_t* codes;  /* this and the following as of fp4gemm_quantize with groups: out (m, k/2) */
  uint8_t* scales; /* out, fp4gemm_grouped_scale_rows(m, num_groups) rows, swizzled with zero padding */
  float* amax;     /* out (m) */
} fp4gemm_gather_records_args_t;

static inline fp4gemm_gather_records_args_t fp4gemm_gather_records_args_init(void) {
  fp4gemm_gather_records_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.num_buffers = 1;
  return args;
}
#define FP4GEMM_GATHER_RECORDS_ARGS_INIT fp4gemm_gather_records_args_init()

/* The rows of groups, from records: what fp4gemm_quantize with x_rows and offs makes of the tokens. Rows from
 * offs[num_groups - 1] on get codes and amax of zero. The ends are not checked, but no value of theirs makes
 * a kernel leave the buffers. */
FP4GEMM_API fp4gemm_status_t fp4gemm_gather_records(const fp4gemm_gather_records_args_t* args, int device,
                                                    fp4gemm_stream_t stream);

/* ---- the rows of a rank ---- */

typedef struct fp4gemm_route_ranks_args {
  size_t struct_size;
  int64_t num_tokens;    /* of all ranks; num_tokens * top_k is at most INT32_MAX */
  int top_k;             /* slots of a token, at least 1 */
  int num_experts;       /* 1 to 2048, a multiple of num_ranks: rank r has num_experts / num_ranks of them */
  int num_ranks;         /* 1 to 128 */
  int rank;              /* 0 to num_ranks - 1 */
  int64_t capacity;      /* rows of each rank, at least 1; num_ranks * capacity is at most INT32_MAX */
  const void* topk_ids;  /* (num_tokens, top_k) int32_t or int64_t: the expert of each slot */
  int ids_are_64_bits;   /* 1: topk_ids are int64_t */
  int32_t* offs;         /* out (num_experts / num_ranks): the ends of the rows of the rank's experts */
  int32_t* token_of_row; /* out (capacity): the token of each row of the rank, -1 behind the last one */
  int32_t* slot_of_row;  /* out (capacity): the slot of each row, -1 behind the last one */
  int32_t* row_of_pair;  /* out (num_tokens, top_k): rank * capacity + row for each slot, -1 for none */
  int32_t* status;       /* out (2): the most rows that a rank needs; 1 if an id is outside of
                            -1..num_experts - 1, else 0 */
} fp4gemm_route_ranks_args_t;

static inline fp4gemm_route_ranks_args_t fp4gemm_route_ranks_args_init(void) {
  fp4gemm_route_ranks_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  args.num_ranks = 1;
  args.capacity = 1;
  return args;
}
#define FP4GEMM_ROUTE_RANKS_ARGS_INIT fp4gemm_route_ranks_args_init()

/* Bytes of workspace that fp4gemm_route_ranks needs; 0 for a few thousand slots. The pointers are not used.
 */
FP4GEMM_API fp4gemm_status_t fp4gemm_route_ranks_workspace_bytes(const fp4gemm_route_ranks_args_t* args,
                                                                 size_t* bytes);

/* fp4gemm_route of the tokens of all ranks, and the part of one rank: the rows of its experts, numbered from
 * 0. Rows from capacity on are dropped; status[0] > capacity says that there are some. workspace: as for
 * fp4gemm_route. */
FP4GEMM_API fp4gemm_status_t fp4gemm_route_ranks(const fp4gemm_route_ranks_args_t* args, void* workspace,
                                                 size_t workspace_bytes, int device, fp4gemm_stream_t stream);

/* ---- weighted sums ---- */

typedef struct fp4gemm_combine_ranks_args {
  size_t struct_size;
  int64_t num_tokens; /* t */
  int top_k;
  int64_t d;            /* a positive multiple of 8 */
  const void* const* y; /* (num_buffers) on the host: buffers of (num_rows, d), contiguous, 16-byte aligned.
                           Row r of buffer p has the number p * num_rows + r */
  int num_buffers;      /* 1 to 128 */
  int64_t num_rows;
  fp4gemm_dtype_t y_dtype;
  const int32_t* row_of_pair; /* (t, top_k) */
  const void* topk_weights;   /* (t, top_k); NULL: all are 1 */
  fp4gemm_dtype_t weights_dtype;
  void* out; /* out (t, d) contiguous, 16-byte aligned */
  fp4gemm_dtype_t out_dtype;
} fp4gemm_combine_ranks_args_t;

static inline fp4gemm_combine_ranks_args_t fp4gemm_combine_ranks_args_init(void) {
  fp4gemm_combine_ranks_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  args.num_buffers = 1;
  args.weights_dtype = FP4GEMM_FP32;
  return args;
}
#define FP4GEMM_COMBINE_RANKS_ARGS_INIT fp4gemm_combine_ranks_args_init()

/* fp4gemm_combine of the rows of all buffers, with the numbers that fp4gemm_route_ranks gives them. */
FP4GEMM_API fp4gemm_status_t fp4gemm_combine_ranks(const fp4gemm_combine_ranks_args_t* args, int device,
                                                   fp4gemm_stream_t stream);

typedef struct fp4gemm_combine_part_args {
  size_t struct_size;
  int64_t num_tokens; /* of all ranks */
  int top_k;
  int num_experts; /* a multiple of 8 */
  int num_ranks;   /* 1, 2, 4 or 8 */
  int rank;
  int64_t num_rows; /* of y: the capacity of fp4gemm_route_ranks; num_ranks * num_rows is at most INT32_MAX */
  int64_t d;        /* a positive multiple of 8 */
  const void* y;    /* (num_rows, d) contiguous, 16-byte aligned: what the experts of the rank computed */
  fp4gemm_dtype_t y_dtype;
  const void* topk_ids; /* (num_tokens, top_k) int32_t or int64_t */
  int ids_are_64_bits;
  const int32_t* row_of_pair; /* (num_tokens, top_k), as of fp4gemm_route_ranks */
  const void* topk_weights;   /* (num_tokens, top_k); NULL: all are 1 */
  fp4gemm_dtype_t weights_dtype;
  void* part; /* out (num_tokens, d) contiguous, 16-byte aligned */
  fp4gemm_dtype_t part_dtype;
} fp4gemm_combine_part_args_t;

static inline fp4gemm_combine_part_args_t fp4gemm_combine_part_args_init(void) {
  fp4gemm_combine_part_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  args.num_ranks = 1;
  args.weights_dtype = FP4GEMM_FP32;
  args.part_dtype = FP4GEMM_FP32;
  return args;
}
#define FP4GEMM_COMBINE_PART_ARGS_INIT fp4gemm_combine_part_args_init()

/* The experts are eight blocks of num_experts / 8. P(b, b + 1) = rnd(s), where s is the sum of
 * fp4gemm_combine over the slots whose expert is in block b, and P(b, b + 2 n) = rnd(P(b, b + n) +
 * P(b + n, b + 2 n)), added in fp32, with rnd the rounding to part_dtype. The part of a rank is
 * P(8 rank / num_ranks, 8 (rank + 1) / num_ranks). */
FP4GEMM_API fp4gemm_status_t fp4gemm_combine_part(const fp4gemm_combine_part_args_t* args, int device,
                                                  fp4gemm_stream_t stream);

typedef struct fp4gemm_combine_tree_args {
  size_t struct_size;
  int64_t num_tokens; /* t, of those that are wanted */
  int top_k;
  int num_experts;          /* a multiple of 8 */
  int64_t d;                /* a positive multiple of 8 */
  const void* const* parts; /* (num_ranks) on the host: the parts of all ranks, 16-byte aligned, each from the
                               first token that is wanted on: (t, d) contiguous */
  int num_ranks;            /* 1, 2, 4 or 8 */
  fp4gemm_dtype_t part_dtype;
  const void* topk_ids; /* (t, top_k) int32_t or int64_t. A part is read for tokens that name an expert of its
                           rank, and is zero for others */
  int ids_are_64_bits;
  void* out; /* out (t, d) contiguous, 16-byte aligned */
  fp4gemm_dtype_t out_dtype;
} fp4gemm_combine_tree_args_t;

static inline fp4gemm_combine_tree_args_t fp4gemm_combine_tree_args_init(void) {
  fp4gemm_combine_tree_args_t args;
  memset(&args, 0, sizeof(args));
  args.struct_size = sizeof(args);
  args.top_k = 1;
  args.num_ranks = 1;
  args.part_dtype = FP4GEMM_FP32;
  return args;
}
#define FP4GEMM_COMBINE_TREE_ARGS_INIT fp4gemm_combine_tree_args_init()

/* out[i] = cast(P(0, 8)) of the parts: the same for 1, 2, 4 and 8 ranks. */
FP4GEMM_API fp4gemm_status_t fp4gemm_combine_tree(const fp4gemm_combine_tree_args_t* args, int device,
                                                  fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
