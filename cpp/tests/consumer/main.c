/* Uses fp4gemm from C99: its version, its kernel table, and what it says to a wrong argument. Needs no GPU.
 */
#include <stdio.h>
#include <string.h>

#include "fp4gemm/fp4gemm.h"

int main(void) {
  printf("fp4gemm %s, CUDA %d, CUTLASS \"%s\", archs \"%s\"\n", fp4gemm_version_string(),
         fp4gemm_cuda_version(), fp4gemm_cutlass_version(), fp4gemm_built_archs());
  if (fp4gemm_version() != FP4GEMM_VERSION) {
    printf("the library is %d, its header %d\n", fp4gemm_version(), FP4GEMM_VERSION);
    return 1;
  }

  for (int i = 0; i < fp4gemm_kernel_count(); ++i) {
    fp4gemm_kernel_info_t info;
    if (fp4gemm_kernel_info(i, &info) != FP4GEMM_SUCCESS) {
      printf("kernel %d: %s\n", i, fp4gemm_last_error());
      return 1;
    }
    printf("%s\n", info.name);
  }

  /* Each macro sets struct_size. */
  fp4gemm_quantize_args_t const quantize = FP4GEMM_QUANTIZE_ARGS_INIT;
  fp4gemm_silu_and_mul_quantize_args_t const silu = FP4GEMM_SILU_AND_MUL_QUANTIZE_ARGS_INIT;
  fp4gemm_rms_norm_quantize_args_t const norm = FP4GEMM_RMS_NORM_QUANTIZE_ARGS_INIT;
  fp4gemm_dequantize_args_t const dequantize = FP4GEMM_DEQUANTIZE_ARGS_INIT;
  fp4gemm_mxfp8_args_t const mxfp8 = FP4GEMM_MXFP8_ARGS_INIT;
  fp4gemm_mxfp4_args_t const mxfp4 = FP4GEMM_MXFP4_ARGS_INIT;
  if (quantize.struct_size != sizeof(quantize) || silu.struct_size != sizeof(silu) ||
      norm.struct_size != sizeof(norm) || dequantize.struct_size != sizeof(dequantize) ||
      mxfp8.struct_size != sizeof(mxfp8) || mxfp4.struct_size != sizeof(mxfp4)) {
    printf("an _INIT macro does not set struct_size\n");
    return 1;
  }

  fp4gemm_gemm_args_t args = FP4GEMM_GEMM_ARGS_INIT;
  args.m = 128;
  args.n = 256;
  args.k = 4090;
  size_t bytes = 0;
  fp4gemm_status_t const status = fp4gemm_gemm_workspace_bytes(&args, 0, &bytes);
  printf("%s: %s\n", fp4gemm_status_string(status), fp4gemm_last_error());
  if (status != FP4GEMM_ERROR_INVALID_ARGUMENT || strstr(fp4gemm_last_error(), "k: is 4090") == NULL) {
    printf("k = 4090 was not refused by name\n");
    return 1;
  }
  return 0;
}
