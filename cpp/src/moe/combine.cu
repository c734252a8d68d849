// The weighted sum of the results of experts: out[i] = sum over j of weights[i, j] * y[row_of_pair[i, j]].
#include "error.hpp"
#include "moe/combine.cuh"
#include "moe/moe.hpp"
#include "quantize/grid.hpp"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

struct CombineParams {
  void const* y;
  int const* row_of_pair;
  SlotWeights weights;
  void* out;
  int64_t num_rows;
  int64_t d;
  int top_k;
  int ctas_per_token;
};

/// Each thread has eight columns of a token.
///
/// @tparam T The type of y.
/// @tparam Out The type of out.
template <class T, class Out>
__global__ void __launch_bounds__(kCombineThreads) combine_rows(CombineParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  CombineTile const tile(p.ctas_per_token);
  if (tile.column >= p.d) {
    return;
  }
  T const* const y = static_cast<T const*>(p.y) + tile.column;
  float sums[kCombineStep] = {};
  add_slots<T>(sums, p.weights, tile.token, p.top_k, [&](int64_t slot) -> T const* {
    int const row = p.row_of_pair[slot];
    return row >= 0 && row < p.num_rows ? y + row * p.d : nullptr;
  });
  store_columns(static_cast<Out*>(p.out) + tile.token * p.d + tile.column, sums);
}

}  // namespace

fp4gemm_status_t launch_combine(fp4gemm_combine_args_t const& args, DeviceProperties const& properties,
                                fp4gemm_stream_t stream) {
  if (args.num_tokens == 0) {
    return FP4GEMM_SUCCESS;
  }
  int64_t const ctas_per_token = ceil_div(args.d, int64_t{kCombineThreads} * kCombineStep);
  int64_t const ctas = args.num_tokens * ctas_per_token;
  FP4GEMM_TRY(check_grid("combine", ctas));
  CombineParams const params{
      args.y, args.row_of_pair, {args.topk_weights, args.weights_dtype}, args.out, args.num_rows,
      args.d, args.top_k,       static_cast<int>(ctas_per_token)};
  for_type(args.y_dtype, [&](auto y) {
    for_type(args.out_dtype, [&](auto out) {
      (void)launch_combine_kernel(combine_rows<decltype(y), decltype(out)>, params, ctas,
                                  properties.can_overlap_launches(), stream);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
