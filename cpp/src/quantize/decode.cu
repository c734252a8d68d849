// Decoding of NVFP4 to fp16 values, code times block scale, which a GEMM uses as its operand. They are exact.
#include "error.hpp"
#include "quantize/grid.hpp"
#include "quantize/groups.cuh"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kThreads = 256;
constexpr int kChunk = 8;  // elements that a thread reads (4 bytes) and writes (16 bytes of fp16) at a time
constexpr int kChunksPerThread = 4;

/// The position of a chunk: its row, and its column in units of kChunk elements.
struct ChunkPlace {
  int64_t row;
  int column;
};

__device__ inline ChunkPlace place_of(int64_t chunk, int chunks_per_row) {
  if (chunk <= 0x7FFFFFFF) {
    // 32-bit division is several times faster, and nearly all tensors are small enough for it.
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
  unsigned first_ctas;  // CTAs of the first job; the other CTAs do the second
  int chunks_per_row;
  int num_words;
  unsigned ctas_per_tile;  // CTAs for the 128 rows of a tile of scales, in a job of groups
};

/// Decodes up to two operands.
///
/// @tparam kPlain Whether each job is one matrix, without groups and without padding between matrices.
template <bool kPlain>
__global__ void __launch_bounds__(kThreads) decode(DecodeParams p) {
  bool const second = blockIdx.x >= p.first_ctas;
  // The fields are selected one by one: indexing the parameters with a variable would copy them to local
  // memory.
  uint32_t const* job_codes = reinterpret_cast<uint32_t const*>(second ? p.jobs[1].codes : p.jobs[0].codes);
  uint8_t const* const job_scales = second ? p.jobs[1].scales : p.jobs[0].scales;
  uint4* job_y = static_cast<uint4*>(second ? p.jobs[1].y : p.jobs[0].y);
  int64_t num_chunks = second ? p.chunks[1] : p.chunks[0];
  unsigned cta = second ? blockIdx.x - p.first_ctas : blockIdx.x;
  int64_t first_scale_row = 0;
  int64_t rows_per_matrix = 0;
  if constexpr (!kPlain) {
    rows_per_matrix = second ? p.jobs[1].rows_per_matrix : p.jobs[0].rows_per_matrix;
    Groups const groups =
        second ? Groups{p.jobs[1].offs, p.jobs[1].num_groups} : Groups{p.jobs[0].offs, p.jobs[0].num_groups};
    if (groups.offs != nullptr) {
      // From here on the job is the rows of one tile.
      unsigned const tile = cta / p.ctas_per_tile;
      cta -= tile * p.ctas_per_tile;
      TileRows const rows = find_tile(groups, second ? p.jobs[1].rows : p.jobs[0].rows, tile);
      job_codes += rows.first * p.chunks_per_row;
      job_y += rows.first * p.chunks_per_row;
      num_chunks = rows.count * p.chunks_per_row;
      first_scale_row = int64_t{tile} * kScaleTileRows;
    }
  }
  int64_t const first = int64_t{cta} * (kThreads * kChunksPerThread) + threadIdx.x;

  uint32_t codes[kChunksPerThread];
  uint8_t scales[kChunksPerThread];
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    int64_t const chunk = first + i * kThreads;
    if (chunk < num_chunks) {
      ChunkPlace const place = place_of(chunk, p.chunks_per_row);
      int64_t scale_row = first_scale_row + place.row;
      if constexpr (!kPlain) {
        if (rows_per_matrix != 0) {
          // The scales begin behind the padding of the matrices before. Sizes are below 2^31.
          auto const length = static_cast<uint32_t>(rows_per_matrix);
          uint32_t const padding = (length + kScaleTileRows - 1) / kScaleTileRows * kScaleTileRows - length;
          scale_row += int64_t{static_cast<uint32_t>(place.row) / length} * padding;
        }
      }
      codes[i] = __ldg(job_codes + chunk);
      scales[i] = __ldg(job_scales + scale_offset(scale_row, place.column * kChunk / kBlock, p.num_words));
    }
  }
#pragma unroll
  for (int i = 0; i < kChunksPerThread; ++i) {
    int64_t const chunk = first + i * kThreads;
    if (chunk < num_chunks) {
      job_y[chunk] = decode_eight(codes[i], scales[i]);
    }
  }
}

}  // namespace

fp4gemm_status_t launch_decode(DecodeJob const& first, DecodeJob const& second, int64_t k,
                               fp4gemm_stream_t stream) {
  constexpr int kCtaChunks = kThreads * kChunksPerThread;
  int64_t const chunks_per_row = k / kChunk;
  DecodeParams params{};
  params.jobs[0] = first;
  params.jobs[1] = second;
  params.chunks_per_row = static_cast<int>(chunks_per_row);
  params.num_words = num_words_of(k / kBlock);
  params.ctas_per_tile = static_cast<unsigned>(ceil_div(kScaleTileRows * chunks_per_row, kCtaChunks));
  bool is_plain = true;
  int64_t ctas[2];
  for (int i = 0; i < 2; ++i) {
    DecodeJob& job = params.jobs[i];
    if (job.rows_per_matrix % kScaleTileRows == 0) {
      job.rows_per_matrix = 0;  // no padding between the matrices
    }
    params.chunks[i] = job.rows * chunks_per_row;
    ctas[i] = ceil_div(params.chunks[i], kCtaChunks);
    if (job.offs != nullptr) {
      ctas[i] = fp4gemm_grouped_scale_rows(job.rows, job.num_groups) / kScaleTileRows * params.ctas_per_tile;
    }
    is_plain = is_plain && job.offs == nullptr && job.rows_per_matrix == 0;
  }
  int64_t const all_ctas = ctas[0] + ctas[1];
  if (all_ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("decode", all_ctas));
  params.first_ctas = static_cast<unsigned>(ctas[0]);
  auto const grid = static_cast<unsigned>(all_ctas);
  if (is_plain) {
    decode<true><<<grid, kThreads, 0, stream>>>(params);
  } else {
    decode<false><<<grid, kThreads, 0, stream>>>(params);
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
