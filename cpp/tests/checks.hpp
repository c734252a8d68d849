// What the host tests share: a macro that counts checks, access to the kernel table, a check of an error's
// text.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <sstream>
#include <string>

#include "fp4gemm/fp4gemm.h"

inline int failures = 0;
inline int checks = 0;
#define CHECK(condition, ...)                                     \
  do {                                                            \
    ++checks;                                                     \
    if (!(condition)) {                                           \
      ++failures;                                                 \
      std::printf("%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::printf(__VA_ARGS__);                                   \
      std::printf("\n");                                          \
    }                                                             \
  } while (false)

/// Aligned addresses that must not be dereferenced: the checks come before any use of a device.
inline void* address(int offset = 0) {
  return reinterpret_cast<void*>(uintptr_t{4096} + static_cast<uintptr_t>(offset));
}

inline constexpr fp4gemm_dtype_t kDtypes[] = {FP4GEMM_BF16, FP4GEMM_FP16, FP4GEMM_FP32};
inline constexpr char const* kDtypeNames[] = {"bf16", "fp16", "fp32"};

inline fp4gemm_kernel_info_t info_at(int index) {
  fp4gemm_kernel_info_t info{};
  fp4gemm_kernel_info(index, &info);
  return info;
}

/// The architecture of this build that names a device among those it serves; 0 for none.
inline int arch_of(int device_arch) {
  fp4gemm_architecture_info_t info{};
  for (int i = 0; i < fp4gemm_architecture_count(); ++i) {
    fp4gemm_architecture_info(i, &info);
    std::istringstream devices(info.devices);
    for (int major = 0, minor = 0; devices >> major && devices.ignore(1) && devices >> minor;) {
      if (10 * major + minor == device_arch) {
        return info.arch;
      }
    }
  }
  return 0;
}

inline void expect_error(char const* what, fp4gemm_status_t got, fp4gemm_status_t wanted, char const* text) {
  CHECK(got == wanted, "%s: status is %s (%s)", what, fp4gemm_status_string(got), fp4gemm_last_error());
  CHECK(std::strstr(fp4gemm_last_error(), text) != nullptr, "%s: '%s' does not say '%s'", what,
        fp4gemm_last_error(), text);
}

/// Prints how many checks failed and returns the exit status of the test program.
inline int report() {
  std::printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 ? 0 : 1;
}
