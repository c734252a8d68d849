/* NVFP4 quantization of stacks of matrices, such as the weights of all experts of a layer, in blocks of
 * 16 x 16 or along columns. The results are those of fp4gemm_quantize (fp4gemm.h) for each matrix. */
#ifndef FP4GEMM_STACKS_H_
#define FP4GEMM_STACKS_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* fp4gemm_quantize for each of num_matrices >= 1 matrices (m, k), in as many launches as one matrix needs.
 * args describe one matrix, without groups, and with block_rows 16, or with column and without row; the
 * matrices follow each other, and so do their results:
 *
 *     x                          (num_matrices * m, k), with x_row_stride from row to row
 *     row.codes, row.scales      (num_matrices, m, k/2) and (num_matrices, scale rows, scale columns)
 *     column.codes, .scales      (num_matrices, k, m/2) and (num_matrices, scale rows, scale columns)
 *     column.decoded             (num_matrices, k, m)
 *     amax, amax_given           (num_matrices), or (num_matrices, k) with FP4GEMM_SCALING_ROW
 *
 * where the scale rows and columns are those of fp4gemm_padded_scale_shape for one matrix. With rng_state
 * {seed, offset}, matrix e is rounded as with {seed, offset + 2 * e}. num_matrices * m is at most 2^31 - 1.
 * Rows of all matrices are quantized by fp4gemm_quantize itself, with the matrices as groups of rows. */
FP4GEMM_API fp4gemm_status_t fp4gemm_quantize_stack(const fp4gemm_quantize_args_t* args, int num_matrices,
                                                    int device, fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
