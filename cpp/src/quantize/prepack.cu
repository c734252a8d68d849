// Rearrangement of NVFP4 weights into the order in which Hopper's kernels stream them, chunks of 64 x 64
// elements (cutlass_evt/mainloop/nvfp4_packing.hpp), and back.
#include "cutlass_evt/mainloop/nvfp4_packing.hpp"
#include "error.hpp"
#include "quantize/grid.hpp"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

using cutlass_evt::Nvfp4Packing;

static_assert(Nvfp4Packing::kRows == kPrepackedChunk && Nvfp4Packing::kDepth == kPrepackedChunk &&
                  Nvfp4Packing::kChunkBytes == kPrepackedChunkBytes,
              "quantize.hpp repeats these numbers for code that is compiled without CUTLASS");

constexpr bool scale_codes_have_an_inverse() {
  for (uint32_t e4m3 = 0; e4m3 < 128; ++e4m3) {
    if (Nvfp4Packing::scale_of(Nvfp4Packing::scale_code(e4m3)) != e4m3) {
      return false;
    }
  }
  return true;
}
static_assert(scale_codes_have_an_inverse(), "each of the 127 scales and NaN is recovered");

__constant__ cutlass_evt::Nvfp4WordTable word_table{};

// A CTA rearranges 128 rows, the height of a tile of scales, by 256 elements of k, which are 128 bytes of
// codes in each row. Each of its eight warps has one chunk.
constexpr int kThreads = 256;
constexpr int kTileChunkRows = 2;
constexpr int kTileChunkColumns = 4;
constexpr int kTileRows = kTileChunkRows * Nvfp4Packing::kRows;
constexpr int kChunkBlocks = Nvfp4Packing::kDepth / kBlock;
constexpr int kTileBlocks = kTileChunkColumns * kChunkBlocks;
constexpr int kTileTurns = kTileRows * kTileBlocks / kThreads;
constexpr int kStagedBlocks =
    kTileBlocks + 1;           // of a row, so that eight rows of a block are in different banks
constexpr int kWarpTurns = 4;  // a lane has one of the chunk's 128 shares of 16 bytes in each
static_assert(kTileChunkRows * kTileChunkColumns * 32 == kThreads, "a warp for each chunk");
static_assert(kTileRows == kScaleTileRows && kChunkBlocks == kScaleWord,
              "a tile of scales has the scales of two chunks, one above the other");

struct PackShape {
  int64_t n;
  int64_t num_blocks;     // of 16 in a row
  int64_t chunk_rows;     // of a matrix
  int64_t chunk_columns;  // also the number of tiles of scales side by side
  unsigned tile_rows;     // CTAs of a matrix, one above the other
  unsigned tile_columns;
};

/// What a CTA rearranges, and which chunk of it this warp does.
struct PackPlace {
  int64_t matrix;
  int64_t first_row;
  int64_t first_block;
  int64_t chunk;       // of the warp, among those of all matrices
  int64_t scale_tile;  // likewise
  int64_t warp_row;    // the first row of the warp's chunk
  int64_t warp_block;
  int tile_chunk_row;  // position of the warp's chunk among those of the CTA
  int tile_chunk_column;
  bool has_scales;  // the warp's part of a tile of scales exists
  bool has_chunk;   // the warp's chunk exists too

  __device__ explicit PackPlace(PackShape const& shape) {
    unsigned const stripe = blockIdx.x / shape.tile_columns;
    unsigned const column = blockIdx.x - stripe * shape.tile_columns;
    unsigned const row = stripe % shape.tile_rows;
    matrix = stripe / shape.tile_rows;
    first_row = int64_t{row} * kTileRows;
    first_block = int64_t{column} * kTileBlocks;
    int const warp = static_cast<int>(threadIdx.x / 32);
    tile_chunk_row = warp / kTileChunkColumns;
    tile_chunk_column = warp % kTileChunkColumns;
    int64_t const chunk_row = int64_t{row} * kTileChunkRows + tile_chunk_row;
    int64_t const chunk_column = int64_t{column} * kTileChunkColumns + tile_chunk_column;
    warp_row = chunk_row * Nvfp4Packing::kRows;
    warp_block = chunk_column * kChunkBlocks;
    has_scales = chunk_column < shape.chunk_columns;
    has_chunk = has_scales && chunk_row < shape.chunk_rows;
    chunk = (matrix * shape.chunk_rows + chunk_row) * shape.chunk_columns + chunk_column;
    scale_tile = int64_t{stripe} * shape.chunk_columns + chunk_column;
  }
};

