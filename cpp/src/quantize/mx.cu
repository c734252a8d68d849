// The MX formats: blocks of 32 elements with one power-of-two scale, quantized, dequantized, and decoded for
// products of fp16 operands.
#include <cuda/std/type_traits>

#include "error.hpp"
#include "for_type.cuh"
#include "quantize/convert.cuh"
#include "quantize/grid.hpp"
#include "quantize/groups.cuh"
#include "quantize/numerics.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

constexpr int kMxBlock = 32;
constexpr int kThreads = 128;

struct MxParams {
  void const* x;
  int64_t x_row_stride;
  void* y;
  int64_t m;
  int64_t k;
  uint8_t* values;
  uint8_t* scales;
  bool scales_are_compact;
  bool floors;              // see MxArgs
  Groups groups;            // of rows of x or y
  int64_t grouped_columns;  // of x^T, with groups
  unsigned first_cta = 0;   // mx_quantize_*: CTAs of the launches before, along the dimension that m sets
};

/// A row of the swizzled scales of groups: the row of x that it belongs to, or -1 where it is padding. Row
/// `padded` may in addition stand for a row `outside`, one of those behind the last group; else that is -1.
/// All lanes of a warp must call it with the same row.
struct GroupedRow {
  int64_t row, outside;
};
__device__ inline GroupedRow find_row(Groups const& groups, int64_t m, int64_t padded) {
  TileRows const rows = find_tile(groups, m, padded / kScaleTileRows);
  int64_t const in_tile = padded % kScaleTileRows;
  int64_t const outside = clamp_row(load_after_wait(groups.offs + groups.num - 1), m) + padded;
  return {in_tile < rows.count ? rows.first + in_tile : -1, outside < m ? outside : -1};
}

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

/// The elements of a format. A struct of them has:
///   kBits              of an element
///   kLargestExponent   of the scales of a row that is decoded: the largest such that fp16 holds the largest
///                      value times two to that power
///   quantize           a block to elements, with the e8m0 code of its scale as the result; `floors` as of
///                      MxArgs
///   decode             elements to fp16, exactly
template <__nv_fp8_interpretation_t kFormat>
struct Fp8Elements {
  static constexpr int kBits = 8;
  static constexpr int kLargestExponent = 7;  // 448 * 2^7 = 57344; only e4m3 is decoded

  static __device__ uint8_t quantize(float const (&x)[kMxBlock], bool, Chunk<uint8_t, kMxBlock>& values) {
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
      amax = fmaxf(amax, fabsf(x[i]));  // drops NaN
    }
    uint8_t const scale =
        float_to_e8m0_up(__fmul_rn(amax, kFormat == __NV_E4M3 ? 1.0f / 448.0f : 1.0f / 57344.0f));
    float const inverse = e8m0_to_float(254 - scale);
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
      float const scaled = __fmul_rn(x[i], inverse);
      uint8_t const value = kFormat == __NV_E4M3 ? float_to_e4m3(scaled)
                                                 : __nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E5M2);
      values.elements[i] = x[i] != x[i] ? uint8_t{0x7F} : value;
    }
    return scale;
  }

  template <int N>
  static __device__ void decode(Chunk<uint8_t, N> const& bytes, __half (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      values[i] = __half(__nv_cvt_fp8_to_halfraw(bytes.elements[i], kFormat));
    }
  }
};

/// Elements of MXFP4.
struct E2m1Elements {
  static constexpr int kBits = 4;
  static constexpr int kLargestExponent = 13;  // 6 * 2^13 = 49152

  static __device__ uint8_t quantize(float const (&x)[kMxBlock], bool floors,
                                     Chunk<uint8_t, kMxBlock / 2>& codes) {
    // Magnitudes order as their bits do, and those of infinity and NaN are the largest.
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
      largest = max(largest, __float_as_uint(x[i]) & 0x7FFFFFFFu);
    }
    if (largest >= 0x7F800000u) {
      codes = {};
      return 255;
    }
    // The exponent field is that of the power of two below the magnitude, and 0 for subnormal numbers.
    uint8_t const scale = floors ? static_cast<uint8_t>(max(static_cast<int>(largest >> 23) - 2, 0))
                                 : float_to_e8m0_up(__fmul_rn(__uint_as_float(largest), 1.0f / 6.0f));
    float const inverse = e8m0_to_float(254 - scale);
    auto const code_of = [&](float element) {
      return (e2m1_bits(element, inverse) - kE2m1StartBits) | (__float_as_uint(element) >> 31) << 3;
    };
#pragma unroll
    for (int i = 0; i < kMxBlock / 2; ++i) {
      codes.elements[i] = static_cast<uint8_t>(code_of(x[2 * i]) | code_of(x[2 * i + 1]) << 4);
    }
    return scale;
  }

  template <int N>
  static __device__ void decode(Chunk<uint8_t, N / 2> const& codes, __half (&values)[N]) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      __half2 const pair = decode_e2m1_pair(codes.elements[i]);
      values[2 * i] = __low2half(pair);
      values[2 * i + 1] = __high2half(pair);
    }
  }
};

