/* What the programs that use a GPU share: memory of device 0, values that NVFP4 holds exactly, and
 * comparisons with results that the host computes. The CUDA driver is loaded at run time, so that the
 * programs build without a CUDA toolkit; a program with its own kernels would use cudaMalloc and cudaMemcpy.
 */
#ifndef FP4GEMM_CONSUMER_GPU_H_
#define FP4GEMM_CONSUMER_GPU_H_

#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fp4gemm/fp4gemm.h"

/* ---- the CUDA driver */

static struct {
  int (*init)(unsigned);
  int (*device_count)(int*);
  int (*attribute)(int*, int, int);
  int (*retain)(void**, int);
  int (*set_current)(void*);
  int (*allocate)(uint64_t*, size_t);
  int (*to_device)(uint64_t, const void*, size_t);
  int (*to_host)(void*, uint64_t, size_t);
  int (*synchronize)(void);
} gpu_driver;

static inline void gpu_load(void* library, const char* name, void* function) {
  void* const symbol = library == NULL ? NULL : dlsym(library, name);
  memcpy(function, &symbol, sizeof(symbol)); /* ISO C has no cast from an object to a function pointer */
}

/* Makes device 0 current. Returns its compute capability as 10 * major + minor; or 0, after the reason was
 * printed, if there is no device that this build of fp4gemm serves. */
static inline int gpu_begin(void) {
  enum { kMajor = 75, kMinor = 76 }; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR */
  void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* context = NULL;
  int count = 0, major = 0, minor = 0;
  gpu_load(library, "cuInit", &gpu_driver.init);
  gpu_load(library, "cuDeviceGetCount", &gpu_driver.device_count);
  gpu_load(library, "cuDeviceGetAttribute", &gpu_driver.attribute);
  gpu_load(library, "cuDevicePrimaryCtxRetain", &gpu_driver.retain);
  gpu_load(library, "cuCtxSetCurrent", &gpu_driver.set_current);
  gpu_load(library, "cuMemAlloc_v2", &gpu_driver.allocate);
  gpu_load(library, "cuMemcpyHtoD_v2", &gpu_driver.to_device);
  gpu_load(library, "cuMemcpyDtoH_v2", &gpu_driver.to_host);
  gpu_load(library, "cuCtxSynchronize", &gpu_driver.synchronize);
  if (library == NULL || gpu_driver.init(0) != 0 || gpu_driver.device_count(&count) != 0 || count == 0 ||
      gpu_driver.retain(&context, 0) != 0 || gpu_driver.set_current(context) != 0 ||
      gpu_driver.attribute(&major, kMajor, 0) != 0 || gpu_driver.attribute(&minor, kMinor, 0) != 0) {
    printf("skipped: no CUDA device\n");
    return 0;
  }
  if (fp4gemm_kernel_arch(10 * major + minor) < 0) {
    printf("skipped: fp4gemm was built for \"%s\", and the device is %d.%d\n", fp4gemm_built_archs(), major,
           minor);
    return 0;
  }
  return 10 * major + minor;
}

static inline void gpu_check(int error, const char* what) {
  if (error != 0) {
    printf("%s: CUDA error %d\n", what, error);
    exit(1);
  }
}

/* Ends the program if a call of fp4gemm failed. */
static inline void gpu_expect(fp4gemm_status_t status) {
  if (status != FP4GEMM_SUCCESS) {
    printf("%s: %s\n", fp4gemm_status_string(status), fp4gemm_last_error());
    exit(1);
  }
}

/* Memory of the device, which the end of the process frees. */
static inline void* gpu_empty(size_t bytes) {
  uint64_t address = 0;
  gpu_check(gpu_driver.allocate(&address, bytes > 0 ? bytes : 1), "cuMemAlloc");
  return (void*)(uintptr_t)address;
}

static inline void* gpu_put(const void* host, size_t bytes) {
  void* const device = gpu_empty(bytes);
  gpu_check(gpu_driver.to_device((uint64_t)(uintptr_t)device, host, bytes), "cuMemcpyHtoD");
  return device;
}

static inline void gpu_get(void* host, const void* device, size_t bytes) {
  gpu_check(gpu_driver.synchronize(), "cuCtxSynchronize");
  gpu_check(gpu_driver.to_host(host, (uint64_t)(uintptr_t)device, bytes), "cuMemcpyDtoH");
}

/* ---- values and comparisons */

/* Element (row, column) of a matrix of e2m1 values whose rows have the amax 6 in each block of 16, so that
 * their quantization is exact. `seed` makes another matrix. */
static inline float exact_value(int seed, int row, int column) {
  static const float magnitudes[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  unsigned const mixed = (unsigned)(row * 2654435 + column * 40503 + seed * 97) * 2654435761u >> 16;
  float const value = column % 16 == 0 ? 6.0f : magnitudes[mixed % 8];
  return column % 16 != 0 && mixed / 8 % 2 == 1 ? -value : value;
}

/* bf16 values of floats that bf16 holds exactly, and back. */
static inline uint16_t to_bf16(float value) {
  uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return (uint16_t)(bits >> 16);
}

static inline float of_bf16(uint16_t value) {
  uint32_t const bits = (uint32_t)value << 16;
  float result = 0;
  memcpy(&result, &bits, sizeof(result));
  return result;
}

/* Compares bf16 results with `want`; `scale` is the sum of the magnitudes of the terms of an element, of
 * which bf16 keeps 8 bits. Prints how many are wrong and returns their number. */
static inline int count_wrong(const char* what, const uint16_t* got, const double* want, const double* scale,
                              int size) {
  int wrong = 0;
  for (int i = 0; i < size; ++i) {
    wrong += !(fabs((double)of_bf16(got[i]) - want[i]) <= scale[i] / 128.0); /* a NaN is wrong */
  }
  printf("%s: %d of %d elements are wrong\n", what, wrong, size);
  return wrong;
}

#endif
