// NVFP4 quantization: one read of x where a row fits in registers, swizzled scales and their zero padding
// written in place.
#include <algorithm>

#include "error.hpp"
#include "quantize/block.cuh"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

struct QuantizeParams {
  void const* x;
  uint8_t* codes;
  uint8_t* scales;
  float* amax;
  int64_t m;
  int64_t x_row_stride;
  int num_blocks;  // of 16 in a row
  int num_words;   // of 4 scales in a row, padded
};

enum class Amax {
  kRow,    // of each row: found here and written
  kGiven,  // of the tensor: read from amax[0]
};

/// The maximum over the threads of a row. Every thread of the CTA must call it.
template <int kThreadsPerRow>
__device__ uint32_t row_max(uint32_t bits) {
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if constexpr (kThreadsPerRow > 32) {
    constexpr int kWarpsPerRow = kThreadsPerRow / 32;
    __shared__ uint32_t partial[32];
    int const warp = static_cast<int>(threadIdx.x / 32);
    int const lane = static_cast<int>(threadIdx.x % 32);
    if (lane == 0) {
      partial[warp] = bits;
    }
    __syncthreads();
    int const first = warp / kWarpsPerRow * kWarpsPerRow;
    bits = __reduce_max_sync(0xFFFFFFFFu, lane < kWarpsPerRow ? partial[first + lane] : 0u);
  }
  return bits;
}

/// Writes four neighbouring block scales as one word, to `target` in the lane of the first. Lanes 4i..4i+3
/// hold blocks 4j..4j+3 of the same row.
__device__ inline void store_scales(uint8_t* target, bool is_first, uint8_t scale) {
  uint32_t word = scale;
  word |= __shfl_down_sync(0xFFFFFFFFu, word, 1) << 8;
  word |= __shfl_down_sync(0xFFFFFFFFu, word, 2) << 16;
  if (is_first) {
    *reinterpret_cast<uint32_t*>(target) = word;
  }
}

/// kThreadsPerRow threads hold a row, kBlocksPerThread blocks each; kRowsPerCta rows a CTA. Rows from m to
/// the next multiple of 128 exist in the grid to write the zero padding of the scales.
template <class T, Amax kAmax, int kThreadsPerRow, int kBlocksPerThread, int kRowsPerCta>
__global__ void __launch_bounds__(kThreadsPerRow* kRowsPerCta) quantize_rows(QuantizeParams p) {
  int64_t const row = int64_t{blockIdx.x} * kRowsPerCta + threadIdx.x / kThreadsPerRow;
  int const thread = static_cast<int>(threadIdx.x % kThreadsPerRow);
  int const num_blocks = row < p.m ? p.num_blocks : 0;
  // Block i of the thread is block thread + i * kThreadsPerRow of the row, a constant distance from the
  // first.
  T const* const x = static_cast<T const*>(p.x) + row * p.x_row_stride + thread * kBlock;
  uint2* const codes = reinterpret_cast<uint2*>(p.codes) + row * p.num_blocks + thread;
  uint8_t* const scales = p.scales + scale_offset(row, thread, p.num_words);

  Block<T> blocks[kBlocksPerThread];
#pragma unroll
  for (int i = 0; i < kBlocksPerThread; ++i) {
    if (thread + i * kThreadsPerRow < num_blocks) {
      blocks[i] = load_block(x + i * (kThreadsPerRow * kBlock));
    } else {
      blocks[i] = {};
    }
  }
  uint32_t amax_bits[kBlocksPerThread];
  uint32_t thread_bits = 0;
#pragma unroll
  for (int i = 0; i < kBlocksPerThread; ++i) {
    amax_bits[i] = blocks[i].amax_bits();
    thread_bits = max(thread_bits, amax_bits[i]);
  }
  bool const has_nan = thread_bits > Block<T>::kInfinity;
  if (has_nan) {
    thread_bits = 0;
#pragma unroll
    for (int i = 0; i < kBlocksPerThread; ++i) {
      amax_bits[i] = amax_bits_ignoring_nan(blocks[i]);
      thread_bits = max(thread_bits, amax_bits[i]);
    }
  }
  float outer_amax;
  if constexpr (kAmax == Amax::kRow) {
    outer_amax = Block<T>::from_bits(row_max<kThreadsPerRow>(thread_bits));
    if (thread == 0 && row < p.m) {
      p.amax[row] = outer_amax;
    }
  } else {
    outer_amax = __ldg(p.amax);
  }

  OuterScale const outer(outer_amax);
#pragma unroll
  for (int i = 0; i < kBlocksPerThread; ++i) {
    int const block = thread + i * kThreadsPerRow;
    QuantizedBlock const quantized =
        quantize_block(blocks[i], Block<T>::from_bits(amax_bits[i]), has_nan, outer);
    if (block < num_blocks) {
      codes[i * kThreadsPerRow] = quantized.codes;
    }
    store_scales(scales + i * (kThreadsPerRow / 4 * 512), block % 4 == 0 && block < 4 * p.num_words,
                 block < num_blocks ? quantized.scale : uint8_t{0});
  }
}

