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
  using Shape = RowShape<Cover::kQuads, true, kLooped, kThreadsPerRow, 2>;
  return launch_rows<SiluAndMulLoader<T>, Te, Shape>(launch);
}

template <class T>
void launch_silu(RowLaunch const& launch) {
  (void)(silu<T, false, 32>(launch) || silu<T, false, 256>(launch) || silu<T, false, 512>(launch) ||
         silu<T, true, 256>(launch));
}

template <class T, Cover kCover, int kThreadsPerRow, int kBlocksPerThread>
bool norm(RowLaunch const& launch) {
  using Shape = RowShape<kCover, false, false, kThreadsPerRow, kBlocksPerThread>;
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

/// Calls fp8(Fp8Launch) where the call wants FP8 codes, else nvfp4(RowLaunch, T{}), T the type of the input.
template <class Args, class Fp8, class Nvfp4>
fp4gemm_status_t launch_producer(Args const& args, Input const& input, Groups const& groups,
                                 DeviceProperties const& properties, cudaStream_t stream, Fp8 const& fp8,
                                 Nvfp4 const& nvfp4) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  if (args.fp8 != nullptr) {
    fp8(fp8_launch(input, args.m, args.k, args.fp8, args.amax, groups, properties, stream));
  } else {
    RowLaunch const launch = row_launch(input, args.m, args.k, result_of(args), groups, properties, stream);
    for_half_type(input.dtype, [&](auto type) { nvfp4(launch, type); });
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace

fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const& args,
                                              DeviceProperties const& properties, fp4gemm_stream_t stream) {
  Input input{args.x, args.x_row_stride, args.x_dtype};
  input.up_offset = args.k;
  return launch_producer(args, input, {args.offs, args.num_groups}, properties, stream, launch_silu_fp8,
                         [](RowLaunch const& launch, auto type) { launch_silu<decltype(type)>(launch); });
}

fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const& args,
                                          DeviceProperties const& properties, fp4gemm_stream_t stream) {
  Input input{args.x, args.x_row_stride, args.x_dtype};
  input.residual = args.residual;
  input.sum = args.sum;
  input.weight = args.weight;
  input.k = args.k;
  input.epsilon = args.epsilon;
  return launch_producer(args, input, {}, properties, stream, launch_norm_fp8,
                         [](RowLaunch const& launch, auto type) { launch_norm<decltype(type)>(launch); });
}

}  // namespace fp4gemm
