// What the files of SM120 share: its number, which its traits have too, and its kernel lists.
#pragma once

#include "kernel.hpp"

// In the order of the kernel table.
#define FP4GEMM_SM120_LISTS(LIST) \
  LIST(dense_large)               \
  LIST(dense)                     \
  LIST(grouped)                   \
  LIST(swapped)                   \
  LIST(prepacked_fp16)            \
  LIST(prepacked_bf16)            \
  LIST(mxfp8)                     \
  LIST(mxfp4)                     \
  LIST(mxfp8_mxfp4)

namespace fp4gemm::sm120 {

constexpr int kArch = 120;

namespace lists {
FP4GEMM_SM120_LISTS(FP4GEMM_DECLARE_LIST)
}

}  // namespace fp4gemm::sm120