/// The first of the two rows of the chunk, 8 apart, whose scales this lane rearranges.
__device__ inline int scale_row_of(int lane) { return lane / 8 * 16 + lane % 8; }

/// The index in their tile of the word that holds the scales of a row of the chunk.
__device__ inline int scale_word_of(int tile_chunk_row, int row) {
  return row % 32 * 4 + tile_chunk_row * 2 + row / 32;
}

/// The word of scales with those beyond the matrix set to zero.
__device__ inline uint32_t masked_scales(uint32_t word, PackShape const& shape, int64_t row, int64_t block) {
  int64_t const blocks = row < shape.n ? shape.num_blocks - block : 0;
  return blocks >= kScaleWord ? word : blocks <= 0 ? 0u : word & ((1u << (8 * blocks)) - 1);
}

/// Sixteen codes times the sign of the scale of their block, which is the top bit of byte `block` of signs.
__device__ inline uint2 with_sign(uint2 codes, uint32_t signs, int block) {
  uint32_t const flip = (signs >> (8 * block + 7) & 1u) * 0x88888888u;
  return {codes.x ^ flip, codes.y ^ flip};
}

/// The word at a byte offset in a row of the table.
__device__ inline uint32_t entry(uint32_t const (&row)[16], uint32_t offset) {
  return *reinterpret_cast<uint32_t const*>(reinterpret_cast<char const*>(row) + offset);
}

/// Four scales without signs as the bytes that a chunk stores.
__device__ inline uint32_t scale_codes(uint32_t word) {
  uint32_t const normal = word + 0x78787878u;
  if ((normal & 0x80808080u) == 0x80808080u && ((word + 0x01010101u) & 0x80808080u) == 0) {
    return normal;  // each is at least 8 and no NaN
  }
  uint32_t codes = 0;
#pragma unroll
  for (int block = 0; block < kScaleWord; ++block) {
    codes |= Nvfp4Packing::scale_code(word >> (8 * block) & 0xFFu) << (8 * block);
  }
  return codes;
}

/// Transposes bytes among four adjacent lanes: byte i of a word of lane j, counted in the four, becomes byte
/// j of the same word of lane i.
class ByteTranspose {
 public:
  __device__ explicit ByteTranspose(int lane) {
    bool const upper = lane % 4 >= 2;
    bool const odd = lane % 2 != 0;
    give_half_ = upper ? 0x5410u : 0x7632u;
    take_half_[0] = upper ? 0x3254u : 0x5410u;
    take_half_[1] = upper ? 0x3276u : 0x7610u;
    give_byte_ = odd ? 0x6420u : 0x7531u;
    take_byte_[0] = odd ? 0x3514u : 0x5240u;
    take_byte_[1] = odd ? 0x3716u : 0x7260u;
  }

  /// All lanes of a warp must call it.
  __device__ void operator()(uint32_t& a, uint32_t& b) const {
    uint32_t const half = __shfl_xor_sync(0xFFFFFFFFu, __byte_perm(a, b, give_half_), 2);
    a = __byte_perm(a, half, take_half_[0]);
    b = __byte_perm(b, half, take_half_[1]);
    uint32_t const byte = __shfl_xor_sync(0xFFFFFFFFu, __byte_perm(a, b, give_byte_), 1);
    a = __byte_perm(a, byte, take_byte_[0]);
    b = __byte_perm(b, byte, take_byte_[1]);
  }

 private:
  // Selectors. A lane exchanges halves of both words with the lane that is two away, then bytes with its
  // neighbour.
  uint32_t give_half_, take_half_[2];
  uint32_t give_byte_, take_byte_[2];
};

