// SwiGLU of two matrices and its gradients. training.h has the definition.
//
// A CTA has a row. A thread has chunks of 8 elements, kThreads chunks apart, so that the sum over a row has
// the order of the definition with any number of columns.
#include "cutlass_evt/epilogue/activation.hpp"
#include "error.hpp"
#include "launch.hpp"
#include "quantize/block.cuh"
#include "quantize/row_reduce.cuh"
#include "quantize/silu.cuh"
#include "training/training.hpp"

namespace fp4gemm {
namespace {

constexpr int kThreads = 128;  // of a CTA
constexpr int kPairs = kSwigluStep / 2;

/// A matrix whose rows are row_stride chunks apart.
struct Rows {
  void const* data;
  int64_t row_stride;

  __device__ uint4 const* row(int64_t i) const { return static_cast<uint4 const*>(data) + i * row_stride; }
};

struct SwigluParams {
  Rows gate;
  Rows up;
  Rows dy;
  float const* weights;  // null: ones
  uint4* y;
  uint4* dgate;
  uint4* dup;
  float* dweights;
  int chunks;  // of a row
};

/// 8 elements of T, two in each word.
union Chunk8 {
  uint4 vector;
  uint32_t pairs[kPairs];
};

template <class T>
__device__ float2 unpacked(uint32_t pair) {
  if constexpr (cuda::std::is_same_v<T, __half>) {
    return __half22float2(reinterpret_cast<__half2 const&>(pair));
  } else {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u)};
  }
}

/// Two products of fp32 numbers, each rounded to fp32 and then to T.
template <class T>
__device__ uint32_t packed_products(float2 a, float2 b) {
  return pack_pair<T>(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y));
}

/// D of training.h, the derivative of silu.
__device__ float silu_slope(float g) {
  float const q = cutlass_evt::nodes::times_logistic(1.0f, g);
  // Where e(g) is clamped, q stays at 2e-38 and the product with a large g would be no small number.
  return g < -87.0f ? 0.0f : __fmul_rn(q, __fadd_rn(1.0f, __fmul_rn(g, __fsub_rn(1.0f, q))));
}

template <class T>
__device__ uint32_t silu_pair(float2 g) {
  return pack_pair<T>(silu(g.x), silu(g.y));
}

template <class T, bool kWeighted>
__global__ void __launch_bounds__(kThreads) swiglu_forward(SwigluParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int64_t const row = blockIdx.x;
  float const weight = kWeighted ? load_after_wait(p.weights + row) : 1.0f;
  for (int chunk = static_cast<int>(threadIdx.x); chunk < p.chunks; chunk += kThreads) {
    Chunk8 const gate{load_after_wait(p.gate.row(row) + chunk)};
    Chunk8 const up{load_after_wait(p.up.row(row) + chunk)};
    Chunk8 y;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      uint32_t const s = silu_pair<T>(unpacked<T>(gate.pairs[i]));
      y.pairs[i] = packed_products<T>(unpacked<T>(s), unpacked<T>(up.pairs[i]));
      if constexpr (kWeighted) {
        y.pairs[i] = packed_products<T>(unpacked<T>(y.pairs[i]), {weight, weight});
      }
    }
    p.y[row * p.chunks + chunk] = y.vector;
  }
}

template <class T, bool kWeighted>
__global__ void __launch_bounds__(kThreads) swiglu_backward(SwigluParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int64_t const row = blockIdx.x;
  float const weight = kWeighted ? load_after_wait(p.weights + row) : 1.0f;
  float sum[1] = {};
  for (int chunk = static_cast<int>(threadIdx.x); chunk < p.chunks; chunk += kThreads) {
    Chunk8 const dy{load_after_wait(p.dy.row(row) + chunk)};
    Chunk8 const gate{load_after_wait(p.gate.row(row) + chunk)};
    Chunk8 const up{load_after_wait(p.up.row(row) + chunk)};
    Chunk8 dgate;
    Chunk8 dup;
    float terms[kSwigluStep];
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      float2 const d = unpacked<T>(dy.pairs[i]);
      float2 const g = unpacked<T>(gate.pairs[i]);
      float2 const u = unpacked<T>(up.pairs[i]);
      float2 const s = unpacked<T>(silu_pair<T>(g));
      float2 dh = d;
      if constexpr (kWeighted) {
        float2 const h = unpacked<T>(packed_products<T>(s, u));
        terms[2 * i] = __fmul_rn(d.x, h.x);
        terms[2 * i + 1] = __fmul_rn(d.y, h.y);
        dh = unpacked<T>(packed_products<T>(d, {weight, weight}));
      }
      dup.pairs[i] = packed_products<T>(dh, s);
      float2 const ds = unpacked<T>(packed_products<T>(dh, u));
      dgate.pairs[i] = packed_products<T>(ds, {silu_slope(g.x), silu_slope(g.y)});
    }
    if constexpr (kWeighted) {
      fold_by_halves<kSwigluStep / 2>(terms);
      sum[0] = __fadd_rn(sum[0], terms[0]);
    }
    p.dgate[row * p.chunks + chunk] = dgate.vector;
    p.dup[row * p.chunks + chunk] = dup.vector;
  }
  if constexpr (kWeighted) {
    float const total = row_sum<kThreads, 1>(sum, 0);
    if (threadIdx.x == 0) {
      p.dweights[row] = total;
    }
  }
}

SwigluParams params_of(fp4gemm_swiglu_args_t const& args) {
  SwigluParams params{};
  params.gate = {args.gate, args.gate_row_stride / kSwigluStep};
  params.up = {args.up, args.up_row_stride / kSwigluStep};
  params.dy = {args.dy, args.dy_row_stride / kSwigluStep};
  params.weights = args.weights;
  params.y = static_cast<uint4*>(args.y);
  params.dgate = static_cast<uint4*>(args.dgate);
  params.dup = static_cast<uint4*>(args.dup);
  params.dweights = args.dweights;
  params.chunks = static_cast<int>(args.f / kSwigluStep);
  return params;
}

using Kernel = void (*)(SwigluParams);

/// Launches the kernel for the type and, the second of each pair, with weights.
fp4gemm_status_t launch(fp4gemm_swiglu_args_t const& args, Kernel const (&of_bf16)[2],
                        Kernel const (&of_fp16)[2], DeviceProperties const& properties,
                        fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  Kernel const kernel = (args.dtype == FP4GEMM_BF16 ? of_bf16 : of_fp16)[args.weights != nullptr];
  FP4GEMM_CUDA(launch_waiting(kernel, {static_cast<unsigned>(args.m), kThreads},
                              properties.can_overlap_launches(), stream, params_of(args)));
  return FP4GEMM_SUCCESS;
}

}  // namespace

fp4gemm_status_t launch_swiglu(fp4gemm_swiglu_args_t const& args, DeviceProperties const& properties,
                               fp4gemm_stream_t stream) {
  return launch(args, {swiglu_forward<__nv_bfloat16, false>, swiglu_forward<__nv_bfloat16, true>},
                {swiglu_forward<__half, false>, swiglu_forward<__half, true>}, properties, stream);
}

fp4gemm_status_t launch_swiglu_backward(fp4gemm_swiglu_args_t const& args, DeviceProperties const& properties,
                                        fp4gemm_stream_t stream) {
  return launch(args, {swiglu_backward<__nv_bfloat16, false>, swiglu_backward<__nv_bfloat16, true>},
                {swiglu_backward<__half, false>, swiglu_backward<__half, true>}, properties, stream);
}

}  // namespace fp4gemm
