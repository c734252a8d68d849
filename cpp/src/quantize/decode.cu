// NVFP4 to the exact fp16 operand of a GEMM.
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

}  // namespace fp4gemm
