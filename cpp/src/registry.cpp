// The table of GEMM kernels: the lists of every architecture that was built, one after the other.
#include "registry.hpp"

#include <cstring>

namespace fp4gemm {

#ifdef FP4GEMM_WITH_SM90
extern KernelList const kSm90DenseBf16, kSm90DenseFp16, kSm90DenseFp32;
extern KernelList const kSm90GroupedBf16, kSm90GroupedFp16, kSm90GroupedFp32;
extern KernelList const kSm90DenseGatedBf16, kSm90DenseGatedFp16;
extern KernelList const kSm90GroupedGatedBf16, kSm90GroupedGatedFp16;
extern KernelList const kSm90PrepackedNarrow, kSm90PrepackedWide, kSm90PrepackedBf16;
#endif
#ifdef FP4GEMM_WITH_SM100
extern KernelList const kSm100DenseBf16, kSm100DenseFp16, kSm100DenseFp32;
extern KernelList const kSm100GroupedBf16, kSm100GroupedFp16, kSm100GroupedFp32;
extern KernelList const kSm100DenseGatedBf16, kSm100DenseGatedFp16;
extern KernelList const kSm100GroupedGatedBf16, kSm100GroupedGatedFp16;
#endif

namespace {

KernelList const* const kLists[] = {
#ifdef FP4GEMM_WITH_SM90
    &kSm90DenseBf16,
    &kSm90DenseFp16,
    &kSm90DenseFp32,
    &kSm90GroupedBf16,
    &kSm90GroupedFp16,
    &kSm90GroupedFp32,
    &kSm90DenseGatedBf16,
    &kSm90DenseGatedFp16,
    &kSm90GroupedGatedBf16,
    &kSm90GroupedGatedFp16,
    &kSm90PrepackedNarrow,
    &kSm90PrepackedWide,
    &kSm90PrepackedBf16,
#endif
#ifdef FP4GEMM_WITH_SM100
    &kSm100DenseBf16,
    &kSm100DenseFp16,
    &kSm100DenseFp32,
    &kSm100GroupedBf16,
    &kSm100GroupedFp16,
    &kSm100GroupedFp32,
    &kSm100DenseGatedBf16,
    &kSm100DenseGatedFp16,
    &kSm100GroupedGatedBf16,
    &kSm100GroupedGatedFp16,
#endif
    nullptr,  // the end
};

}  // namespace

KernelList const* const* kernel_lists() { return kLists; }

int kernel_count() {
  int count = 0;
  for (KernelList const* const* list = kLists; *list != nullptr; ++list) {
    count += (*list)->size;
  }
  return count;
}

Kernel const& kernel_at(int index) {
  KernelList const* const* list = kLists;
  while (index >= (*list)->size) {
    index -= (*list)->size;
    ++list;
  }
  return (*list)->data[index];
}

Kernel const* find_kernel(char const* name) {
  for (KernelList const* const* list = kLists; *list != nullptr; ++list) {
    for (int i = 0; i < (*list)->size; ++i) {
      if (std::strcmp((*list)->data[i].info.name, name) == 0) {
        return &(*list)->data[i];
      }
    }
  }
  return nullptr;
}

}  // namespace fp4gemm
