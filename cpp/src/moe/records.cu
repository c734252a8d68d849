// Records: made of quantized rows, and gathered into the rows of groups.
#include <cuda_runtime.h>

#include "error.hpp"
#include "launch.hpp"
#include "moe/ranks.hpp"
#include "quantize/grid.hpp"
#include "quantize/groups.cuh"
#include "quantize/numerics.cuh"

namespace fp4gemm {
namespace {

constexpr int kThreads = 32 * kQuad;  // of a CTA, which has a quad: one row for each warp
constexpr int kCopies = 8;            // words that a thread has in flight

/// The parts of a record, as offsets in bytes.
struct RecordLayout {
  int num_blocks;  // of 16 elements
  int num_words;   // of 4 scales, padding included
  int64_t record_bytes;

  __device__ int64_t codes_bytes() const { return int64_t{8} * num_blocks; }
  __device__ int64_t amax_at() const { return codes_bytes() + int64_t{kScaleWord} * num_words; }
};

/// Copies `count` words with the lanes of a warp; from null, writes zeros.
template <class Word>
__device__ void copy_words(uint8_t const* from, uint8_t* to, int count) {
  auto const* const source = reinterpret_cast<Word const*>(from);
  auto* const target = reinterpret_cast<Word*>(to);
#pragma unroll 1
  for (int first = static_cast<int>(threadIdx.x % 32); first < count; first += 32 * kCopies) {
    Word words[kCopies];
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      bool const has = from != nullptr && first + 32 * i < count;
      words[i] = has ? source[first + 32 * i] : Word{};
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      if (first + 32 * i < count) {
        target[first + 32 * i] = words[i];
      }
    }
  }
}

/// Copies the codes of a row. Rows start on 16-byte boundaries if they have an even number of blocks, and on
/// 8-byte boundaries otherwise.
__device__ void copy_codes(uint8_t const* from, uint8_t* to, int num_blocks) {
  if (num_blocks % 2 == 0) {
    copy_words<uint4>(from, to, num_blocks / 2);
  } else {
    copy_words<uint2>(from, to, num_blocks);
  }
}

struct MakeParams {
  RecordLayout layout;
  int64_t m;
  uint8_t const* codes;
  uint8_t const* scales;
  float const* amax;
  uint8_t* records;
};

/// Writes the records of rows, one for each warp.
__global__ void __launch_bounds__(kThreads) make_row_records(MakeParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int const lane = static_cast<int>(threadIdx.x % 32);
  int64_t const row = int64_t{blockIdx.x} * kQuad + threadIdx.x / 32;
  if (row >= p.m) {
    return;
  }
  RecordLayout const& layout = p.layout;
  uint8_t* const record = p.records + row * layout.record_bytes;
  copy_codes(p.codes + row * layout.codes_bytes(), record, layout.num_blocks);
  auto* const scales = reinterpret_cast<uint32_t*>(record + layout.codes_bytes());
  for (int word = lane; word < layout.num_words; word += 32) {
    uint32_t const four =
        *reinterpret_cast<uint32_t const*>(p.scales + scale_offset(row, kScaleWord * word, layout.num_words));
    int const count = min(layout.num_blocks - kScaleWord * word, kScaleWord);  // the others are padding
    scales[word] = count == kScaleWord ? four : four & ((1u << 8 * count) - 1u);
  }
  int64_t const at = layout.amax_at() + 4 * lane;
  if (at < layout.record_bytes) {
    *reinterpret_cast<float*>(record + at) = lane == 0 ? p.amax[row] : 0.0f;
  }
}

struct GatherParams {
  RecordLayout layout;
  int64_t m;
  int64_t num_records;  // of each buffer
  int num_buffers;
  int const* rows;
  Groups groups;
  uint8_t* codes;
  uint8_t* scales;
  float* amax;
  uint8_t const* records[kMaxRanks];
};

/// The record of a row; null for a row of zeros.
__device__ uint8_t const* record_of(GatherParams const& p, int64_t row) {
  int64_t const number = p.rows[row];
  if (number < 0 || number >= p.num_buffers * p.num_records) {
    return nullptr;
  }
  auto const in_buffer = static_cast<unsigned>(number) % static_cast<unsigned>(p.num_records);
  auto const buffer = static_cast<unsigned>(number) / static_cast<unsigned>(p.num_records);
  return p.records[buffer] + in_buffer * p.layout.record_bytes;
}

/// Writes codes and amaxes of zero for the rows behind the last group that this CTA has: warp w of CTA b has
/// number 4 b + w of them. The grid has at least as many warps as the result has rows.
__device__ void zero_row_outside_groups(GatherParams const& p) {
  int64_t const row = clamp_row(load_after_wait(p.groups.offs + p.groups.num - 1), p.m) +
                      int64_t{blockIdx.x} * kQuad + threadIdx.x / 32;
  if (row < p.m) {
    copy_codes(nullptr, p.codes + row * p.layout.codes_bytes(), p.layout.num_blocks);
    if (threadIdx.x % 32 == 0) {
      p.amax[row] = 0.0f;
    }
  }
}

/// Copies records to the rows of groups. A CTA has the rows r, r + 32, r + 64 and r + 96 of one tile of 128
/// rows of the scale buffer, one for each warp: their scales are adjacent there. The grid covers all rows of
/// that buffer, so that its zero padding is written too.
///
/// Dynamic shared memory: (num_words) uint4 if num_words <= kMaxStagedWords; element w collects the scales of
/// blocks 4 w to 4 w + 3 of the four rows.
__global__ void __launch_bounds__(kThreads) gather_rows(__grid_constant__ GatherParams const p) {
  extern __shared__ uint4 staged[];
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  RecordLayout const& layout = p.layout;
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  int64_t const index = int64_t{blockIdx.x} * kQuad;
  int64_t const tile = index / kScaleTileRows;
  int const first_in_tile = static_cast<int>(index % kScaleTileRows) / kQuad;
  int const in_tile = first_in_tile + 32 * warp;
  TileRows const rows = find_tile(p.groups, p.m, tile);
  int64_t const row = rows.first + in_tile;
  uint8_t const* record = nullptr;
  if (in_tile < rows.count) {
    record = record_of(p, row);
    copy_codes(record, p.codes + row * layout.codes_bytes(), layout.num_blocks);
    if (lane == 0) {
      p.amax[row] = record != nullptr ? *reinterpret_cast<float const*>(record + layout.amax_at()) : 0.0f;
    }
  }
  uint8_t* const target = p.scales + scale_offset(tile * kScaleTileRows + first_in_tile, 0, layout.num_words);
  bool const is_staged = layout.num_words <= kMaxStagedWords;
  for (int word = lane; word < layout.num_words; word += 32) {
    uint32_t const four =
        record != nullptr ? reinterpret_cast<uint32_t const*>(record + layout.codes_bytes())[word] : 0u;
    if (is_staged) {
      reinterpret_cast<uint32_t*>(staged)[kQuad * word + warp] = four;
    } else {
      *reinterpret_cast<uint32_t*>(target + int64_t{512} * word + kScaleWord * warp) = four;
    }
  }
  if (is_staged) {
    __syncthreads();  // the scales of all four rows are in shared memory
    for (int word = static_cast<int>(threadIdx.x); word < layout.num_words; word += kThreads) {
      *reinterpret_cast<uint4*>(target + int64_t{512} * word) = staged[word];
    }
  }
  zero_row_outside_groups(p);
}

RecordLayout layout_of(int64_t k) {
  int const num_blocks = static_cast<int>(k / kBlock);
  return {num_blocks, num_words_of(num_blocks), fp4gemm_record_bytes(k)};
}

}  // namespace