/// The bytes of a block.
template <class Elements>
using BlockOf = Chunk<uint8_t, kMxBlock * Elements::kBits / 8>;

/// Quantizes along k, with a CTA for each row of x or of the padding of the scales. With groups, the values
/// of rows behind the last one are zero.
///
/// @tparam T The type of x.
/// @tparam Elements The elements of the result.
template <class T, class Elements>
__global__ void __launch_bounds__(kThreads) mx_quantize_rows(MxParams p) {
  int64_t const padded =
      p.first_cta + blockIdx.x;  // up to 2^31, the padding included: in 32 bits without a sign
  bool const grouped = p.groups.offs != nullptr;
  GroupedRow const found = grouped ? find_row(p.groups, p.m, padded) : GroupedRow{padded, -1};
  int64_t const row = found.row;
  int const num_blocks = static_cast<int>(p.k / kMxBlock);
  int const num_scales = p.scales_are_compact ? num_blocks : kScaleWord * num_words_of(num_blocks);
  for (int block = static_cast<int>(threadIdx.x); block < num_scales; block += kThreads) {
    uint8_t scale = 0;
    if (row >= 0 && row < p.m && block < num_blocks) {
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
      BlockOf<Elements> values;
      scale = Elements::quantize(x, p.floors, values);
      reinterpret_cast<BlockOf<Elements>*>(p.values)[row * num_blocks + block] = values;
    }
    if (found.outside >= 0 && block < num_blocks) {
      reinterpret_cast<BlockOf<Elements>*>(p.values)[found.outside * num_blocks + block] = {};
    }
    p.scales[mx_scale_offset(padded, block, num_blocks, p.scales_are_compact)] = scale;
  }
}

/// Quantizes along m into x^T, with a CTA for each 32 columns by 128 rows of x. A thread quantizes 32 rows of
/// a column, which is a block of x^T. With groups, each begins at a multiple of 128 columns of x^T, those of
/// the rows of a CTA; columns that hold no row are zero. Template parameters: as above.
template <class T, class Elements>
__global__ void __launch_bounds__(kThreads) mx_quantize_columns(MxParams p) {
  int64_t const column = int64_t{blockIdx.x} * 32 + threadIdx.x % 32;
  unsigned const tile = p.first_cta + blockIdx.y;
  int const in_tile = static_cast<int>(threadIdx.x / 32) * kMxBlock;
  int const block = static_cast<int>(tile * 4 + threadIdx.x / 32);
  bool const grouped = p.groups.offs != nullptr;
  int64_t const columns = grouped ? p.grouped_columns : p.m;  // of x^T
  int const num_blocks = static_cast<int>(columns / kMxBlock);
  TileRows const rows =
      grouped ? find_tile(p.groups, p.m, tile)
              : TileRows{int64_t{tile} * kScaleTileRows, p.m - int64_t{tile} * kScaleTileRows, 0, 0};
  uint8_t scale = 0;
  if (column < p.k && block < num_blocks) {
    T const* const first = static_cast<T const*>(p.x) + (rows.first + in_tile) * p.x_row_stride + column;
    float x[kMxBlock];
#pragma unroll
    for (int i = 0; i < kMxBlock; ++i) {
      x[i] = in_tile + i < rows.count ? static_cast<float>(first[i * p.x_row_stride]) : 0.0f;
    }
    BlockOf<Elements> values;
    scale = Elements::quantize(x, p.floors, values);
    reinterpret_cast<BlockOf<Elements>*>(p.values)[column * num_blocks + block] = values;
  }
  if (!p.scales_are_compact || (column < p.k && block < num_blocks)) {
    p.scales[mx_scale_offset(column, block, num_blocks, p.scales_are_compact)] = scale;
  }
}

constexpr int kMxChunk = 8;  // elements that a thread of mx_dequantize converts at a time

