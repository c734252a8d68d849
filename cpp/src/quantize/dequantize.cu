// Values of NVFP4: dequantization to fp32, bf16 or fp16, and decoding to fp16 values, code times block scale,
// which a GEMM uses as its operand. The latter are exact.
//
// A thread converts a chunk, whose values have 16 bytes, in each row of a quad: four rows that are 32 apart
// in a tile of scales. The scales of one word of these rows are 16 adjacent bytes of the swizzled layout.
#include "error.hpp"
#include "launch.hpp"
#include "quantize/block.cuh"
#include "quantize/grid.hpp"
#include "quantize/groups.cuh"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr unsigned kLog2Threads = 8;
constexpr int kThreads = 1 << kLog2Threads;
constexpr int kTileQuads = kScaleTileRows / kQuad;     // quads of a tile, and the distance of a quad's rows
constexpr unsigned kMinWidth = kThreads / kTileQuads;  // of a CTA, so that its quads are of one tile
constexpr int kGroupedTurns = 4;                       // parts of a row that a CTA converts in groups

/// Elements of a chunk.
template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));

struct DequantizeParams {
  DecodeJob jobs[2];
  unsigned first_ctas;  // CTAs of the first job; the other CTAs do the second
  unsigned parts;       // CTAs beside each other in a row
  unsigned log2_width;  // of the threads of a CTA beside each other in a row
  int chunks_per_row;
  int num_words;  // of 4 scales in a row, padding included
  // The following are for dequantization, which has one job.
  float const* amax;
  bool amax_per_row;
  bool scales_are_compact;
  float factor;  // fl(1 / (6 * e4m3_max))
};

/// Tiles of the scales of a job.
int64_t num_tiles_of(DecodeJob const& job) {
  if (job.rows_per_matrix != 0) {
    return job.rows / job.rows_per_matrix * ceil_div(job.rows_per_matrix, kScaleTileRows);
  }
  return scale_rows_of(job.rows, job.offs, job.num_groups) / kScaleTileRows;
}

/// The rows of a job without groups in tile `tile` of its scales.
__device__ inline TileRows rows_of(DecodeJob const& job, unsigned tile) {
  int64_t start = 0;
  int64_t end = job.rows;
  if (job.rows_per_matrix != 0) {
    // Sizes are below 2^31.
    auto const tiles_per_matrix = static_cast<unsigned>(ceil_div(job.rows_per_matrix, kScaleTileRows));
    unsigned const matrix = tile / tiles_per_matrix;
    tile -= matrix * tiles_per_matrix;
    start = matrix * job.rows_per_matrix;
    end = start + job.rows_per_matrix;
  }
  int64_t const first = start + int64_t{tile} * kScaleTileRows;
  return {first, min(end - first, int64_t{kScaleTileRows}), 0, start};
}

/// Loads the codes of a chunk.
template <int kElements>
__device__ inline uint32_t load_codes(uint8_t const* codes, int64_t chunk) {
  static_assert(kElements == 4 || kElements == 8, "a chunk has 16 bytes of values");
  using Codes = cuda::std::conditional_t<kElements == 8, uint32_t, uint16_t>;
  return cutlass_evt::load_once_after_wait(reinterpret_cast<Codes const*>(codes) + chunk);
}

/// Values of two bytes for the eight magnitudes of e2m1, the low bytes and the high bytes of all.
struct MagnitudeTable {
  uint2 low;
  uint2 high;

  /// From the values of 0 and 0.5, 1 and 1.5, 2 and 3, 4 and 6.
  __device__ MagnitudeTable(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    low = {__byte_perm(a, b, 0x6420), __byte_perm(c, d, 0x6420)};
    high = {__byte_perm(a, b, 0x7531), __byte_perm(c, d, 0x7531)};
  }

