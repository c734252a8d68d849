// The scale search: each block uses, of the e4m3 scales near the standard one, that of the least weighted
// error.
#include "quantize/scale_search.hpp"

#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

constexpr int kSearchThreads = 256;
constexpr int kLargestCode = 126;  // the e4m3 code of 448
constexpr int kSteps = 6;          // candidates: the first code, 1 to 6 codes above it, 1 to 6 below

struct SearchParams {
  void const* x;
  int64_t row_stride;  // elements
  int64_t m;
  int num_blocks;           // in a row
  int num_words;            // of scales in a row, padding included
  float const* amax;        // A of row i is amax[i * amax_stride]
  int64_t amax_stride;      // 1, or 0 for one amax
  float const* importance;  // (k), or null
  float e4m3_max;
  float inverse_bound;  // 1 / (6 * e4m3_max)
  bool fp8_operand;     // x is multiplied as FP8 values too
  uint8_t* codes;
  uint8_t* scales;
};

/// The e2m1 value nearest to p >= 0, ties to even, saturating. NaN gives 0.
__device__ inline float round_to_e2m1(float p) {
  E2m1Parts const parts(p);
  float const low = __fmaf_rn(parts.up_to_4, 4.0f, kE2m1Start);
  float const sum = __fadd_rn(low, parts.above_4);
  // low counts the codes up to 4 and is the value up to 4 too; a step above 4 is one code and a value of 2.
  return __fsub_rn(__fmaf_rn(sum, 2.0f, -low), kE2m1Start);
}

/// 8 * e4m3(u / 8), rounded to nearest even, for 0 <= u <= 6 * 448: the operand of FP8 tensor cores for u =
/// q * s.
__device__ inline float eight_e4m3_of_eighth(float u) {
  // The sum of u and 2^(20 + x), x the exponent of u but at least -3, has the precision of 8 * e4m3.
  uint32_t const exponent = max(__float_as_uint(u) & 0x7F800000u, 0x3E000000u);
  float const magic = __uint_as_float(exponent + (20u << 23));
  return __fsub_rn(__fadd_rn(u, magic), magic);
}

/// The sum of the terms, folded by halves.
template <int kTerms>
__device__ inline float folded(float (&terms)[kTerms]) {
  if constexpr (kTerms == 1) {
    return terms[0];
  } else {
    float sums[kTerms / 2];
#pragma unroll
    for (int i = 0; i < kTerms / 2; ++i) {
      sums[i] = __fadd_rn(terms[i], terms[i + kTerms / 2]);
    }
    return folded(sums);
  }
}

/// A candidate for the scale of a block: s, e, and what an e2m1 value is multiplied with to dequantize it.
struct Candidate {
  float scale, factor, weight;
};

/// The error of a row of a block: the sum of ((q * weight) - x)^2 * importance with q = e2m1(x * factor), or
/// of what the definition has in its place with kFp8. The magnitudes are quantized, since signs do not change
/// it. A NaN in the block makes it NaN.
template <class T, bool kWeighted, bool kFp8>
__device__ inline float row_error(Block<T> const& block, float const (&importance)[kBlock],
                                  Candidate const& tried, float unit) {
  float terms[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; ++i) {
    float const x = fabsf(block.element(i));
    float const q = round_to_e2m1(__fmul_rn(x, tried.factor));
    if constexpr (kFp8) {
      float const value = __fmul_rn(q, tried.scale);
      float const half = __fmul_rn(__fsub_rn(eight_e4m3_of_eighth(value), value), 0.5f);
      float const d = __fsub_rn(__fmul_rn(__fadd_rn(value, half), unit), x);
      float const apart = __fmul_rn(half, unit);
      terms[i] = __fadd_rn(__fmul_rn(d, d), __fmul_rn(apart, apart));
    } else {
      float const d = __fsub_rn(__fmul_rn(q, tried.weight), x);
      terms[i] = __fmul_rn(d, d);
    }
    if constexpr (kWeighted) {
      terms[i] = __fmul_rn(terms[i], importance[i]);
    }
  }
  return folded(terms);
}

