// NVFP4 back to numbers: decode to the exact fp16 operand of a GEMM, and dequantize.
#include "error.hpp"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // elements a thread reads (4 bytes) and writes (16 bytes of fp16) at a time
constexpr int kChunksPerThread = 4;

/// Where the chunk lies: its row, and its place in the row in units of kChunk elements.
struct ChunkPlace {
  int64_t row;
  int column;
};

__device__ inline ChunkPlace place_of(int64_t chunk, int chunks_per_row) {
  if (chunk <= 0x7FFFFFFF) {
    // 32-bit division is several times cheaper, and nearly all tensors stay below the limit.
    uint32_t const row = static_cast<uint32_t>(chunk) / static_cast<uint32_t>(chunks_per_row);
    return {row,
            static_cast<int>(static_cast<uint32_t>(chunk) - row * static_cast<uint32_t>(chunks_per_row))};
  }
  int64_t const row = chunk / chunks_per_row;
  return {row, static_cast<int>(chunk - row * chunks_per_row)};
}

struct DecodeParams {
  DecodeJob jobs[2];
  int64_t chunks[2];
  unsigned first_ctas;  // CTAs of the first job; the rest do the second
  int chunks_per_row;
  int num_words;
};

__device__ inline uint4 decode_chunk(uint32_t codes, uint8_t scale_bits) {
  __half2 const scale = __half2half2(e4m3_to_half(scale_bits));
  uint4 result;
  __half2* const pairs = reinterpret_cast<__half2*>(&result);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __hmul2(decode_e2m1_pair(codes >> (8 * i)), scale);
  }
  return result;
}

__global__ void __launch_bounds__(kThreads) decode(DecodeParams p) {
  bool const second = blockIdx.x >= p.first_ctas;
  // Fields one by one: an index into the parameters that is not constant would copy them to local memory.
  uint8_t const* const job_codes = second ? p.jobs[1].codes : p.jobs[0].codes;
  uint8_t const* const job_scales = second ? p.jobs[1].scales : p.jobs[0].scales;
  uint4* const job_y = static_cast<uint4*>(second ? p.jobs[1].y : p.jobs[0].y);
  int64_t const num_chunks = second ? p.chunks[1] : p.chunks[0];
  int64_t const cta = second ? blockIdx.x - p.first_ctas : blockIdx.x;
  int64_t const first = cta * (kThreads * kChunksPerThread) + threadIdx.x;

  uint32_t codes[kChunksPerThread];
  uint8_t scales[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    int64_t const chunk = first + i * kThreads;
    if (chunk < num_chunks) {
      ChunkPlace const place = place_of(chunk, p.chunks_per_row);
      codes[i] = __ldg(reinterpret_cast<uint32_t const*>(job_codes) + chunk);
      scales[i] = __ldg(job_scales + scale_offset(place.row, place.column * kChunk / kBlock, p.num_words));
    }
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    int64_t const chunk = first + i * kThreads;
    if (chunk < num_chunks) {
      job_y[chunk] = decode_chunk(codes[i], scales[i]);
    }
  }
}

template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

struct DequantizeParams {
  uint8_t const* codes;
  uint8_t const* scales;
  float const* amax;
  void* y;
  int64_t chunks;
  int chunks_per_row;
  int num_words;
  bool amax_per_row;
  float factor;  // fl(1 / (6 * e4m3_max))
};

template <class T>
__global__ void __launch_bounds__(kThreads) dequantize(DequantizeParams p) {
  int64_t const chunk = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (chunk >= p.chunks) {
    return;
  }
  ChunkPlace const place = place_of(chunk, p.chunks_per_row);
  uint32_t const codes = __ldg(reinterpret_cast<uint32_t const*>(p.codes) + chunk);
  uint8_t const scale_bits =
      __ldg(p.scales + scale_offset(place.row, place.column * kChunk / kBlock, p.num_words));
  float const amax = __ldg(p.amax + (p.amax_per_row ? place.row : 0));
  float const scale = __fmul_rn(__fmul_rn(__half2float(e4m3_to_half(scale_bits)), amax), p.factor);

  struct alignas(sizeof(T) * kChunk < 16 ? sizeof(T) * kChunk : 16) Chunk {
    T elements[kChunk];
  } result;
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    float2 const pair = __half22float2(decode_e2m1_pair(codes >> (8 * i)));
    result.elements[2 * i] = from_float<T>(__fmul_rn(pair.x, scale));
    result.elements[2 * i + 1] = from_float<T>(__fmul_rn(pair.y, scale));
  }
  static_cast<Chunk*>(p.y)[chunk] = result;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int num_words_of(int64_t k) { return static_cast<int>(ceil_div(k / kBlock, 4)); }

}  // namespace

fp4gemm_status_t launch_decode(DecodeJob const& first, DecodeJob const& second, int64_t k,
                               fp4gemm_stream_t stream) {
  int64_t const chunks_per_row = k / kChunk;
  DecodeParams params{};
  params.jobs[0] = first;
  params.jobs[1] = second;
  params.chunks_per_row = static_cast<int>(chunks_per_row);
  params.num_words = num_words_of(k);
  unsigned ctas[2];
  for (int i = 0; i < 2; ++i) {
    params.chunks[i] = params.jobs[i].rows * chunks_per_row;
    ctas[i] = static_cast<unsigned>(ceil_div(params.chunks[i], kThreads * kChunksPerThread));
  }
  params.first_ctas = ctas[0];
  if (ctas[0] + ctas[1] == 0) {
    return FP4GEMM_SUCCESS;
  }
  decode<<<ctas[0] + ctas[1], kThreads, 0, stream>>>(params);
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const& args, fp4gemm_stream_t stream) {
  int64_t const chunks_per_row = args.k / kChunk;
  DequantizeParams const params{args.codes,
                                args.scales,
                                args.amax,
                                args.y,
                                args.m * chunks_per_row,
                                static_cast<int>(chunks_per_row),
                                num_words_of(args.k),
                                args.scaling == FP4GEMM_SCALING_ROW,
                                1.0f / (6.0f * static_cast<float>(args.e4m3_max))};
  if (params.chunks == 0) {
    return FP4GEMM_SUCCESS;
  }
  auto const grid = static_cast<unsigned>(ceil_div(params.chunks, kThreads));
  switch (args.y_dtype) {
    case FP4GEMM_BF16: dequantize<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(params); break;
    case FP4GEMM_FP16: dequantize<__half><<<grid, kThreads, 0, stream>>>(params); break;
    case FP4GEMM_FP32: dequantize<float><<<grid, kThreads, 0, stream>>>(params); break;
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