/// Dequantizes, with a CTA for each row, or with groups for each row of the scales. Rows behind the last
/// group are zero.
///
/// @tparam T The type of the result.
/// @tparam Elements The elements of the values.
template <class T, class Elements>
__global__ void __launch_bounds__(kThreads) mx_dequantize(MxParams p) {
  int64_t const padded = p.first_cta + blockIdx.x;
  GroupedRow const found =
      p.groups.offs != nullptr ? find_row(p.groups, p.m, padded) : GroupedRow{padded, -1};
  int64_t const row = found.row;
  int const num_blocks = static_cast<int>(p.k / kMxBlock);
  int const num_chunks = static_cast<int>(p.k / kMxChunk);
  for (int chunk = static_cast<int>(threadIdx.x); chunk < num_chunks; chunk += kThreads) {
    if (found.outside >= 0) {
      static_cast<Chunk<T, kMxChunk>*>(p.y)[found.outside * num_chunks + chunk] = {};
    }
    if (row < 0) {
      continue;
    }
    __half values[kMxChunk];
    Elements::decode(reinterpret_cast<Chunk<uint8_t, kMxChunk * Elements::kBits / 8> const*>(
                         p.values)[row * num_chunks + chunk],
                     values);
    float const scale = e8m0_to_float(
        p.scales[mx_scale_offset(padded, chunk * kMxChunk / kMxBlock, num_blocks, p.scales_are_compact)]);
    Chunk<T, kMxChunk> result;
#pragma unroll
    for (int i = 0; i < kMxChunk; ++i) {
      result.elements[i] = from_float<T>(__fmul_rn(__half2float(values[i]), scale));
    }
    static_cast<Chunk<T, kMxChunk>*>(p.y)[row * num_chunks + chunk] = result;
  }
}

constexpr int kCodesOfChunk = 16;  // which a thread of expand_codes reads

/// Four e2m1 codes, in the low half of `codes`, as e4m3 bytes. e4m3 has every value of e2m1.
__device__ inline uint32_t e2m1_to_e4m3(uint32_t codes) {
  // The bytes of 0, 0.5, 1, 1.5 and of 2, 3, 4, 6, beginning with the lowest.
  uint32_t const magnitudes = __byte_perm(0x3C383000u, 0x4C484440u, codes & 0x7777u);
  uint32_t const signs =
      (codes & 0x8u) << 4 | (codes & 0x80u) << 8 | (codes & 0x800u) << 12 | (codes & 0x8000u) << 16;
  return magnitudes | signs;
}

__global__ void __launch_bounds__(kThreads)
    expand_codes(uint2 const* codes, uint4* values, int64_t num_chunks) {
  int64_t const i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < num_chunks) {
    uint2 const packed = codes[i];
    values[i] = {e2m1_to_e4m3(packed.x), e2m1_to_e4m3(packed.x >> 16), e2m1_to_e4m3(packed.y),
                 e2m1_to_e4m3(packed.y >> 16)};
  }
}

constexpr int kWarps = kThreads / 32;  // of a CTA of mx_decode, which decode a row each

/// See MxDecodeJob. Warps count the rows of the scales.
template <class Elements>
__global__ void __launch_bounds__(kThreads) mx_decode(__grid_constant__ MxDecodeJob const job) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  int64_t const padded = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  int64_t row = -1;
  int64_t matrix = 0;
  if (job.offs != nullptr) {
    row = find_row({job.offs, job.num_groups}, job.rows, padded).row;
  } else {
    int64_t const padded_rows = ceil_div(job.rows_per_matrix, kScaleTileRows) * kScaleTileRows;
    matrix = padded / padded_rows;
    int64_t const in_matrix = padded % padded_rows;
    row = in_matrix < job.rows_per_matrix ? matrix * job.rows_per_matrix + in_matrix : -1;
  }
  if (row < 0 || row >= job.rows) {
    return;
  }
  auto const num_blocks = static_cast<int>(job.k / kMxBlock);
  auto const scale_of = [&](int block) {
    return static_cast<int>(job.scales[mx_scale_offset(padded, block, num_blocks, /*is_compact=*/false)]);
  };
  int largest = 0;
  for (int block = lane; block < num_blocks; block += 32) {
    int const scale = scale_of(block);
    largest = scale == 255 ? largest : max(largest, scale);
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);

  constexpr int kHalves = 2;  // chunks of a block
  using Values = Chunk<uint8_t, kMxBlock / kHalves * Elements::kBits / 8>;
  using Decoded = Chunk<__half, kMxBlock / kHalves>;
  for (int chunk = lane; chunk < num_blocks * kHalves; chunk += 32) {
    __half values[kMxBlock / kHalves];
    Elements::decode(reinterpret_cast<Values const*>(job.values)[row * num_blocks * kHalves + chunk], values);
    int const scale = scale_of(chunk / kHalves);
    // From 2^-120 on values times factors are far below what fp16 holds.
    float const factor =
        e8m0_to_float(scale == 255 ? 255 : max(scale - largest + Elements::kLargestExponent, -120) + 127);
    Decoded decoded;
#pragma unroll
    for (int i = 0; i < kMxBlock / kHalves; ++i) {
      decoded.elements[i] = __float2half_rn(__fmul_rn(__half2float(values[i]), factor));
    }
    static_cast<Decoded*>(job.y)[row * num_blocks * kHalves + chunk] = decoded;
  }

  int const exponent = largest - 127 - Elements::kLargestExponent;  // from -140 on, which is subnormal
  float const power = __uint_as_float(exponent >= -126 ? static_cast<uint32_t>(exponent + 127) << 23
                                                       : 1u << (exponent + 149));
  int64_t const in_matrix = job.offs != nullptr ? row : row - matrix * job.rows_per_matrix;
  for (int v = lane; v < job.num_given; v += 32) {
    float const given =
        job.given.data == nullptr ? 1.0f : *job.given.at(static_cast<int>(matrix) + v, in_matrix);
    job.factors[v * job.rows + row] = __fmul_rn(power, given);
  }
}