/// Writes the amax of each row, with a warp for each.
template <class T>
__global__ void __launch_bounds__(kSearchThreads) row_amaxes(SearchParams p, float* amax) {
  int64_t const row = int64_t{blockIdx.x} * (kSearchThreads / 32) + threadIdx.x / 32;
  if (row >= p.m) {
    return;
  }
  T const* const x = static_cast<T const*>(p.x) + row * p.row_stride;
  uint32_t bits = 0;
  for (int block = static_cast<int>(threadIdx.x % 32); block < p.num_blocks; block += 32) {
    bits = max(bits, block_amax_bits(load_block(x + int64_t{block} * kBlock)));
  }
  bits = row_max<32>(bits, 0);
  if (threadIdx.x % 32 == 0) {
    amax[row] = Block<T>::from_bits(bits);
  }
}

/// Quantizes blocks, each with the best of its candidates. A thread computes one row of 16 elements of a
/// block.
///
/// @tparam kTiled Blocks are 16x16 tiles: 16 lanes of a warp hold the rows of one, and all of them find the
///     same sums, since an addition does not depend on the order of its operands. Lanes without a row count
///     as zero.
/// @tparam kWeighted There is an importance.
/// @tparam kFp8 x is multiplied as FP8 values too.
template <class T, bool kTiled, bool kWeighted, bool kFp8>
__global__ void __launch_bounds__(kSearchThreads) search_scales(SearchParams p) {
  constexpr uint32_t kWarp = 0xFFFFFFFFu;
  constexpr int kRows = kTiled ? kBlock : 1;
  int64_t const thread = int64_t{blockIdx.x} * kSearchThreads + threadIdx.x;
  int64_t const index = thread / kRows;
  int64_t const row = index / p.num_blocks * kRows + thread % kRows;
  int const column = static_cast<int>(index % p.num_blocks);
  bool const is_real = row < p.m;
  // All threads stay, because the lanes of a warp exchange amaxes and errors.
  Block<T> const block =
      is_real ? load_block(static_cast<T const*>(p.x) + row * p.row_stride + int64_t{column} * kBlock)
              : Block<T>{};
  float importance[kBlock];
  if constexpr (kWeighted) {
#pragma unroll
    for (int i = 0; i < kBlock; ++i) {
      importance[i] = __ldg(p.importance + int64_t{column} * kBlock + i);
    }
  }
  uint32_t bits = block_amax_bits(block);
  if constexpr (kTiled) {
#pragma unroll
    for (int half = kBlock / 2; half > 0; half /= 2) {
      bits = max(bits, __shfl_xor_sync(kWarp, bits, half));
    }
  }
  float const amax = Block<T>::from_bits(bits);
  float const outer_amax = is_real || kTiled ? __ldg(p.amax + (is_real ? row : 0) * p.amax_stride) : 0.0f;
  OuterScale const outer = OuterScale::of<Range::kAny>(outer_amax, p.e4m3_max);
  int const standard = float_to_e4m3(__fmul_rn(amax, __fmul_rn(outer.encode, 1.0f / 6.0f)));
  int const first = max(standard, 1);

  float const unit = __fmul_rn(outer_amax, p.inverse_bound);

  uint8_t best = 0;
  float least = 0.0f;
#pragma unroll 1
  for (int i = 0; i <= 2 * kSteps; ++i) {
    int const code = min(max(first + (i <= kSteps ? i : kSteps - i), 1), kLargestCode);
    auto const candidate = static_cast<uint8_t>(amax == 0.0f ? 0 : code);
    float const scale = e4m3_to_float(candidate);
    Candidate const tried{scale, te_factor<Range::kAny>(candidate, outer),
                          __fmul_rn(__fmul_rn(scale, outer_amax), p.inverse_bound)};
    float error = row_error<T, kWeighted, kFp8>(block, importance, tried, unit);
    if constexpr (kTiled) {
      error = is_real ? error : 0.0f;
#pragma unroll
      for (int half = kBlock / 2; half > 0; half /= 2) {
        error = __fadd_rn(error, __shfl_xor_sync(kWarp, error, half));
      }
    }
    if (i == 0 || error < least) {
      best = candidate;
      least = error;
    }
  }
  if (is_real) {
    float const factor = te_factor<Range::kAny>(best, outer);
    Block<T> const numbers = without_nan(block);
    reinterpret_cast<uint2*>(p.codes)[row * p.num_blocks + column] = {encode_half(numbers, 0, factor),
                                                                      encode_half(numbers, 1, factor)};
    p.scales[scale_offset(row, column, p.num_words)] = best;
  }
}

