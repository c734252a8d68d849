/* A GEMM with an epilogue that is compiled at run time: the same kernels as fp4gemm_gemm, whose epilogue is a
 * formula of the caller's, for devices of compute capability 9.0.
 *
 * First write the formula as a C++ header (cpp/cutlass_evt/epilogue/generated.hpp says what it defines).
 * fp4gemm_generated_source gives the source of the kernel that a GEMM needs, which includes the header by the
 * name "fp4gemm_generated.hpp". Compile it to a cubin for sm_90a, as C++17 and with every function a device
 * function (NVRTC: -default-device). fp4gemm_generated_load adds the kernel to those of the formula in this
 * process, and fp4gemm_gemm_generated launches the one that a GEMM needs. Where it is not loaded yet, that
 * function returns FP4GEMM_ERROR_NOT_LOADED, so that a caller writes sources for the first GEMMs alone.
 */
#ifndef FP4GEMM_GENERATED_H_
#define FP4GEMM_GENERATED_H_

#include "fp4gemm/casts.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FP4GEMM_GENERATED_MOST_VECTORS 8
#define FP4GEMM_GENERATED_MOST_MATRICES 4
#define FP4GEMM_GENERATED_MOST_SCALARS 16
#define FP4GEMM_GENERATED_MOST_AUX 4

/* A formula in this process, with its kernels that are loaded. It lives as long as the process, and threads
 * may share it. */
typedef struct fp4gemm_formula fp4gemm_formula_t;

/* A matrix that the formula reads, or a further output. Rows begin on 16-byte boundaries. */
typedef struct fp4gemm_generated_matrix {
  void* data;         /* 16-byte aligned */
  int64_t row_stride; /* elements; ragged in k: the matrix of a group begins m * row_stride elements after
                         that of the group before it */
  fp4gemm_dtype_t dtype;
} fp4gemm_generated_matrix_t;

/* The formula's kind, its inputs and its further outputs. Inputs by row have m elements, inputs by column and
 * matrices n columns, or n/2 where the formula takes pairs. D, c and further outputs have n columns, or n/2
 * where it takes pairs and returns one result. */
typedef struct fp4gemm_generated {
  size_t struct_size;
  int takes_pairs; /* 1: of the columns 2j and 2j+1 */
  int num_results; /* 1, or with pairs 1 or 2 */
  int takes_bias;  /* 1: args->bias must be given; 0: it must be absent */
  int takes_c;     /* likewise for args->c */
  int num_rows, num_columns, num_groups, num_matrices, num_scalars, num_aux;
  fp4gemm_vector_t rows[FP4GEMM_GENERATED_MOST_VECTORS];    /* numel m or 1 */
  fp4gemm_vector_t columns[FP4GEMM_GENERATED_MOST_VECTORS]; /* numel n, or n/2 with pairs, or 1 */
  const float* groups[FP4GEMM_GENERATED_MOST_VECTORS];      /* (num_groups) on the device */
  fp4gemm_generated_matrix_t matrices[FP4GEMM_GENERATED_MOST_MATRICES];
  float scalars[FP4GEMM_GENERATED_MOST_SCALARS];
  fp4gemm_generated_matrix_t aux[FP4GEMM_GENERATED_MOST_AUX]; /* out */
  fp4gemm_formula_t* formula; /* for fp4gemm_generated_load and fp4gemm_gemm_generated alone */
} fp4gemm_generated_t;

static inline fp4gemm_generated_t fp4gemm_generated_init(void) {
  fp4gemm_generated_t generated;
  memset(&generated, 0, sizeof(generated));
  generated.struct_size = sizeof(generated);
  generated.num_results = 1;
  return generated;
}
#define FP4GEMM_GENERATED_INIT fp4gemm_generated_init()

/* Sets *formula to a new formula without kernels. */
FP4GEMM_API fp4gemm_status_t fp4gemm_formula_create(fp4gemm_formula_t** formula);

/* Writes the source of the kernel to `source`, which has `bytes` bytes, with a terminating zero; 4096 are
 * enough. The text is empty if D has no elements, since no kernel is needed then. The data pointers are not
 * used; only offs, c and a_rows must be null or not as in the call. */
FP4GEMM_API fp4gemm_status_t fp4gemm_generated_source(const fp4gemm_gemm_args_t* args,
                                                      const fp4gemm_generated_t* generated, int device,
                                                      char* source, size_t bytes);

/* The same for a kernel of the kernel table, which is named as in fp4gemm_kernel_info_t, without a device:
 * with it kernels can be compiled ahead, on a machine without a GPU. out_dtype is that of the name. */
FP4GEMM_API fp4gemm_status_t fp4gemm_generated_source_of_kernel(const char* kernel, fp4gemm_ragged_t ragged,
                                                                const fp4gemm_generated_t* generated,
                                                                char* source, size_t bytes);

/* Loads a cubin for a device, and adds its kernel to generated->formula, unless it has that kernel already.
 * args and generated are those for which fp4gemm_generated_source gave the source. */
FP4GEMM_API fp4gemm_status_t fp4gemm_generated_load(const fp4gemm_gemm_args_t* args,
                                                    const fp4gemm_generated_t* generated, int device,
                                                    const void* cubin);

/* fp4gemm_gemm_with_cast, and the query of its workspace, with the formula in place of the one of
 * fp4gemm_gemm: args->activation is FP4GEMM_ACTIVATION_NONE, and args->beta is not used. n is a multiple of
 * 8, and of 16 with pairs. c may be d where there are no further outputs; an output that overlaps another or
 * what the call reads is refused. */
FP4GEMM_API fp4gemm_status_t fp4gemm_gemm_generated_workspace_bytes(const fp4gemm_gemm_args_t* args,
                                                                    const fp4gemm_cast_t* cast,
                                                                    const fp4gemm_generated_t* generated,
                                                                    int device, size_t* bytes);
FP4GEMM_API fp4gemm_status_t fp4gemm_gemm_generated(const fp4gemm_gemm_args_t* args,
                                                    const fp4gemm_cast_t* cast,
                                                    const fp4gemm_generated_t* generated, void* workspace,
                                                    size_t workspace_bytes, int device,
                                                    fp4gemm_stream_t stream);

#ifdef __cplusplus
}
#endif

#endif
