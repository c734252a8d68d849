// Zeros for the rows of a matrix that are in no group, whose number the device alone knows.
#include <algorithm>

#include "error.hpp"
#include "launch.hpp"
#include "moe/moe.hpp"
#include "quantize/groups.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kThreads = 256;   // of a CTA
constexpr int kWordBytes = 16;  // of a store
constexpr int kUnroll = 4;      // words of a thread before a grid has more CTAs

struct ZeroParams {
  int const* end;  // of the last group
  int64_t m;
  int64_t row_bytes;
  uint8_t* x;  // 16-byte aligned
};

/// The threads of all CTAs share the words that lie behind the last group. Rows need not begin at a word: the
/// bytes before the first word, and those behind the last one, are stored one by one.
__global__ void __launch_bounds__(kThreads) zero_outside_groups(ZeroParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int64_t const begin = clamp_row(*p.end, p.m) * p.row_bytes;
  int64_t const end = p.m * p.row_bytes;
  int64_t const thread = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  int64_t const num_threads = int64_t{gridDim.x} * kThreads;
  int64_t const first_word = (begin + kWordBytes - 1) / kWordBytes;
  int64_t const last_word = end / kWordBytes;
#pragma unroll kUnroll
  for (int64_t word = first_word + thread; word < last_word; word += num_threads) {
    reinterpret_cast<uint4*>(p.x)[word] = uint4{};
  }
  if (thread < kWordBytes) {
    int64_t const head_end = min(first_word * kWordBytes, end);
    if (begin + thread < head_end) {
      p.x[begin + thread] = 0;
    }
    int64_t const tail = max(last_word * kWordBytes, head_end);
    if (tail + thread < end) {
      p.x[tail + thread] = 0;
    }
  }
}

}  // namespace

fp4gemm_status_t launch_zero_outside_groups(int64_t m, int64_t row_bytes, void* x, int32_t const* offs,
                                            int num_groups, DeviceProperties const& properties,
                                            fp4gemm_stream_t stream) {
  int64_t const bytes = m * row_bytes;
  if (bytes == 0) {
    return FP4GEMM_SUCCESS;
  }
  // With one CTA for each SM memory bounds the stores, and a launch without such rows ends soon.
  int64_t const ctas =
      std::min<int64_t>(ceil_div(bytes, int64_t{kThreads} * kWordBytes * kUnroll), properties.num_sms);
  ZeroParams const params{offs + num_groups - 1, m, row_bytes, static_cast<uint8_t*>(x)};
  FP4GEMM_CUDA(launch_waiting(zero_outside_groups, {static_cast<unsigned>(ctas), kThreads},
                              properties.can_overlap_launches(), stream, params));
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
