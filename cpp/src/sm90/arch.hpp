// What the files of SM90 share: the number of the architecture and the lists of its kernels.
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

namespace fp4gemm {
struct GeneratedKernels;  // generated.hpp
}

namespace fp4gemm::sm90 {

constexpr int kArch = 90;

namespace lists {
FP4GEMM_SM90_LISTS(FP4GEMM_DECLARE_LIST)
}

/// Those with a formula that is compiled at run time, in sm90/generated.cu.
extern GeneratedKernels const generated_kernels;

}  // namespace fp4gemm::sm90
