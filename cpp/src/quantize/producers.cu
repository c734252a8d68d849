// Quantization fused with the computation of its input: SiLU(gate) * up, and RMS norm.
#include "quantize/launch.cuh"
#include "quantize/quantize.hpp"
#include "quantize/rows_fp8.cuh"

namespace fp4gemm {
namespace {

using Te = TeCast<Range::kRegular>;

/// The output of the call, as quantize has it.
template <class Args>
fp4gemm_quantized_t result_of(Args const& args) {
  fp4gemm_quantized_t out = FP4GEMM_QUANTIZED_INIT;
  out.codes = args.codes;
  out.scales = args.scales;
  out.amax = args.amax;
  out.decoded = args.decoded;
  return out;
}

template <class T, bool kLooped, int kThreadsPerRow>
bool silu(RowLaunch const& launch) {
  using Shape = RowShape<Amax::kRow, Cover::kQuads, true, kLooped, kThreadsPerRow, 2>;
  return launch_rows<SiluAndMulLoader<T>, Te, Shape>(launch);
}

template <class T>
void launch_silu(RowLaunch const& launch) {
  (void)(silu<T, false, 32>(launch) || silu<T, false, 256>(launch) || silu<T, false, 512>(launch) ||
         silu<T, true, 256>(launch));
}

template <class T, Cover kCover, int kThreadsPerRow, int kBlocksPerThread>
bool norm(RowLaunch const& launch) {
  using Shape = RowShape<Amax::kRow, kCover, false, false, kThreadsPerRow, kBlocksPerThread>;
  return launch_rows<RmsNormLoader<T>, Te, Shape>(launch);
}

// As launch_dense has it: with few rows the latency of one row matters, which is that of several loads and
// two reductions.
template <class T>
void launch_norm(RowLaunch const& launch) {
  constexpr Cover kSingles = Cover::kSingles;
  constexpr Cover kQuads = Cover::kQuads;
  if (launch.params.m < 8 * launch.device.num_sms &&
      (norm<T, kSingles, 32, 1>(launch) || norm<T, kSingles, 128, 1>(launch) ||
       norm<T, kSingles, 256, 1>(launch) || norm<T, kSingles, 512, 1>(launch) ||
       norm<T, kSingles, 1024, 1>(launch))) {
    return;
  }
  (void)(norm<T, kQuads, 32, 4>(launch) || norm<T, kQuads, 128, 4>(launch) ||
         norm<T, kQuads, 256, 4>(launch) || norm<T, kQuads, 512, 4>(launch) ||
         norm<T, kQuads, 1024, 4>(launch));
}

}  // namespace

fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const& args,
                                              DeviceProperties const& properties, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  Input input{args.x, args.x_row_stride};
  input.up_offset = args.k;
  Groups const groups{args.offs, args.num_groups};
  if (args.fp8 != nullptr) {
    launch_silu_fp8(
        fp8_launch(input, args.m, args.k, args.x_dtype, args.fp8, args.amax, groups, properties, stream));
    FP4GEMM_CUDA(cudaGetLastError());
    return FP4GEMM_SUCCESS;
  }
  RowLaunch const launch =
      row_launch(input, args.m, args.k, args.x_dtype, result_of(args), groups, properties, stream);
  if (args.x_dtype == FP4GEMM_BF16) {
    launch_silu<__nv_bfloat16>(launch);
  } else {
    launch_silu<__half>(launch);
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const& args,
                                          DeviceProperties const& properties, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  Input input{args.x, args.x_row_stride};
  input.residual = args.residual;
  input.sum = args.sum;
  input.weight = args.weight;
  input.k = args.k;
  input.epsilon = args.epsilon;
  if (args.fp8 != nullptr) {
    launch_norm_fp8(
        fp8_launch(input, args.m, args.k, args.x_dtype, args.fp8, args.amax, {}, properties, stream));
    FP4GEMM_CUDA(cudaGetLastError());
    return FP4GEMM_SUCCESS;
  }
  RowLaunch const launch =
      row_launch(input, args.m, args.k, args.x_dtype, result_of(args), {}, properties, stream);
  if (args.x_dtype == FP4GEMM_BF16) {
    launch_norm<__nv_bfloat16>(launch);
  } else {
    launch_norm<__half>(launch);
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
