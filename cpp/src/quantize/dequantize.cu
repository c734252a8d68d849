// Dequantization of NVFP4 to fp32, bf16 or fp16.
#include <cuda/std/type_traits>

#include "error.hpp"
#include "quantize/convert.cuh"
#include "quantize/groups.cuh"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kQuad = 4;  // neighbouring rows that a thread dequantizes together

/// Elements that a thread converts at a time: 16 bytes of the output of type T.
template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));

struct DequantizeParams {
  uint8_t const* codes;
  uint8_t const* scales;
  float const* amax;
  void* y;
  int64_t m;
  int k;
  int num_words;  // of 4 scales in a row, padding included
  bool amax_per_row;
  bool scales_are_compact;
  float factor;  // fl(1 / (6 * e4m3_max))
  Groups groups;
};

/// The scale of a block in row `in_tile` of a tile. first_row is the row of y that the tile begins with.
__device__ inline uint8_t scale_at(DequantizeParams const& p, int64_t tile, int in_tile, int64_t first_row,
                                   int block) {
  int64_t const offset = p.scales_are_compact ? (first_row + in_tile) * (p.k / kBlock) + block
                                              : scale_offset(tile * 128 + in_tile, block, p.num_words);
  return __ldg(p.scales + offset);
}

/// Dequantizes to type T. threadIdx.x numbers the chunks of a row; threadIdx.y and blockIdx.x number quads of
/// rows of the scale buffer.
template <class T>
__global__ void __launch_bounds__(kThreads) dequantize(DequantizeParams p) {
  int64_t const quad = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  int64_t const tile = quad / 32;
  int const in_tile = static_cast<int>(quad % 32) * kQuad;
  TileRows rows{tile * 128, min(p.m - tile * 128, int64_t{128}), 0, 0};
  if (p.groups.offs != nullptr) {
    rows = find_tile(p.groups, p.m, tile);
  }
  int const count = static_cast<int>(rows.count);
  float amax[kQuad];
#pragma unroll
  for (int i = 0; i < kQuad; ++i) {
    bool const is_real = in_tile + i < count;
    amax[i] = is_real ? __ldg(p.amax + (p.amax_per_row ? rows.first + in_tile + i : 0)) : 0.0f;
  }
  using Codes = cuda::std::conditional_t<kChunk<T> == 8, uint32_t, uint16_t>;  // two a byte
  using Values = Chunk<T, kChunk<T>>;
  int const chunks_per_row = p.k / kChunk<T>;
  int64_t const first = (rows.first + in_tile) * chunks_per_row;
  auto const* const codes = reinterpret_cast<Codes const*>(p.codes) + first;
  auto* const y = static_cast<Values*>(p.y) + first;
  constexpr int kDeep = 2;  // chunks whose loads are in flight together
  int const width = static_cast<int>(blockDim.x);
  for (int start = static_cast<int>(threadIdx.x); start < chunks_per_row; start += kDeep * width) {
    uint32_t loaded[kDeep][kQuad];
    uint8_t scales[kDeep][kQuad];
#pragma unroll
    for (int c = 0; c < kDeep; ++c) {
      int const chunk = start + c * width;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        bool const is_real = in_tile + i < count && chunk < chunks_per_row;
        loaded[c][i] = is_real ? __ldg(codes + chunk + i * chunks_per_row) : 0;
        scales[c][i] =
            is_real ? scale_at(p, tile, in_tile + i, rows.first, chunk * kChunk<T> / kBlock) : uint8_t{0};
      }
    }
#pragma unroll
    for (int c = 0; c < kDeep; ++c) {
      int const chunk = start + c * width;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (in_tile + i < count && chunk < chunks_per_row) {
          float const scale_value = __half2float(e4m3_to_half(scales[c][i]));
          float const scale = __fmul_rn(__fmul_rn(scale_value, amax[i]), p.factor);
          Values result;
#pragma unroll
          for (int j = 0; j < kChunk<T> / 2; ++j) {
            float2 const pair = __half22float2(decode_e2m1_pair(loaded[c][i] >> (8 * j)));
            result.elements[2 * j] = from_float<T>(__fmul_rn(pair.x, scale));
            result.elements[2 * j + 1] = from_float<T>(__fmul_rn(pair.y, scale));
          }
          y[chunk + i * chunks_per_row] = result;
        }
      }
    }
  }
  if (p.groups.offs != nullptr) {
    // Rows of y behind the last group are zero. Each quad writes four of them.
    int64_t const first_outside = clamp_row(__ldg(p.groups.offs + p.groups.num - 1), p.m) + quad * kQuad;
    for (int64_t row = first_outside; row < min(first_outside + kQuad, p.m); ++row) {
      for (int chunk = static_cast<int>(threadIdx.x); chunk < chunks_per_row;
           chunk += static_cast<int>(blockDim.x)) {
        static_cast<Values*>(p.y)[row * chunks_per_row + chunk] = {};
      }
    }
  }
}

}  // namespace

fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const& args, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  int const chunks_per_row =
      static_cast<int>(args.k / (args.y_dtype == FP4GEMM_FP32 ? kChunk<float> : kChunk<__half>));
  DequantizeParams const params{args.codes,
                                args.scales,
                                args.amax,
                                args.y,
                                args.m,
                                static_cast<int>(args.k),
                                num_words_of(args.k / kBlock),
                                args.scaling == FP4GEMM_SCALING_ROW,
                                args.scales_are_compact != 0,
                                1.0f / (6.0f * static_cast<float>(args.e4m3_max)),
                                {args.offs, args.num_groups}};
  int64_t const scale_rows = scale_rows_of(args.m, args.offs, args.num_groups);
  unsigned width = 32;
  while (width < kThreads && static_cast<int>(width) < chunks_per_row) {
    width *= 2;
  }
  dim3 const block(width, kThreads / width);
  auto const grid = static_cast<unsigned>(scale_rows / kQuad / block.y);  // 32 quads a tile, block.y up to 8
  switch (args.y_dtype) {
    case FP4GEMM_BF16: dequantize<__nv_bfloat16><<<grid, block, 0, stream>>>(params); break;
    case FP4GEMM_FP16: dequantize<__half><<<grid, block, 0, stream>>>(params); break;
    case FP4GEMM_FP32: dequantize<float><<<grid, block, 0, stream>>>(params); break;
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