/// Writes the chunks of each matrix from its codes (n, num_blocks) and swizzled scales.
///
/// A warp rearranges a chunk by itself, in four turns of 16 rows. A lane loads the codes of a block in two
/// rows, of which it keeps a byte of each word, as do the three lanes that have the other blocks of these
/// rows: the four transpose the bytes of their words.
__global__ void __launch_bounds__(kThreads)
    prepack(PackShape shape, uint2 const* codes, uint32_t const* scales, uint8_t* packed) {
  __shared__ uint32_t table[8][16];
  if (threadIdx.x < 8 * 16) {
    table[threadIdx.x / 16][threadIdx.x % 16] = word_table.words[threadIdx.x / 16][threadIdx.x % 16];
  }
  PackPlace const place(shape);
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const in_chunk = lane % kChunkBlocks;  // the block that the lane loads
  uint2 rows[kWarpTurns][2];                 // of it in rows r and r + 8
  if (place.has_chunk) {
    static_assert(Nvfp4Packing::row_of(32 + 7, 0) == 16 + 7 / kChunkBlocks && kChunkBlocks == 4,
                  "four lanes share two rows of a turn");
    int64_t const block = place.warp_block + in_chunk;
#pragma unroll
    for (int i = 0; i < 2 * kWarpTurns; ++i) {
      int64_t const row = place.warp_row + i * 8 + lane / kChunkBlocks;
      bool const is_inside = row < shape.n && block < shape.num_blocks;
      rows[i / 2][i % 2] =
          is_inside ? __ldg(codes + (place.matrix * shape.n + row) * shape.num_blocks + block) : uint2{0, 0};
    }
  }
  __syncthreads();  // the table is in shared memory
  if (!place.has_chunk) {
    return;
  }

  uint8_t* const chunk = packed + place.chunk * Nvfp4Packing::kChunkBytes;
  uint32_t words[2];
  uint32_t signs[2];  // of the scales, one in each byte
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int const row = scale_row_of(lane) + 8 * i;
    uint32_t const word =
        masked_scales(__ldg(scales + place.scale_tile * (512 / 4) + scale_word_of(place.tile_chunk_row, row)),
                      shape, place.warp_row + row, place.warp_block);
    signs[i] = word & 0x80808080u;
    words[i] = scale_codes(word & 0x7F7F7F7Fu);
  }
  static_assert(Nvfp4Packing::scale_pair(17) == 9, "a pair of words for each row of every other eight");
  reinterpret_cast<uint2*>(chunk + Nvfp4Packing::kCodeBytes)[lane] = {
      Nvfp4Packing::scale_word(words[0], words[1]), Nvfp4Packing::scale_word(words[0] >> 16, words[1] >> 16)};
  if (__any_sync(0xFFFFFFFFu, (signs[0] | signs[1]) != 0)) {
#pragma unroll
    for (int i = 0; i < kWarpTurns; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // Lane 8 * i + r has the scales of rows 16 * i + r and 8 behind it.
        uint32_t const sign = __shfl_sync(0xFFFFFFFFu, signs[j], 8 * i + lane / kChunkBlocks);
        rows[i][j] = with_sign(rows[i][j], sign, in_chunk);
      }
    }
  }

  ByteTranspose const transpose(lane);
#pragma unroll
  for (int i = 0; i < kWarpTurns; ++i) {
    // Two neighbouring codes are a byte: first those of both rows, then those of the second half of the
    // block.
    uint32_t pairs[4] = {rows[i][0].x, rows[i][1].x, rows[i][0].y, rows[i][1].y};
    transpose(pairs[0], pairs[1]);
    transpose(pairs[2], pairs[3]);
    uint32_t share[Nvfp4Packing::kWordsPerThread] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      // Four times the codes of each block, which are offsets in the table.
      uint32_t const first = pairs[pair] << 2 & 0x3C3C3C3Cu;
      uint32_t const second = pairs[pair] >> 2 & 0x3C3C3C3Cu;
#pragma unroll
      for (int w = 0; w < Nvfp4Packing::kWordsPerThread; ++w) {
        // One row of the table is 16 banks, so that no two lanes conflict.
        share[w] ^= entry(table[2 * pair], __byte_perm(first, 0, 0x4440u + w)) ^
                    entry(table[2 * pair + 1], __byte_perm(second, 0, 0x4440u + w));
      }
    }
    reinterpret_cast<uint4*>(chunk)[i * 32 + lane] = {share[0], share[1], share[2], share[3]};
  }
}