  /// The values of eight codes. A code with its sign bit set has the negated value.
  __device__ uint4 look_up(uint32_t codes) const {
    uint32_t const magnitudes = codes & 0x77777777u;
    uint32_t const even = codes << 4 & 0x80808080u;  // the signs of elements 0, 2, 4 and 6, a byte each
    uint32_t const odd = codes & 0x80808080u;        // 1, 3, 5 and 7
    uint32_t pairs[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t const selector = magnitudes >> 16 * half;
      uint32_t const signs = __byte_perm(even, odd, half == 0 ? 0x5140 : 0x7362);
      uint32_t const low_bytes = __byte_perm(low.x, low.y, selector);
      uint32_t const high_bytes = __byte_perm(high.x, high.y, selector) ^ signs;
      pairs[2 * half] = __byte_perm(low_bytes, high_bytes, 0x5140);
      pairs[2 * half + 1] = __byte_perm(low_bytes, high_bytes, 0x7362);
    }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};

/// The values of a chunk of codes times a scale, each rounded once to T, in the order of memory.
template <class T>
__device__ inline uint4 scaled_values(uint32_t codes, float scale) {
  if constexpr (sizeof(T) == 4) {
    uint4 const pairs = MagnitudeTable(0x3F000000u, 0x3FC03F80u, 0x40404000u, 0x40C04080u).look_up(codes);
    auto const times_scale = [&](uint32_t bits) {
      return __float_as_uint(__fmul_rn(__uint_as_float(bits), scale));
    };
    return {times_scale(pairs.x << 16), times_scale(pairs.x & 0xFFFF0000u), times_scale(pairs.y << 16),
            times_scale(pairs.y & 0xFFFF0000u)};  // bf16 to fp32
  } else {
    auto const pair = [&](float low, float high) {
      return pack_pair<T>(__fmul_rn(low, scale), __fmul_rn(high, scale));
    };
    return MagnitudeTable(pair(0.0f, 0.5f), pair(1.0f, 1.5f), pair(2.0f, 3.0f), pair(4.0f, 6.0f))
        .look_up(codes);
  }
}

/// The values of eight codes times a scale as fp16.
__device__ inline uint4 decoded_values(uint32_t codes, __half2 scale) {
  uint4 result = MagnitudeTable(0x38000000u, 0x3E003C00u, 0x42004000u, 0x46004400u).look_up(codes);
  __half2* const pairs = reinterpret_cast<__half2*>(&result);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __hmul2(pairs[i], scale);
  }
  return result;
}

/// Converts the rows of up to two jobs. The threads of a CTA are the chunks of a part of a row by the quads
/// of the CTA, all of one tile of scales. Consecutive CTAs convert parts of the same rows.
///
/// @tparam T Type of the values.
/// @tparam kDecode Whether they are decoded; otherwise the first job is dequantized.
/// @tparam kGrouped Whether a job may have groups. Finding the rows of a tile takes long then, so that a CTA
///     converts more than one part of its rows. The other kernels, without a loop, need 32 registers.
template <class T, bool kDecode, bool kGrouped>
__global__ void __launch_bounds__(kThreads, kGrouped ? 5 : 1) dequantize(DequantizeParams p) {
#if __CUDA_ARCH__ >= 900
  // As in rows.cuh: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  DecodeJob job = p.jobs[0];
  unsigned cta = blockIdx.x;
  if (cta >= p.first_ctas) {
    job = p.jobs[1];
    cta -= p.first_ctas;
  }
  unsigned const part = cta % p.parts;
  unsigned const width = 1u << p.log2_width;
  unsigned const quad = cta / p.parts * (kThreads >> p.log2_width) + (threadIdx.x >> p.log2_width);
  unsigned const tile = quad / kTileQuads;
  int const in_tile = static_cast<int>(quad % kTileQuads);
  TileRows const rows = kGrouped && job.offs != nullptr
                            ? find_tile({job.offs, job.num_groups}, job.rows, tile)
                            : rows_of(job, tile);
  int64_t const first_row = rows.first + in_tile;
  // Row i of the quad is row first_row + i * kTileQuads of the job, and exists if i * kTileQuads < count.
  int const count = static_cast<int>(rows.count) - in_tile;
  auto const first_chunk = static_cast<int>(part * width + threadIdx.x % width);
  auto const step = static_cast<int>(p.parts * width);
  auto* const y = static_cast<uint4*>(job.y);
  float amax[kQuad] = {};
  if constexpr (!kDecode) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i * kTileQuads < count) {
        amax[i] = load_after_wait(p.amax + (p.amax_per_row ? first_row + i * kTileQuads : 0));
      }
    }
  }
  for (int chunk = first_chunk; count > 0 && chunk < p.chunks_per_row; chunk += step) {
    int const block = chunk / (kBlock / kChunk<T>);
    uint32_t codes[kQuad];
    uint32_t scales[kQuad];  // the scale of the block in byte block % 4
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      int64_t const at = (first_row + i * kTileQuads) * p.chunks_per_row + chunk;
      codes[i] = i * kTileQuads < count ? load_codes<kChunk<T>>(job.codes, at) : 0;
    }
    if (!kDecode && p.scales_are_compact) {
      int const blocks_per_row = p.chunks_per_row / (kBlock / kChunk<T>);
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        int64_t const at = (first_row + i * kTileQuads) * blocks_per_row + block;
        scales[i] = i * kTileQuads < count ? load_after_wait(job.scales + at) * 0x01010101u : 0;
      }
    } else {
      int64_t const word = scale_offset(int64_t{tile} * kScaleTileRows + in_tile, block & ~3, p.num_words);
      uint4 const words = load_after_wait(reinterpret_cast<uint4 const*>(job.scales + word));
      scales[0] = words.x, scales[1] = words.y, scales[2] = words.z, scales[3] = words.w;
    }
    uint32_t const select = static_cast<uint32_t>(block % 4) * 0x11u | 0x4400u;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      if (i * kTileQuads < count) {
        auto const twice = static_cast<__nv_fp8x2_storage_t>(__byte_perm(scales[i], 0, select));
        __half2 const scale(__nv_cvt_fp8x2_to_halfraw2(twice, __NV_E4M3));
        uint4 values;
        if constexpr (kDecode) {
          values = decoded_values(codes[i], scale);
        } else {
          values = scaled_values<T>(codes[i], __fmul_rn(__fmul_rn(__low2float(scale), amax[i]), p.factor));
        }
        __stcs(y + (first_row + i * kTileQuads) * p.chunks_per_row + chunk, values);
      }
    }
    if constexpr (!kGrouped) {
      break;
    }
  }
  if (kGrouped && !kDecode) {
    // Rows of y behind the last group are zero. Each quad writes four of them.
    int64_t const outside =
        clamp_row(load_after_wait(job.offs + job.num_groups - 1), job.rows) + int64_t{quad} * kQuad;
    for (int64_t row = outside; row < min(outside + kQuad, job.rows); ++row) {
      for (int chunk = first_chunk; chunk < p.chunks_per_row; chunk += step) {
        y[row * p.chunks_per_row + chunk] = {};
      }
    }
  }
}

