// The checks that the functions for mixtures of experts share: the slots of tokens, and the experts that they
// name.
#pragma once

#include "check.hpp"

namespace fp4gemm {

/// Checks a number of tokens and their slots.
inline fp4gemm_status_t check_slots(int64_t num_tokens, int top_k) {
  FP4GEMM_TRY(check_size("num_tokens", num_tokens, 0, 1));
  FP4GEMM_TRY(check_size("top_k", top_k, 1, 1));
  FP4GEMM_CHECK(num_tokens * top_k <= Rules::kMaxSize,
                "num_tokens: is %lld, with top_k %d must be at most %lld slots", ll(num_tokens), top_k,
                ll(Rules::kMaxSize));
  return FP4GEMM_SUCCESS;
}

inline fp4gemm_status_t check_ids(void const* ids, int are_64_bits, int64_t num_slots) {
  FP4GEMM_TRY(check_flag("ids_are_64_bits", are_64_bits));
  return check_buffer("topk_ids", ids, num_slots, are_64_bits != 0 ? 8 : 4);
}

}  // namespace fp4gemm
