// The weighted sum of the results of experts: out[i] = sum over j of weights[i, j] * y[row_of_pair[i, j]].
#include <cuda_runtime.h>

#include "error.hpp"
#include "moe/moe.hpp"
#include "quantize/convert.cuh"
#include "quantize/grid.hpp"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kThreads = 128;
constexpr int kBatch = 8;  // slots whose rows a thread loads at a time

struct CombineParams {
  void const* y;
  int const* row_of_pair;
  void const* weights;  // null: all are 1
  fp4gemm_dtype_t weights_dtype;
  void* out;
  int64_t num_rows;
  int64_t d;
  int top_k;
  int ctas_per_token;
};

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

__device__ inline float weight_at(CombineParams const& p, int64_t slot) {
  if (p.weights == nullptr) {
    return 1.0f;
  }
  switch (p.weights_dtype) {
    case FP4GEMM_BF16: return to_float(static_cast<__nv_bfloat16 const*>(p.weights)[slot]);
    case FP4GEMM_FP16: return to_float(static_cast<__half const*>(p.weights)[slot]);
    default: return static_cast<float const*>(p.weights)[slot];
  }
}

/// Eight neighbouring columns, loaded and stored 16 bytes at a time.
template <class T>
struct alignas(16) Columns {
  T elements[kCombineStep];
};

/// Each thread has eight columns of a token. The slots are added in ascending order, and the rows of a batch
/// of slots are loaded before the first of them is added.
///
/// @tparam T The type of y.
/// @tparam Out The type of out.
template <class T, class Out>
__global__ void __launch_bounds__(kThreads) combine_rows(CombineParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int64_t const token = blockIdx.x / p.ctas_per_token;
  int const part = static_cast<int>(blockIdx.x % p.ctas_per_token) * kThreads + static_cast<int>(threadIdx.x);
  int64_t const column = int64_t{part} * kCombineStep;
  if (column >= p.d) {
    return;
  }
  T const* const y = static_cast<T const*>(p.y) + column;
  float sums[kCombineStep] = {};
#pragma unroll 1
  for (int first = 0; first < p.top_k; first += kBatch) {
    Columns<T> rows[kBatch];
    float weights[kBatch];
    bool has[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int64_t const slot = token * p.top_k + first + i;
      int const row = first + i < p.top_k ? p.row_of_pair[slot] : -1;
      has[i] = row >= 0 && row < p.num_rows;
      if (has[i]) {
        rows[i] = *reinterpret_cast<Columns<T> const*>(y + row * p.d);
        weights[i] = weight_at(p, slot);
      }
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (has[i]) {
#pragma unroll
        for (int j = 0; j < kCombineStep; ++j) {
          sums[j] = __fadd_rn(sums[j], __fmul_rn(weights[i], to_float(rows[i].elements[j])));
        }
      }
    }
  }
  Columns<Out> result;
#pragma unroll
  for (int j = 0; j < kCombineStep; ++j) {
    result.elements[j] = from_float<Out>(sums[j]);
  }
  *reinterpret_cast<Columns<Out>*>(static_cast<Out*>(p.out) + token * p.d + column) = result;
}

/// Calls f with a value of the type that dtype stands for.
template <class F>
void for_type(fp4gemm_dtype_t dtype, F const& f) {
  switch (dtype) {
    case FP4GEMM_BF16: f(__nv_bfloat16{}); break;
    case FP4GEMM_FP16: f(__half{}); break;
    case FP4GEMM_FP32: f(float{}); break;
  }
}

}  // namespace

fp4gemm_status_t launch_combine(fp4gemm_combine_args_t const& args, DeviceProperties const& properties,
                                fp4gemm_stream_t stream) {
  if (args.num_tokens == 0) {
    return FP4GEMM_SUCCESS;
  }
  int64_t const ctas_per_token = ceil_div(args.d, int64_t{kThreads} * kCombineStep);
  int64_t const ctas = args.num_tokens * ctas_per_token;
  FP4GEMM_TRY(check_grid("combine", ctas));
  CombineParams const params{args.y,
                             args.row_of_pair,
                             args.topk_weights,
                             args.weights_dtype,
                             args.out,
                             args.num_rows,
                             args.d,
                             args.top_k,
                             static_cast<int>(ctas_per_token)};
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(ctas);
  config.blockDim = kThreads;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = properties.can_overlap_launches() ? 1 : 0;
  for_type(args.y_dtype, [&](auto y) {
    for_type(args.out_dtype, [&](auto out) {
      (void)cudaLaunchKernelEx(&config, combine_rows<decltype(y), decltype(out)>, params);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
