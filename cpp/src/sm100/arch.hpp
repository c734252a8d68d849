// What the files of SM100 share: its number, which its traits have too, and its kernel lists.
#pragma once

#include "kernel.hpp"

// In the order of the kernel table.
#define FP4GEMM_SM100_LISTS(LIST) \
  LIST(dense_bf16)                \
  LIST(kernels_fp16)              \
  LIST(kernels_fp32)              \
  LIST(grouped_bf16)              \
  LIST(gated)

namespace fp4gemm::sm100 {

constexpr int kArch = 100;

namespace lists {
FP4GEMM_SM100_LISTS(FP4GEMM_DECLARE_LIST)
}

}  // namespace fp4gemm::sm100
