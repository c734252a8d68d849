// Quantization fused with what produces its input: SiLU times gate, RMS norm.
#include "quantize/launch.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

using Te = TeCast<Range::kRegular>;

RowLaunch row_launch(int64_t m, int64_t k, fp4gemm_dtype_t dtype, uint8_t* codes, uint8_t* scales,
                     float* amax, cudaStream_t stream) {
  RowLaunch launch{};
  launch.params.m = m;
  launch.params.num_blocks = static_cast<int>(k / kBlock);
  launch.params.num_words = (launch.params.num_blocks + 3) / 4;
  launch.params.codes = codes;
  launch.params.scales = scales;
  launch.params.amax = amax;
  launch.dtype = dtype;
  launch.scale_rows = ceil_div(m, 128) * 128;
  launch.stream = stream;
  return launch;
}

template <class T, bool kLooped, int kThreadsPerRow>
bool silu(RowLaunch const& launch) {
  return launch_rows<SiluAndMulLoader<T>, Te, Amax::kRow, Cover::kQuads, true, kLooped, kThreadsPerRow, 2>(
      launch);
}

template <class T>
void launch_silu(RowLaunch const& launch) {
  (void)(silu<T, false, 32>(launch) || silu<T, false, 256>(launch) || silu<T, false, 512>(launch) ||
         silu<T, true, 256>(launch));
}

template <class T, int kThreadsPerRow>
bool norm(RowLaunch const& launch) {
  return launch_rows<RmsNormLoader<T>, Te, Amax::kRow, Cover::kQuads, false, false, kThreadsPerRow, 4>(
      launch);
}

template <class T>
void launch_norm(RowLaunch const& launch) {
  (void)(norm<T, 32>(launch) || norm<T, 128>(launch) || norm<T, 256>(launch) || norm<T, 512>(launch) ||
         norm<T, 1024>(launch));
}

}  // namespace

fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const& args,
                                              fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  RowLaunch launch = row_launch(args.m, args.k, args.x_dtype, args.codes, args.scales, args.amax, stream);
  launch.params.input.x = args.x;
  launch.params.input.row_stride = args.x_row_stride;
  launch.params.input.up_offset = args.k;
  if (args.offs != nullptr) {
    launch.params.groups = {args.offs, args.num_groups};
    launch.scale_rows = fp4gemm_grouped_scale_rows(args.m, args.num_groups);
  }
  if (args.x_dtype == FP4GEMM_BF16) {
    launch_silu<__nv_bfloat16>(launch);
  } else {
    launch_silu<__half>(launch);
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const& args,
                                          fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  RowLaunch launch = row_launch(args.m, args.k, args.x_dtype, args.codes, args.scales, args.amax, stream);
  launch.params.input.x = args.x;
  launch.params.input.row_stride = args.x_row_stride;
  launch.params.input.residual = args.residual;
  launch.params.input.sum = args.sum;
  launch.params.input.weight = args.weight;
  launch.params.input.k = args.k;
  launch.params.input.epsilon = args.epsilon;
  if (args.x_dtype == FP4GEMM_BF16) {
    launch_norm<__nv_bfloat16>(launch);
  } else {
    launch_norm<__half>(launch);
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
