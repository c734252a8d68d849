// The table of GEMM kernels: the lists of every architecture that was built, one after the other.
#include "registry.hpp"

#include <cstdlib>
#include <cstring>

#include "architecture.hpp"

namespace fp4gemm {

// The build passes FP4GEMM_ARCHITECTURES: FP4GEMM_ARCHITECTURE(folder) for each folder cpp/src/smNN built.
#define FP4GEMM_ARCHITECTURE(folder)      \
  namespace folder {                      \
  extern Architecture const architecture; \
  }
FP4GEMM_ARCHITECTURES
#undef FP4GEMM_ARCHITECTURE

namespace {

#define FP4GEMM_ARCHITECTURE(folder) &folder::architecture,
Architecture const* const kArchitectures[] = {FP4GEMM_ARCHITECTURES nullptr};
#undef FP4GEMM_ARCHITECTURE

}  // namespace

Architecture const* const* architectures() { return kArchitectures; }

bool lists_device(char const* capabilities, int device_arch) {
  for (char* next = nullptr; *capabilities != '\0'; capabilities = next) {
    long const major = std::strtol(capabilities, &next, 10);
    long const minor = std::strtol(next + 1, &next, 10);
    if (10 * major + minor == device_arch) {
      return true;
    }
  }
  return false;
}

Architecture const* architecture_of(int device_arch) {
  for (Architecture const* const* arch = kArchitectures; *arch != nullptr; ++arch) {
    if (lists_device((*arch)->devices, device_arch)) {
      return *arch;
    }
  }
  return nullptr;
}

int kernel_count() {
  int count = 0;
  for (Architecture const* const* arch = kArchitectures; *arch != nullptr; ++arch) {
    count += (*arch)->num_kernels();
  }
  return count;
}

Kernel const* kernel_at(int index) {
  for (Architecture const* const* arch = kArchitectures; *arch != nullptr && index >= 0; ++arch) {
    for (KernelList const* const* list = (*arch)->lists; *list != nullptr; ++list) {
      if (index < (*list)->size) {
        return &(*list)->data[index];
      }
      index -= (*list)->size;
    }
  }
  return nullptr;
}

Kernel const* find_kernel(char const* name) {
  for (int i = 0, count = kernel_count(); i < count; ++i) {
    if (Kernel const* const kernel = kernel_at(i); std::strcmp(kernel->info.name, name) == 0) {
      return kernel;
    }
  }
  return nullptr;
}

}  // namespace fp4gemm
