/* Block scales in plain order, as checkpoints and other libraries store them, for the products of fp4gemm.h.
 */
#ifndef FP4GEMM_SCALES_H_
#define FP4GEMM_SCALES_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes the scales of num_matrices operands in the 128x4 swizzled layout of fp4gemm.h, with zero padding.
 * fp4gemm_quantize writes this layout itself and needs no such call.
 *
 *     rows        of an operand
 *     columns     scales in a row: k/16 of NVFP4, k/32 of MXFP8
 *     compact     num_matrices * rows rows of bytes, the scale of (row r, block c) of a matrix at
 *                 r * row_stride + c; the next matrix begins after rows * row_stride bytes. It may have any
 *                 alignment; a multiple of 16 of the pointer, of columns and of row_stride is the fastest
 *     row_stride  bytes from one row to the next, at least columns
 *     swizzled    out, 16-byte aligned: the matrices one after the other, each with rows rounded up to 128
 *                 times columns rounded up to 4 bytes. It must not overlap with compact */
FP4GEMM_API fp4gemm_status_t fp4gemm_swizzle_scales(int num_matrices, int64_t rows, int64_t columns,
                                                    const uint8_t* compact, int64_t row_stride,
                                                    uint8_t* swizzled, int device, fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
