// Reductions over the threads that share a row.
#pragma once

#include <cstdint>

namespace fp4gemm {

/// The maximum of `bits` over the kThreadsPerRow threads of a row: a warp (32), or all threads of the CTA.
///
/// All threads of the CTA must call it if they share a row, all lanes of the warp otherwise. `slot` (0 to 2)
/// must differ from that of the call before. Each call has one barrier, which only ensures that the partial
/// maxima of this call are written before they are read; a fast warp may be one call ahead, and must not
/// write over what a slow warp still reads.
template <int kThreadsPerRow>
__device__ uint32_t row_max(uint32_t bits, int slot) {
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if constexpr (kThreadsPerRow > 32) {
    constexpr int kWarps = kThreadsPerRow / 32;
    __shared__ uint32_t partial[3][kWarps];
    int const lane = static_cast<int>(threadIdx.x % 32);
    if (lane == 0) {
      partial[slot][threadIdx.x / 32] = bits;
    }
    __syncthreads();  // the partial maxima of all warps are written
    bits = __reduce_max_sync(0xFFFFFFFFu, partial[slot][lane % kWarps]);
  }
  return bits;
}

/// Folds `values` by halves, until their sum is the first of them: values j and j + kHalf are added, then
/// kHalf is halved. The recursion is unrolled by the compiler where nested loops over the halves are not.
template <int kHalf, int kCount>
__device__ inline void fold_by_halves(float (&values)[kCount]) {
  if constexpr (kHalf > 0) {
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      values[i] = __fadd_rn(values[i], values[i + kHalf]);
    }
    fold_by_halves<kHalf / 2>(values);
  }
}

/// The sum over the blocks of a row, of which the thread holds kBlocksPerThread, kThreadsPerRow apart. It is
/// folded by halves: sum j is added to sum j + N/2, then N is halved, starting from the next power of two of
/// the number of blocks; blocks beyond the row are zero. The order of the additions therefore does not depend
/// on the number of threads, and neither do the bits of the sum.
///
/// Who calls it, and `slot` (0 or 1): as for row_max. The contents of `sums` are lost.
template <int kThreadsPerRow, int kBlocksPerThread>
__device__ float row_sum(float (&sums)[kBlocksPerThread], int slot) {
  fold_by_halves<kBlocksPerThread / 2>(sums);
  float sum = sums[0];
  int const lane = static_cast<int>(threadIdx.x % 32);
  if constexpr (kThreadsPerRow > 32) {
    constexpr int kWarps = kThreadsPerRow / 32;
    __shared__ float partial[2][kWarps][32];
    partial[slot][threadIdx.x / 32][lane] = sum;
    __syncthreads();  // the partial sums of all warps are written
    float parts[kWarps];
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      parts[i] = partial[slot][i][lane];
    }
    fold_by_halves<kWarps / 2>(parts);
    sum = parts[0];
  }
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFFu, sum, half));
  }
  return sum;
}

}  // namespace fp4gemm