/// The inverse of prepack.
__global__ void __launch_bounds__(kThreads)
    unprepack(PackShape shape, uint8_t const* packed, uint2* codes, uint32_t* scales) {
  __shared__ uint2 staged[kTileRows][kStagedBlocks];
  PackPlace const place(shape);
  int const lane = static_cast<int>(threadIdx.x % 32);
  uint8_t const* const chunk = packed + place.chunk * Nvfp4Packing::kChunkBytes;
  if (place.has_chunk) {
    uint4 shares[kWarpTurns];
#pragma unroll
    for (int i = 0; i < kWarpTurns; ++i) {
      shares[i] = __ldg(reinterpret_cast<uint4 const*>(chunk) + i * 32 + lane);
    }
#pragma unroll
    for (int i = 0; i < kWarpTurns; ++i) {
      int const thread = i * 32 + lane;
      int const row = place.tile_chunk_row * Nvfp4Packing::kRows + Nvfp4Packing::row_of(thread, 0);
      uint32_t const share[Nvfp4Packing::kWordsPerThread] = {shares[i].x, shares[i].y, shares[i].z,
                                                             shares[i].w};
#pragma unroll
      for (int w = 0; w < Nvfp4Packing::kWordsPerThread; ++w) {
        int const block = place.tile_chunk_column * kChunkBlocks + w;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          uint32_t const byte =
              Nvfp4Packing::code_of(share[w], 2 * pair) | Nvfp4Packing::code_of(share[w], 2 * pair + 1) << 4;
          int const half = pair / 2;
          auto* const bytes = reinterpret_cast<uint8_t*>(&staged[row + pair % 2 * 8][block]);
          bytes[half * 4 + Nvfp4Packing::depth_of(thread, 0) / 2] = static_cast<uint8_t>(byte);
        }
      }
    }
  }
  if (place.has_scales) {
    // If the chunk does not exist, its half of the tile is padding.
    uint2 const both = place.has_chunk
                           ? __ldg(reinterpret_cast<uint2 const*>(chunk + Nvfp4Packing::kCodeBytes) + lane)
                           : uint2{0, 0};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = scale_row_of(lane) + 8 * i;
      uint32_t word = 0;
#pragma unroll
      for (int block = 0; block < kScaleWord; ++block) {
        uint32_t const bits = Nvfp4Packing::scale_bits(block < 2 ? both.x : both.y, block);
        word |= Nvfp4Packing::scale_of(bits >> (i * 16 + 7) & 255u) << (8 * block);
      }
      scales[place.scale_tile * (512 / 4) + scale_word_of(place.tile_chunk_row, row)] =
          masked_scales(word, shape, place.warp_row + row, place.warp_block);
    }
  }
  __syncthreads();  // the codes of the CTA are in shared memory
#pragma unroll
  for (int i = 0; i < kTileTurns; ++i) {
    int const index = i * kThreads + static_cast<int>(threadIdx.x);
    int64_t const row = place.first_row + index / kTileBlocks;
    int64_t const block = place.first_block + index % kTileBlocks;
    if (row < shape.n && block < shape.num_blocks) {
      codes[(place.matrix * shape.n + row) * shape.num_blocks + block] =
          staged[index / kTileBlocks][index % kTileBlocks];
    }
  }
}

__global__ void nothing() {}

PackShape shape_of(int64_t n, int64_t k) {
  int64_t const chunk_rows = Nvfp4Packing::row_chunks(n);
  int64_t const chunk_columns = Nvfp4Packing::depth_chunks(k);
  return {n,
          k / kBlock,
          chunk_rows,
          chunk_columns,
          static_cast<unsigned>(ceil_div(chunk_rows, kTileChunkRows)),
          static_cast<unsigned>(ceil_div(chunk_columns, kTileChunkColumns))};
}

}  // namespace

fp4gemm_status_t launch_prepack(int num_matrices, int64_t n, int64_t k, void const* codes, void const* scales,
                                void* packed, fp4gemm_stream_t stream) {
  PackShape const shape = shape_of(n, k);
  int64_t const ctas = int64_t{num_matrices} * shape.tile_rows * shape.tile_columns;
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("prepack", ctas));
  prepack<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(shape, static_cast<uint2 const*>(codes),
                                                                static_cast<uint32_t const*>(scales),
                                                                static_cast<uint8_t*>(packed));
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_unprepack(int num_matrices, int64_t n, int64_t k, void const* packed, void* codes,
                                  void* scales, fp4gemm_stream_t stream) {
  PackShape const shape = shape_of(n, k);
  int64_t const ctas = int64_t{num_matrices} * shape.tile_rows * shape.tile_columns;
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("unprepack", ctas));
  unprepack<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(
      shape, static_cast<uint8_t const*>(packed), static_cast<uint2*>(codes), static_cast<uint32_t*>(scales));
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_nothing(fp4gemm_stream_t stream) {
  nothing<<<1, 1, 0, stream>>>();
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