template <class T, bool kTiled, bool kWeighted>
void launch_search(SearchParams const& p, cudaStream_t stream) {
  int64_t const threads = (kTiled ? round_up(p.m, kBlock) : p.m) * p.num_blocks;
  auto const grid = static_cast<unsigned>(ceil_div(threads, kSearchThreads));
  if (p.fp8_operand) {
    search_scales<T, kTiled, kWeighted, true><<<grid, kSearchThreads, 0, stream>>>(p);
  } else {
    search_scales<T, kTiled, kWeighted, false><<<grid, kSearchThreads, 0, stream>>>(p);
  }
}

template <class T, bool kTiled>
void launch_search(SearchParams const& p, cudaStream_t stream) {
  if (p.importance != nullptr) {
    launch_search<T, kTiled, true>(p, stream);
  } else {
    launch_search<T, kTiled, false>(p, stream);
  }
}

}  // namespace

fp4gemm_status_t launch_quantize_searched(fp4gemm_quantize_searched_args_t const& args,
                                          DeviceProperties const& properties, fp4gemm_stream_t stream) {
  bool const per_row = args.scaling == FP4GEMM_SCALING_ROW;
  if (args.m == 0) {
    // The amax of no elements is zero. Nothing else is written.
    if (!per_row && args.amax_given == nullptr) {
      FP4GEMM_CUDA(cudaMemsetAsync(args.amax, 0, sizeof(float), stream));
    }
    return FP4GEMM_SUCCESS;
  }
  int const num_blocks = static_cast<int>(args.k / kBlock);
  auto const bound = static_cast<float>(args.e4m3_max);
  SearchParams const params{args.x,
                            args.x_row_stride,
                            args.m,
                            num_blocks,
                            num_words_of(num_blocks),
                            args.amax_given != nullptr ? args.amax_given : args.amax,
                            per_row ? 1 : 0,
                            args.importance,
                            bound,
                            1.0f / (6.0f * bound),
                            args.fp8_operand != 0,
                            args.codes,
                            args.scales};
  if (args.amax_given == nullptr && !per_row) {
    FP4GEMM_TRY(launch_tensor_amax(Input{args.x, args.x_row_stride}, 1, args.m, args.k, args.x_dtype,
                                   FP4GEMM_HADAMARD_NONE, args.amax, properties.num_sms, stream));
  }
  int64_t const scale_bytes = scale_rows_of(args.m) * params.num_words * kScaleWord;
  FP4GEMM_CUDA(cudaMemsetAsync(args.scales, 0, scale_bytes, stream));
  for_type(args.x_dtype, [&](auto type) {
    using T = decltype(type);
    if (args.amax_given == nullptr && per_row) {
      auto const grid = static_cast<unsigned>(ceil_div(args.m, kSearchThreads / 32));
      row_amaxes<T><<<grid, kSearchThreads, 0, stream>>>(params, args.amax);
    }
    if (args.block_rows == kBlock) {
      launch_search<T, true>(params, stream);
    } else {
      launch_search<T, false>(params, stream);
    }
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
