// What the files of SM100 share: its number, which its traits have too, and its kernel lists.
#pragma once

#include "kernel.hpp"

// In the order of the kernel table.
#define FP4GEMM_SM100_LISTS(LIST) \
  LIST(dense_m256)                \
  LIST(dense_m128)                \
  LIST(grouped_m256)              \
  LIST(grouped_m128)              \
  LIST(swapped)                   \
  LIST(mxfp8)                     \
  LIST(mxfp4)                     \
  LIST(mxfp8_mxfp4)

namespace fp4gemm::sm100 {

constexpr int kArch = 100;

namespace lists {
FP4GEMM_SM100_LISTS(FP4GEMM_DECLARE_LIST)
}

}  // namespace fp4gemm::sm100
