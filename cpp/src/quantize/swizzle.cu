// Block scales from plain rows into the 128x4 swizzled layout.
//
// A CTA has a tile of 128 rows by 32 scales, and a thread one row of it, which is a sector of memory. The
// lanes of a warp have eight rows of each quarter of the tile: those whose scales are neighbours in the
// swizzled layout, so that the warp stores 128 consecutive bytes at a time.
#include "cutlass_evt/load_after_wait.hpp"
#include "cutlass_evt/scale_layout.hpp"
#include "error.hpp"
#include "launch.hpp"
#include "quantize/grid.hpp"
#include "quantize/sizes.hpp"
#include "quantize/swizzle.hpp"

namespace fp4gemm {
namespace {

using cutlass_evt::load_after_wait;
using cutlass_evt::scale_offset;

constexpr int kThreads = kScaleTileRows;  // of a CTA
constexpr int kScales = 32;               // of a thread
constexpr int kWords = kScales / kScaleWord;
constexpr int kQuarters = 4;  // of a tile: the rows of a quarter are neighbours in the swizzled layout
constexpr int kQuarterRows = kScaleTileRows / kQuarters;

struct SwizzleParams {
  uint8_t const* compact;
  int64_t rows;  // of a matrix
  int columns;
  int64_t row_stride;
  int num_words;     // of a row of the result
  unsigned stripes;  // CTAs of a matrix, one above the other
  unsigned chunks;   // CTAs side by side
  uint8_t* swizzled;
};

/// @tparam Part What is loaded at a time: columns, row_stride and the address of compact are multiples of its
///     size.
template <class Part>
__global__ void __launch_bounds__(kThreads) swizzle_scales(SwizzleParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  constexpr int kPart = sizeof(Part);
  unsigned const stripe = blockIdx.x / p.chunks;  // of the stripes of all matrices
  int const column = static_cast<int>(blockIdx.x - stripe * p.chunks) * kScales;
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  int const in_tile = lane % kQuarters * kQuarterRows + warp * (32 / kQuarters) + lane / kQuarters;
  unsigned const matrix = stripe / p.stripes;
  int64_t const row = int64_t{stripe - matrix * p.stripes} * kScaleTileRows + in_tile;
  uint8_t const* const from = p.compact + (matrix * p.rows + row) * p.row_stride + column;
  union {
    Part parts[kScales / kPart];
    uint32_t words[kWords];
  } scales;
#pragma unroll
  for (int i = 0; i < kScales / kPart; ++i) {
    bool const is_inside = row < p.rows && column + i * kPart < p.columns;
    scales.parts[i] = is_inside ? load_after_wait(reinterpret_cast<Part const*>(from) + i) : Part{};
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    int const block = column + i * kScaleWord;
    if (block < p.num_words * kScaleWord) {
      int64_t const offset = scale_offset(int64_t{stripe} * kScaleTileRows + in_tile, block, p.num_words);
      *reinterpret_cast<uint32_t*>(p.swizzled + offset) = scales.words[i];
    }
  }
}

using Kernel = void (*)(SwizzleParams);

/// The kernel with the largest loads that the alignment allows.
Kernel kernel_for(SwizzleJob const& job) {
  uint64_t const all = reinterpret_cast<uintptr_t>(job.compact) | static_cast<uint64_t>(job.columns) |
                       static_cast<uint64_t>(job.row_stride);
  return all % 16 == 0  ? swizzle_scales<uint4>
         : all % 4 == 0 ? swizzle_scales<uint32_t>
                        : swizzle_scales<uint8_t>;
}

}  // namespace

fp4gemm_status_t launch_swizzle_scales(SwizzleJob const& job, DeviceProperties const& properties,
                                       fp4gemm_stream_t stream) {
  int64_t const stripes = ceil_div(job.rows, kScaleTileRows);
  int64_t const chunks = ceil_div(job.columns, kScales);
  int64_t const ctas = job.num_matrices * stripes * chunks;
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("swizzle_scales", ctas));
  SwizzleParams const params{job.compact,
                             job.rows,
                             static_cast<int>(job.columns),
                             job.row_stride,
                             num_words_of(job.columns),
                             static_cast<unsigned>(stripes),
                             static_cast<unsigned>(chunks),
                             job.swizzled};
  FP4GEMM_CUDA(launch_waiting(kernel_for(job), {static_cast<unsigned>(ctas), kThreads},
                              properties.can_overlap_launches(), stream, params));
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