fp4gemm_status_t launch_make_records(fp4gemm_make_records_args_t const& args,
                                     DeviceProperties const& properties, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  MakeParams const params{layout_of(args.k), args.m,    args.codes,
                          args.scales,       args.amax, static_cast<uint8_t*>(args.records)};
  FP4GEMM_CUDA(launch_waiting(make_row_records, {static_cast<unsigned>(ceil_div(args.m, kQuad)), kThreads},
                              properties.can_overlap_launches(), stream, params));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_gather_records(fp4gemm_gather_records_args_t const& args,
                                       DeviceProperties const& properties, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  GatherParams params{};
  params.layout = layout_of(args.k);
  params.m = args.m;
  params.num_records = args.num_records;
  params.num_buffers = args.num_buffers;
  params.rows = args.rows;
  params.groups = {args.offs, args.num_groups};
  params.codes = args.codes;
  params.scales = args.scales;
  params.amax = args.amax;
  for (int i = 0; i < args.num_buffers; ++i) {
    params.records[i] = static_cast<uint8_t const*>(args.records[i]);
  }
  int64_t const ctas = fp4gemm_grouped_scale_rows(args.m, args.num_groups) / kQuad;
  int const num_words = params.layout.num_words;
  size_t const smem_bytes = num_words <= kMaxStagedWords ? num_words * sizeof(uint4) : 0;
  // Other GPUs may have written the buffers, which the kernel before this one has waited for.
  bool const overlaps = properties.can_overlap_launches() && args.num_buffers == 1;
  FP4GEMM_CUDA(launch_waiting(gather_rows, {static_cast<unsigned>(ctas), kThreads, smem_bytes}, overlaps,
                              stream, params));
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
