// MXFP8: blocks of 32 fp8 elements with one power-of-two scale, quantized and dequantized.
#include <cuda/std/type_traits>

#include "error.hpp"
#include "for_type.cuh"
#include "quantize/convert.cuh"
#include "quantize/grid.hpp"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kMxBlock = 32;
constexpr int kThreads = 128;

struct Mxfp8Params {
  void const* x;
  int64_t x_row_stride;
  void* y;
  int64_t m;
  int64_t k;
  uint8_t* values;
  uint8_t* scales;
  bool scales_are_compact;
  unsigned first_cta = 0;  // mxfp8_quantize_*: CTAs of the launches before, along the dimension that m sets
};

/// The offset of the scale of a block in a matrix with `columns` blocks in a row.
__device__ inline int64_t mx_scale_offset(int64_t row, int block, int columns, bool is_compact) {
  return is_compact ? row * columns + block : scale_offset(row, block, num_words_of(columns));
}

/// The exponent of the least power of two >= x, as e8m0. x is not negative; a NaN gives 255.
__device__ inline uint8_t float_to_e8m0_up(float x) {
  uint32_t const bits = __float_as_uint(x);
  uint32_t const exponent = bits >> 23;
  uint32_t const mantissa = bits & 0x7FFFFFu;
  if (exponent == 255) {
    return mantissa != 0 ? 255 : 254;
  }
  bool const is_up = mantissa != 0 && exponent != 254 && !(exponent == 0 && mantissa <= 0x400000u);
  return static_cast<uint8_t>(exponent + is_up);
}

/// 2^(power - 127), or NaN for 255.
__device__ inline float e8m0_to_float(int power) {
  return __uint_as_float(power == 0     ? 0x00400000u
                         : power == 255 ? 0x7FC00000u
                                        : static_cast<uint32_t>(power) << 23);
}

/// Quantizes a block to the fp8 format kFp8 and returns its scale as e8m0.
template <__nv_fp8_interpretation_t kFp8>
__device__ inline uint8_t quantize_mx_block(float const (&x)[kMxBlock], Chunk<uint8_t, kMxBlock>& values) {
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < kMxBlock; ++i) {
    amax = fmaxf(amax, fabsf(x[i]));  // drops NaN
  }
  uint8_t const scale =
      float_to_e8m0_up(__fmul_rn(amax, kFp8 == __NV_E4M3 ? 1.0f / 448.0f : 1.0f / 57344.0f));
  float const inverse = e8m0_to_float(254 - scale);
#pragma unroll
  for (int i = 0; i < kMxBlock; ++i) {
    float const scaled = __fmul_rn(x[i], inverse);
    uint8_t const value =
        kFp8 == __NV_E4M3 ? float_to_e4m3(scaled) : __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E5M2);
    values.elements[i] = x[i] != x[i] ? uint8_t{0x7F} : value;
  }
  return scale;
}

/// Quantizes along k, with a CTA for each row of x or of the padding of the scales.
///
/// @tparam T The type of x.
/// @tparam kFp8 The fp8 format of the result.
template <class T, __nv_fp8_interpretation_t kFp8>
__global__ void __launch_bounds__(kThreads) mxfp8_quantize_rows(Mxfp8Params p) {
  int64_t const row =
      p.first_cta + blockIdx.x;  // up to 2^31, the padding included: in 32 bits without a sign
  int const num_blocks = static_cast<int>(p.k / kMxBlock);
  int const num_scales = p.scales_are_compact ? num_blocks : kScaleWord * num_words_of(num_blocks);
  for (int block = static_cast<int>(threadIdx.x); block < num_scales; block += kThreads) {
    uint8_t scale = 0;
    if (row < p.m && block < num_blocks) {
      auto const* const vectors = reinterpret_cast<Chunk<T, 16 / sizeof(T)> const*>(
          static_cast<T const*>(p.x) + row * p.x_row_stride + int64_t{block} * kMxBlock);
      float x[kMxBlock];
      constexpr int kPerVector = 16 / static_cast<int>(sizeof(T));
#pragma unroll
      for (int i = 0; i < kMxBlock / kPerVector; ++i) {
        Chunk<T, kPerVector> const vector = vectors[i];
#pragma unroll
        for (int j = 0; j < kPerVector; ++j) {
          x[i * kPerVector + j] = static_cast<float>(vector.elements[j]);
        }
      }
      Chunk<uint8_t, kMxBlock> values;
      scale = quantize_mx_block<kFp8>(x, values);
      reinterpret_cast<Chunk<uint8_t, kMxBlock>*>(p.values)[row * num_blocks + block] = values;
    }
    p.scales[mx_scale_offset(row, block, num_blocks, p.scales_are_compact)] = scale;
  }
}

