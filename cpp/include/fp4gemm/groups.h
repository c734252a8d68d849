/* What surrounds the grouped products of fp4gemm.h: zeros for the rows that are in no group. */
#ifndef FP4GEMM_GROUPS_H_
#define FP4GEMM_GROUPS_H_

#include "fp4gemm/fp4gemm.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Writes zeros to the rows of x (m, row_bytes bytes each) from offs[num_groups - 1] on, which a grouped GEMM
 * that is ragged in m does not write. The rows before them are neither read nor written.
 *
 *     x           contiguous and 16-byte aligned; row_bytes is any number of bytes
 *     offs        (num_groups) on the device, the cumulative ends of the groups, num_groups >= 1. Only the
 *                 last one is read. One below 0 counts as 0, and one above m as m
 */
FP4GEMM_API fp4gemm_status_t fp4gemm_zero_outside_groups(int64_t m, int64_t row_bytes, void* x,
                                                         const int32_t* offs, int num_groups, int device,
                                                         fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