/// Launches the kernel for params.jobs of k columns, and sets the members of params that follow from them.
template <class T, bool kDecode>
fp4gemm_status_t launch(char const* name, DequantizeParams params, int64_t k,
                        DeviceProperties const& properties, fp4gemm_stream_t stream) {
  int64_t const chunks = k / kChunk<T>;
  params.chunks_per_row = static_cast<int>(chunks);
  params.num_words = num_words_of(k / kBlock);
  // Rows of the CTA are as wide as they can be with at most a ninth of their threads idle.
  unsigned width = kThreads;
  params.log2_width = kLog2Threads;
  while (width > kMinWidth && round_up(chunks, width) * 8 > chunks * 9) {
    width /= 2;
    --params.log2_width;
  }
  bool const grouped = params.jobs[0].offs != nullptr || params.jobs[1].offs != nullptr;
  params.parts = static_cast<unsigned>(ceil_div(chunks, int64_t{width} * (grouped ? kGroupedTurns : 1)));
  int64_t ctas[2];
  for (int i = 0; i < 2; ++i) {
    ctas[i] = num_tiles_of(params.jobs[i]) * (kTileQuads / (kThreads / width)) * params.parts;
  }
  if (ctas[0] + ctas[1] == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid(name, ctas[0] + ctas[1]));
  params.first_ctas = static_cast<unsigned>(ctas[0]);
  auto const kernel = grouped ? dequantize<T, kDecode, true> : dequantize<T, kDecode, false>;
  FP4GEMM_CUDA(launch_waiting(kernel, {static_cast<unsigned>(ctas[0] + ctas[1]), kThreads},
                              properties.can_overlap_launches(), stream, params));
  return FP4GEMM_SUCCESS;
}

}  // namespace

fp4gemm_status_t launch_dequantize(fp4gemm_dequantize_args_t const& args, DeviceProperties const& properties,
                                   fp4gemm_stream_t stream) {
  DequantizeParams params{};
  params.jobs[0] = {args.m, args.codes, args.scales, args.y, args.offs, args.num_groups};
  params.amax = args.amax;
  params.amax_per_row = args.scaling == FP4GEMM_SCALING_ROW;
  params.scales_are_compact = args.scales_are_compact != 0;
  params.factor = 1.0f / (6.0f * static_cast<float>(args.e4m3_max));
  switch (args.y_dtype) {
    case FP4GEMM_BF16: return launch<__nv_bfloat16, false>("dequantize", params, args.k, properties, stream);
    case FP4GEMM_FP16: return launch<__half, false>("dequantize", params, args.k, properties, stream);
    case FP4GEMM_FP32: return launch<float, false>("dequantize", params, args.k, properties, stream);
  }
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_decode(DecodeJob const& first, DecodeJob const& second, int64_t k,
                               DeviceProperties const& properties, fp4gemm_stream_t stream) {
  DequantizeParams params{};
  params.jobs[0] = first;
  params.jobs[1] = second;
  return launch<__half, true>("decode", params, k, properties, stream);
}

}  // namespace fp4gemm