MxParams params_of(MxArgs const& args) {
  return {args.x,
          args.x_row_stride,
          args.y,
          args.m,
          args.k,
          args.values,
          args.scales,
          args.scales_are_compact,
          args.floors,
          {args.offs, args.num_groups},
          args.offs != nullptr ? fp4gemm_grouped_scale_rows(args.m, args.num_groups) : 0};
}

/// Calls launch(T{}, Elements{}) for the type of x or y and the elements.
template <class Launch>
void for_types(MxArgs const& args, Launch const& launch) {
  for_type(args.dtype, [&](auto type) {
    switch (args.element) {
      case MxElement::kE4m3: launch(type, Fp8Elements<__NV_E4M3>{}); break;
      case MxElement::kE5m2: launch(type, Fp8Elements<__NV_E5M2>{}); break;
      case MxElement::kE2m1: launch(type, E2m1Elements{}); break;
    }
  });
}

}  // namespace

fp4gemm_status_t launch_mx_quantize(MxArgs const& args, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  MxParams params = params_of(args);
  for_types(args, [&](auto type, auto elements) {
    using T = decltype(type);
    if (args.is_transposed) {
      // Whole tiles of 128 x 4 scales.
      auto const width = static_cast<unsigned>(scale_rows_of(args.k) / 32);
      int64_t const rows = args.offs != nullptr ? params.grouped_columns : args.m;
      for_grid_parts(ceil_div(rows, 4 * kMxBlock), kMaxGridY, [&](int64_t first, unsigned count) {
        params.first_cta = static_cast<unsigned>(first);
        mx_quantize_columns<T, decltype(elements)><<<dim3(width, count), kThreads, 0, stream>>>(params);
      });
    } else {
      int64_t const rows =
          args.scales_are_compact ? args.m : scale_rows_of(args.m, args.offs, args.num_groups);
      for_grid_parts(rows, kMaxGridX, [&](int64_t first, unsigned count) {
        params.first_cta = static_cast<unsigned>(first);
        mx_quantize_rows<T, decltype(elements)><<<count, kThreads, 0, stream>>>(params);
      });
    }
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_mx_dequantize(MxArgs const& args, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  MxParams params = params_of(args);
  int64_t const rows = args.offs != nullptr ? fp4gemm_grouped_scale_rows(args.m, args.num_groups) : args.m;
  for_types(args, [&](auto type, auto elements) {
    for_grid_parts(rows, kMaxGridX, [&](int64_t first, unsigned count) {
      params.first_cta = static_cast<unsigned>(first);
      mx_dequantize<decltype(type), decltype(elements)><<<count, kThreads, 0, stream>>>(params);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_expand_codes(int64_t num_codes, void const* codes, void* values,
                                     fp4gemm_stream_t stream) {
  int64_t const chunks = num_codes / kCodesOfChunk;
  if (chunks == 0) {
    return FP4GEMM_SUCCESS;
  }
  int64_t const ctas = ceil_div(chunks, kThreads);
  FP4GEMM_TRY(check_grid("expand_codes", ctas));
  expand_codes<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(static_cast<uint2 const*>(codes),
                                                                     static_cast<uint4*>(values), chunks);
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_mx_decode(MxDecodeJob const& job, fp4gemm_stream_t stream) {
  if (job.rows == 0) {
    return FP4GEMM_SUCCESS;
  }
  int64_t const rows = job.offs != nullptr
                           ? fp4gemm_grouped_scale_rows(job.rows, job.num_groups)
                           : job.rows / job.rows_per_matrix * scale_rows_of(job.rows_per_matrix);
  FP4GEMM_TRY(check_grid("mx_decode", rows / kWarps));
  auto* const kernel =
      job.element == MxElement::kE2m1 ? mx_decode<E2m1Elements> : mx_decode<Fp8Elements<__NV_E4M3>>;
  kernel<<<static_cast<unsigned>(rows / kWarps), kThreads, 0, stream>>>(job);
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