/// max |x| of a block as bits, NaN ignored.
template <class T>
__device__ inline uint32_t block_amax_bits(Block<T> const& block) {
  uint32_t const bits = block.amax_bits();
  return bits <= Block<T>::kInfinity ? bits : amax_bits_ignoring_nan(block);
}

constexpr int kLongRowThreads = 1024;

/// Rows too long for registers: x is read twice, one CTA a row.
template <class T, Amax kAmax>
__global__ void __launch_bounds__(kLongRowThreads) quantize_long_rows(QuantizeParams p) {
  int64_t const row = blockIdx.x;
  T const* const x = static_cast<T const*>(p.x) + row * p.x_row_stride;
  int const num_blocks = row < p.m ? p.num_blocks : 0;
  float outer_amax;
  if constexpr (kAmax == Amax::kRow) {
    uint32_t bits = 0;
    for (int block = static_cast<int>(threadIdx.x); block < num_blocks; block += kLongRowThreads) {
      bits = max(bits, block_amax_bits(load_block(x + int64_t{block} * kBlock)));
    }
    outer_amax = Block<T>::from_bits(row_max<kLongRowThreads>(bits));
    if (threadIdx.x == 0 && row < p.m) {
      p.amax[row] = outer_amax;
    }
  } else {
    outer_amax = __ldg(p.amax);
  }

  OuterScale const outer(outer_amax);
  uint2* const codes = reinterpret_cast<uint2*>(p.codes) + row * p.num_blocks;
  // Every lane of a warp makes the same number of turns, as store_scales needs.
  for (int first = 0; first < 4 * p.num_words; first += kLongRowThreads) {
    int const block = first + static_cast<int>(threadIdx.x);
    uint8_t scale = 0;
    if (block < num_blocks) {
      Block<T> const loaded = load_block(x + int64_t{block} * kBlock);
      QuantizedBlock const quantized =
          quantize_block(loaded, Block<T>::from_bits(block_amax_bits(loaded)), true, outer);
      codes[block] = quantized.codes;
      scale = quantized.scale;
    }
    store_scales(p.scales + scale_offset(row, block, p.num_words), block % 4 == 0 && block < 4 * p.num_words,
                 scale);
  }
}

constexpr int kAmaxThreads = 256;
constexpr int kAmaxUnroll = 4;

/// max |x| of the tensor, combined into *amax, which holds a number that is not negative.
template <class T>
__global__ void __launch_bounds__(kAmaxThreads)
    tensor_amax(T const* x, int64_t rows, int64_t row_stride, int64_t blocks_per_row, float* amax) {
  uint32_t bits = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    T const* const start = x + row * row_stride;
    int64_t const step = int64_t{gridDim.x} * kAmaxThreads;
    int64_t block = int64_t{blockIdx.x} * kAmaxThreads + threadIdx.x;
    for (; block + (kAmaxUnroll - 1) * step < blocks_per_row; block += kAmaxUnroll * step) {
      Block<T> loaded[kAmaxUnroll];
#pragma unroll
      for (int i = 0; i < kAmaxUnroll; ++i) {
        loaded[i] = load_block(start + (block + i * step) * kBlock);
      }
#pragma unroll
      for (int i = 0; i < kAmaxUnroll; ++i) {
        bits = max(bits, block_amax_bits(loaded[i]));
      }
    }
    for (; block < blocks_per_row; block += step) {
      bits = max(bits, block_amax_bits(load_block(start + block * kBlock)));
    }
  }
  bits = row_max<kAmaxThreads>(bits);
  if (threadIdx.x == 0) {
    // Amaxes are not negative, so that their bits order as they do.
    atomicMax(reinterpret_cast<unsigned int*>(amax), __float_as_uint(Block<T>::from_bits(bits)));
  }
}

