// What the files of SM90 share: its number, which its traits have too, and its kernel lists.
#pragma once

#include "kernel.hpp"

// In the order of the kernel table.
#define FP4GEMM_SM90_LISTS(LIST) \
  LIST(gemm)                     \
  LIST(packed)                   \
  LIST(prepacked_narrow)         \
  LIST(prepacked_wide)           \
  LIST(prepacked_bf16)           \
  LIST(prepacked_fp8)            \
  LIST(prepacked_fp8_fast)

namespace fp4gemm::sm90 {

constexpr int kArch = 90;

namespace lists {
FP4GEMM_SM90_LISTS(FP4GEMM_DECLARE_LIST)
}

}  // namespace fp4gemm::sm90
