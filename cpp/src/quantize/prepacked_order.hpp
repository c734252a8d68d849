// The two orders of prepacked weights, as data.
#pragma once

#include "check.hpp"
#include "quantize/quantize.hpp"

namespace fp4gemm {

/// An order of prepacked weights: what k is a multiple of, the bytes of a weight, and the launches.
struct PrepackedOrder {
  int k_step;
  int64_t (*bytes)(int64_t n, int64_t k);
  decltype(&launch_prepack) prepack;
  decltype(&launch_unprepack) unprepack;
};
inline constexpr PrepackedOrder kOrderForFp16{Rules::kQuantizeK, fp4gemm_prepacked_bytes, launch_prepack,
                                              launch_unprepack};
inline constexpr PrepackedOrder kOrderForFp8{Rules::kFp8K, fp4gemm_prepacked_fp8_bytes, launch_prepack_fp8,
                                             launch_unprepack_fp8};

}  // namespace fp4gemm
