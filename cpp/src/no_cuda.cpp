// Replaces the device code in a build without CUDA: every use of a device fails and says why.
#include "device.hpp"
#include "error.hpp"
#include "generated.hpp"
#include "moe/moe.hpp"
#include "moe/ranks.hpp"
#include "quantize/quantize.hpp"
#include "quantize/scale_search.hpp"
#include "quantize/stacks.hpp"
#include "quantize/swizzle.hpp"
#include "training/training.hpp"

namespace fp4gemm {
namespace {
fp4gemm_status_t no_cuda() {
  return fail(
      FP4GEMM_ERROR_NOT_SUPPORTED,
      "device: this build of fp4gemm has no CUDA kernels; build it with FP4GEMM_CUDA_ARCHS other than none");
}
}  // namespace

fp4gemm_status_t device_properties(int, DeviceProperties*) { return no_cuda(); }
DeviceGuard::DeviceGuard(int) : status_(no_cuda()) {}
DeviceGuard::~DeviceGuard() = default;
fp4gemm_status_t launch_quantize(fp4gemm_quantize_args_t const&, DeviceProperties const&, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_quantize_stack(fp4gemm_quantize_args_t const&, int, DeviceProperties const&,
                                       fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_quantize_searched(fp4gemm_quantize_searched_args_t const&, DeviceProperties const&,
                                          fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const&, DeviceProperties const&,
                                   fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_silu_and_mul_quantize(fp4gemm_silu_and_mul_quantize_args_t const&,
                                              DeviceProperties const&, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_rms_norm_quantize(fp4gemm_rms_norm_quantize_args_t const&, DeviceProperties const&,
                                          fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_mx_quantize(MxArgs const&, fp4gemm_stream_t) { return no_cuda(); }
fp4gemm_status_t launch_mx_dequantize(MxArgs const&, fp4gemm_stream_t) { return no_cuda(); }
fp4gemm_status_t launch_mx_decode(MxDecodeJob const&, fp4gemm_stream_t) { return no_cuda(); }
fp4gemm_status_t launch_expand_codes(int64_t, void const*, void*, fp4gemm_stream_t) { return no_cuda(); }
fp4gemm_status_t launch_decode(DecodeJob const&, DecodeJob const&, int64_t, DeviceProperties const&,
                               fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_prepack(int, int64_t, int64_t, void const*, void const*, void*, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_unprepack(int, int64_t, int64_t, void const*, void*, void*, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_prepack_fp8(int, int64_t, int64_t, void const*, void const*, void*,
                                    fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_unprepack_fp8(int, int64_t, int64_t, void const*, void*, void*, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_swizzle_scales(SwizzleJob const&, DeviceProperties const&, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_route(fp4gemm_route_args_t const&, DeviceProperties const&, void*, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_combine(fp4gemm_combine_args_t const&, DeviceProperties const&, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_zero_outside_groups(int64_t, int64_t, void*, int32_t const*, int,
                                            DeviceProperties const&, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_swiglu(fp4gemm_swiglu_args_t const&, DeviceProperties const&, fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_swiglu_backward(fp4gemm_swiglu_args_t const&, DeviceProperties const&,
                                        fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_quantize_records(fp4gemm_quantize_records_args_t const&, DeviceProperties const&,
                                         fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_make_records(fp4gemm_make_records_args_t const&, DeviceProperties const&,
                                     fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_gather_records(fp4gemm_gather_records_args_t const&, DeviceProperties const&,
                                       fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_combine_ranks(fp4gemm_combine_ranks_args_t const&, DeviceProperties const&,
                                      fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_combine_part(fp4gemm_combine_part_args_t const&, DeviceProperties const&,
                                     fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_combine_tree(fp4gemm_combine_tree_args_t const&, DeviceProperties const&,
                                     fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t launch_route_ranks(fp4gemm_route_ranks_args_t const&, DeviceProperties const&, void*,
                                    fp4gemm_stream_t) {
  return no_cuda();
}
fp4gemm_status_t load_generated(void const*, int, int, void**) { return no_cuda(); }
fp4gemm_status_t launch_nothing(fp4gemm_stream_t) { return no_cuda(); }

}  // namespace fp4gemm
