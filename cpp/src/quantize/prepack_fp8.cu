// Rearrangement of NVFP4 weights into the order of the kernels for FP8 tokens, chunks of 64 rows by 128 along
// k (cutlass_evt/mainloop/nvfp4_fp8_packing.hpp), and back.
#include "cutlass_evt/mainloop/nvfp4_fp8_packing.hpp"
#include "error.hpp"
#include "quantize/grid.hpp"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

using Packing = cutlass_evt::Nvfp4Fp8Packing;

static_assert(Packing::kRows == kPrepackedChunk && Packing::kDepth == kPrepackedFp8Depth &&
                  Packing::kChunkBytes == kPrepackedFp8ChunkBytes,
              "sizes.hpp repeats these numbers for code that is compiled without CUTLASS");

constexpr int kThreads = 128;  // of a CTA, which has one chunk
constexpr int kHalves = Packing::kDepth / Packing::kPermuted;

struct Shape {
  int64_t n;
  int num_blocks;  // of 16 in a row
  int chunk_rows;  // of a matrix; of unprepack those of the padded scales
  int chunk_columns;
  int64_t stored_chunk_rows;  // of a matrix
  int64_t scale_bytes;        // of a matrix
};

/// What a thread rearranges: in each 64 along k of its chunk, one block of 16 in two rows.
struct Place {
  int64_t matrix;
  int64_t row;    // the first of the two rows, which are 8 apart
  int block;      // the first of the blocks, which are four apart
  int64_t chunk;  // among those of all matrices
  bool has_chunk;

  __device__ explicit Place(Shape const& shape) {
    int const thread = static_cast<int>(threadIdx.x);
    int const column = static_cast<int>(blockIdx.x % static_cast<unsigned>(shape.chunk_columns));
    int64_t const all_rows = blockIdx.x / static_cast<unsigned>(shape.chunk_columns);
    matrix = all_rows / shape.chunk_rows;
    int64_t const chunk_row = all_rows % shape.chunk_rows;
    row = chunk_row * Packing::kRows + thread / 32 * 16 + thread % 32 / 4;
    block = column * (Packing::kDepth / kBlock) + thread % 4;
    chunk = (matrix * shape.stored_chunk_rows + chunk_row) * shape.chunk_columns + column;
    has_chunk = chunk_row < shape.stored_chunk_rows;
  }
};

/// Writes the chunks of each matrix from its codes (n, num_blocks) and swizzled scales.
__global__ void __launch_bounds__(kThreads)
    prepack_fp8(Shape shape, uint2 const* codes, uint8_t const* scales, uint8_t* packed) {
  Place const place(shape);
  int const thread = static_cast<int>(threadIdx.x);
  uint8_t* const chunk = packed + place.chunk * Packing::kChunkBytes;
  uint32_t scale_word = 0;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    int const block = place.block + half * kScaleWord;
    uint32_t words[2][2] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t const row = place.row + 8 * i;
      if (row < shape.n && block < shape.num_blocks) {
        uint2 const sixteen = __ldg(codes + (place.matrix * shape.n + row) * shape.num_blocks + block);
        uint32_t const scale = __ldg(scales + place.matrix * shape.scale_bytes +
                                     scale_offset(row, block, num_words_of(shape.num_blocks)));
        uint32_t const flip = (scale >> 7) * 0x88888888u;
        words[i][0] = Packing::word_of(sixteen.x ^ flip);
        words[i][1] = Packing::word_of(sixteen.y ^ flip);
        scale_word |= (scale & 0x7Fu) << Packing::scale_shift(half, i);
      }
    }
    reinterpret_cast<uint4*>(chunk + half * (Packing::kCodeBytes / kHalves))[thread] = {
        words[0][0], words[0][1], words[1][0], words[1][1]};
  }
  reinterpret_cast<uint32_t*>(chunk + Packing::kCodeBytes)[thread] = scale_word;
}

/// The inverse of prepack_fp8. The padding of the scales becomes zero.
__global__ void __launch_bounds__(kThreads)
    unprepack_fp8(Shape shape, uint8_t const* packed, uint2* codes, uint8_t* scales) {
  Place const place(shape);
  int const thread = static_cast<int>(threadIdx.x);
  uint8_t const* const chunk = packed + place.chunk * Packing::kChunkBytes;
  uint32_t const scale_word =
      place.has_chunk ? __ldg(reinterpret_cast<uint32_t const*>(chunk + Packing::kCodeBytes) + thread) : 0;
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    int const block = place.block + half * kScaleWord;
    if (block >= shape.num_blocks) {
      continue;
    }
    uint4 const words =
        place.has_chunk
            ? __ldg(reinterpret_cast<uint4 const*>(chunk + half * (Packing::kCodeBytes / kHalves)) + thread)
            : uint4{0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t const row = place.row + 8 * i;
      bool const is_inside = row < shape.n;
      uint32_t const scale = is_inside ? scale_word >> Packing::scale_shift(half, i) & 0x7Fu : 0;
      scales[place.matrix * shape.scale_bytes + scale_offset(row, block, num_words_of(shape.num_blocks))] =
          static_cast<uint8_t>(scale);
      if (is_inside) {
        codes[(place.matrix * shape.n + row) * shape.num_blocks + block] = {
            Packing::codes_of(i == 0 ? words.x : words.z), Packing::codes_of(i == 0 ? words.y : words.w)};
      }
    }
  }
}

/// The shape of the launch, whose CTAs cover `rows` rows of each matrix.
Shape shape_of(int64_t n, int64_t k, int64_t rows) {
  int const num_blocks = static_cast<int>(k / kBlock);
  return {n,
          num_blocks,
          static_cast<int>(Packing::row_chunks(rows)),
          static_cast<int>(Packing::depth_chunks(k)),
          Packing::row_chunks(n),
          scale_rows_of(n) * num_words_of(num_blocks) * kScaleWord};
}

int64_t num_ctas(int num_matrices, Shape const& shape) {
  return int64_t{num_matrices} * shape.chunk_rows * shape.chunk_columns;
}

}  // namespace

fp4gemm_status_t launch_prepack_fp8(int num_matrices, int64_t n, int64_t k, void const* codes,
                                    void const* scales, void* packed, fp4gemm_stream_t stream) {
  Shape const shape = shape_of(n, k, n);
  int64_t const ctas = num_ctas(num_matrices, shape);
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("prepack_fp8", ctas));
  prepack_fp8<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(shape, static_cast<uint2 const*>(codes),
                                                                    static_cast<uint8_t const*>(scales),
                                                                    static_cast<uint8_t*>(packed));
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_unprepack_fp8(int num_matrices, int64_t n, int64_t k, void const* packed, void* codes,
                                      void* scales, fp4gemm_stream_t stream) {
  Shape const shape = shape_of(n, k, scale_rows_of(n));
  int64_t const ctas = num_ctas(num_matrices, shape);
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("unprepack_fp8", ctas));
  unprepack_fp8<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
      shape, static_cast<uint8_t const*>(packed), static_cast<uint2*>(codes), static_cast<uint8_t*>(scales));
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