/// Quantizes along m into x^T, with a CTA for each 32 columns by 128 rows of x. A thread quantizes 32 rows of
/// a column, which is a block of x^T. Template parameters: as above.
template <class T, __nv_fp8_interpretation_t kFp8>
__global__ void __launch_bounds__(kThreads) mxfp8_quantize_columns(Mxfp8Params p) {
  int64_t const column = int64_t{blockIdx.x} * 32 + threadIdx.x % 32;
  int const block = static_cast<int>((p.first_cta + blockIdx.y) * 4 + threadIdx.x / 32);
  int const num_blocks = static_cast<int>(p.m / kMxBlock);
  uint8_t scale = 0;
  if (column < p.k && block < num_blocks) {
    T const* const first = static_cast<T const*>(p.x) + int64_t{block} * kMxBlock * p.x_row_stride + column;
    float x[kMxBlock];
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
      x[i] = static_cast<float>(first[i * p.x_row_stride]);
    }
    Chunk<uint8_t, kMxBlock> values;
    scale = quantize_mx_block<kFp8>(x, values);
    reinterpret_cast<Chunk<uint8_t, kMxBlock>*>(p.values)[column * num_blocks + block] = values;
  }
  if (!p.scales_are_compact || (column < p.k && block < num_blocks)) {
    p.scales[mx_scale_offset(column, block, num_blocks, p.scales_are_compact)] = scale;
  }
}

constexpr int kMxChunk = 8;  // elements that a thread of mxfp8_dequantize converts at a time

/// Dequantizes, with a CTA for each row.
///
/// @tparam T The type of the result.
/// @tparam kFp8 The fp8 format of the values.
template <class T, __nv_fp8_interpretation_t kFp8>
__global__ void __launch_bounds__(kThreads) mxfp8_dequantize(Mxfp8Params p) {
  int64_t const row = blockIdx.x;
  int const num_blocks = static_cast<int>(p.k / kMxBlock);
  int const num_chunks = static_cast<int>(p.k / kMxChunk);
  for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kThreads) {
    auto const values = reinterpret_cast<Chunk<uint8_t, kMxChunk> const*>(p.values)[row * num_chunks + chunk];
    float const scale = e8m0_to_float(
        p.scales[mx_scale_offset(row, chunk * kMxChunk / kMxBlock, num_blocks, p.scales_are_compact)]);
    Chunk<T, kMxChunk> result;
#pragma unroll
    for (int i = 0; i < kMxChunk; ++i) {
      float const value = __half2float(__half(__nv_cvt_fp8_to_halfraw(values.elements[i], kFp8)));
      result.elements[i] = from_float<T>(__fmul_rn(value, scale));
    }
    static_cast<Chunk<T, kMxChunk>*>(p.y)[row * num_chunks + chunk] = result;
  }
}

Mxfp8Params params_of(fp4gemm_mxfp8_args_t const& args) {
  return {args.x, args.x_row_stride, args.y,      args.m,
          args.k, args.values,       args.scales, args.scales_are_compact != 0};
}

/// Calls launch(T{}, fp8) for the type of x or y and the fp8 format as an integral_constant.
template <class Launch>
void for_types(fp4gemm_mxfp8_args_t const& args, Launch const& launch) {
  for_type(args.dtype, [&](auto type) {
    if (args.fp8 == FP4GEMM_E4M3) {
      launch(type, cuda::std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>{});
    } else {
      launch(type, cuda::std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>{});
    }
  });
}

}  // namespace

fp4gemm_status_t launch_mxfp8_quantize(fp4gemm_mxfp8_args_t const& args, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  Mxfp8Params params = params_of(args);
  for_types(args, [&](auto type, auto fp8) {
    using T = decltype(type);
    if (args.is_transposed != 0) {
      // Whole tiles of 128 x 4 scales.
      auto const width = static_cast<unsigned>(scale_rows_of(args.k) / 32);
      for_grid_parts(ceil_div(args.m, 4 * kMxBlock), kMaxGridY, [&](int64_t first, unsigned count) {
        params.first_cta = static_cast<unsigned>(first);
        mxfp8_quantize_columns<T, decltype(fp8)::value><<<dim3(width, count), kThreads, 0, stream>>>(params);
      });
    } else {
      int64_t const rows = args.scales_are_compact != 0 ? args.m : scale_rows_of(args.m);
      for_grid_parts(rows, kMaxGridX, [&](int64_t first, unsigned count) {
        params.first_cta = static_cast<unsigned>(first);
        mxfp8_quantize_rows<T, decltype(fp8)::value><<<count, kThreads, 0, stream>>>(params);
      });
    }
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_mxfp8_dequantize(fp4gemm_mxfp8_args_t const& args, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  Mxfp8Params const params = params_of(args);
  for_types(args, [&](auto type, auto fp8) {
    mxfp8_dequantize<decltype(type), decltype(fp8)::value>
        <<<static_cast<unsigned>(args.m), kThreads, 0, stream>>>(params);
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