template <class T>
fp4gemm_status_t launch_amax(fp4gemm_quantize_args_t const& args, int num_sms, cudaStream_t stream) {
  FP4GEMM_CUDA(cudaMemsetAsync(args.amax, 0, sizeof(float), stream));
  bool const flat = args.x_row_stride == args.k;  // one long row
  int64_t const rows = flat ? 1 : args.m;
  int64_t const blocks_per_row = (flat ? args.m * args.k : args.k) / kBlock;
  int64_t const ctas = 8 * int64_t{num_sms};
  int64_t const ctas_per_row =
      std::clamp<int64_t>((blocks_per_row + kAmaxThreads - 1) / kAmaxThreads, 1, ctas);
  int64_t const grid_rows = std::clamp<int64_t>(ctas / ctas_per_row, 1, rows);
  dim3 const grid(static_cast<unsigned>(ctas_per_row), static_cast<unsigned>(grid_rows));
  tensor_amax<T><<<grid, kAmaxThreads, 0, stream>>>(static_cast<T const*>(args.x), rows, args.x_row_stride,
                                                    blocks_per_row, args.amax);
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

/// The launches of quantize_rows, narrow rows first.
template <class T, Amax kAmax>
struct RowLauncher {
  QuantizeParams const& params;
  int64_t padded_rows;
  cudaStream_t stream;

  template <int kThreadsPerRow, int kBlocksPerThread>
  bool launch() const {
    if (4 * params.num_words > kThreadsPerRow * kBlocksPerThread) {
      return false;
    }
    constexpr int kRowsPerCta = kThreadsPerRow < 128 ? 128 / kThreadsPerRow : 1;
    auto const grid = static_cast<unsigned>(padded_rows / kRowsPerCta);
    quantize_rows<T, kAmax, kThreadsPerRow, kBlocksPerThread, kRowsPerCta>
        <<<grid, kThreadsPerRow * kRowsPerCta, 0, stream>>>(params);
    return true;
  }

  void operator()(int num_sms) const {
    // With few rows the latency of one counts, so that all its loads should be in flight at once; with many,
    // fewer threads with more work each spend less on the reduction.
    constexpr int kDeep = sizeof(T) == 4 ? 2 : 4;
    bool const few_rows = params.m < 4 * num_sms;
    bool const launched =
        few_rows
            ? launch<32, 1>() || launch<128, 1>() || launch<512, 1>() || launch<1024, kDeep>()
            : launch<32, 1>() || launch<32, kDeep>() || launch<128, kDeep / 2>() || launch<128, kDeep>() ||
                  launch<256, kDeep>() || launch<512, kDeep>() || launch<1024, kDeep>();
    if (!launched) {
      quantize_long_rows<T, kAmax>
          <<<static_cast<unsigned>(padded_rows), kLongRowThreads, 0, stream>>>(params);
    }
  }
};

template <class T>
fp4gemm_status_t launch(fp4gemm_quantize_args_t const& args, int num_sms, cudaStream_t stream) {
  int const num_blocks = static_cast<int>(args.k / kBlock);
  QuantizeParams const params{args.x, args.codes,        args.scales, args.amax,
                              args.m, args.x_row_stride, num_blocks,  (num_blocks + 3) / 4};
  int64_t const padded_rows = (args.m + 127) / 128 * 128;
  if (args.scaling == FP4GEMM_SCALING_ROW) {
    RowLauncher<T, Amax::kRow>{params, padded_rows, stream}(num_sms);
  } else {
    FP4GEMM_TRY(launch_amax<T>(args, num_sms, stream));
    RowLauncher<T, Amax::kGiven>{params, padded_rows, stream}(num_sms);
  }
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace

fp4gemm_status_t launch_quantize(fp4gemm_quantize_args_t const& args, int num_sms, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    // A tensor of no elements has an amax of zero; there is nothing else to write.
    if (args.scaling == FP4GEMM_SCALING_TENSOR) {
      FP4GEMM_CUDA(cudaMemsetAsync(args.amax, 0, sizeof(float), stream));
    }
    return FP4GEMM_SUCCESS;
  }
  switch (args.x_dtype) {
    case FP4GEMM_BF16: return launch<__nv_bfloat16>(args, num_sms, stream);
    case FP4GEMM_FP16: return launch<__half>(args, num_sms, stream);
    case FP4GEMM_FP32: return launch<float>(args, num_sms, stream);
  }
  return fail(FP4GEMM_ERROR_INVALID_ARGUMENT,
              "x_dtype: is %d, must be FP4GEMM_BF16, FP4GEMM_FP16 or FP4GEMM_FP32",
              static_cast<int>(args.x_dtype));
}

}  // namespace fp4gemm
