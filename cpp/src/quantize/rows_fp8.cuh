// FP8 tokens: one kernel reads rows, finds the amax of each, and writes e4m3 codes in the order in which
// Hopper's kernels multiply them. A row that fits in the registers of the threads that share it is read once.
#pragma once

#include "quantize/launch.cuh"

namespace fp4gemm {

/// The arguments of quantize_rows_fp8.
struct Fp8Params {
  Input input;  // its `rows` select rows of x for every loader; its row_limit is the first row of zeros
  int64_t m;
  int num_blocks;  // of 16 elements in a row, a multiple of kFp8Quad
  uint4* codes;    // out, (m, num_blocks)
  float* amax;     // out, (m)
};

/// The arguments of a launch.
struct Fp8Launch {
  Fp8Params params;
  fp4gemm_dtype_t dtype;
  DeviceProperties const& device;
  cudaStream_t stream;
};

/// The launch for m rows of k elements; `groups` only set where the rows of zeros begin.
inline Fp8Launch fp8_launch(Input const& input, int64_t m, int64_t k, fp4gemm_dtype_t dtype, uint8_t* codes,
                            float* amax, Groups const& groups, DeviceProperties const& device,
                            cudaStream_t stream) {
  Fp8Params params{input, m, static_cast<int>(k / kBlock), reinterpret_cast<uint4*>(codes), amax};
  params.input.row_limit = groups.offs != nullptr ? groups.offs + groups.num - 1 : nullptr;
  return {params, dtype, device, stream};
}

/// Blocks whose codes are transposed together: 64 elements.
constexpr int kFp8Quad = 4;

/// The row of x that row `row` of the result is made of, or -1 for a row of zeros.
__device__ inline int64_t source_row(Input const& input, int64_t row) {
  int64_t source = row;
  if (input.rows != nullptr) {
    source = load_after_wait(input.rows + row);
    source = source < input.num_rows ? source : -1;
  }
  bool const is_outside = input.row_limit != nullptr && row >= load_after_wait(input.row_limit);
  return is_outside ? -1 : source;
}

/// The factor of the elements of a row, min(448 / A, FLT_MAX), or 1 where A is 0 or infinite.
__device__ inline float fp8_factor(float amax) {
  bool const is_regular = amax > 0.0f && amax <= kFloatMax;
  return is_regular ? fminf(__fdiv_rn(448.0f, amax), kFloatMax) : 1.0f;
}

/// Four codes in the bytes of a word, e4m3(x * factor) of elements 4 * word to 4 * word + 3; NaN is 0x7F.
template <class T>
__device__ inline uint32_t encode_fp8_word(Block<T> const& block, int word, float factor) {
  float p[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    p[i] = __fmul_rn(block.element(4 * word + i), factor);
  }
#if __CUDA_ARCH__ >= 890
  uint32_t codes;
  asm("{\n"
      ".reg .b16 low, high;\n"
      "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
      "mov.b32 %0, {low, high};\n"
      "}"
      : "=r"(codes)
      : "f"(p[0]), "f"(p[1]), "f"(p[2]), "f"(p[3]));
  return codes;
#else
  return float_to_e4m3(p[0]) | float_to_e4m3(p[1]) << 8 | float_to_e4m3(p[2]) << 16 |
         static_cast<uint32_t>(float_to_e4m3(p[3])) << 24;
#endif
}

/// Of four neighbouring lanes, lane q gets word q of each lane's words, that of lane i as word i. All lanes
/// of the warp must call it.
__device__ inline uint4 transpose_quad(uint4 words) {
  bool const is_odd = threadIdx.x % 2 != 0;
  bool const is_upper = threadIdx.x / 2 % 2 != 0;
  // The words that the lane does not keep go to the lane whose number differs in one bit.
  auto const exchange = [](bool is_second, int distance, uint32_t& first, uint32_t& second) {
    uint32_t const got = __shfl_xor_sync(0xFFFFFFFFu, is_second ? first : second, distance);
    (is_second ? first : second) = got;
  };
  exchange(is_odd, 1, words.x, words.y);
  exchange(is_odd, 1, words.z, words.w);
  exchange(is_upper, 2, words.x, words.z);
  exchange(is_upper, 2, words.y, words.w);
  return words;
}

/// Quantizes rows. A warp converts and transposes its blocks together, those beyond the row included, whose
/// codes are not stored.
///
/// @tparam Loader What a row is made from (loaders.cuh).
/// @tparam Shape How threads share the rows: a RowShape with Amax::kRow, Cover::kSingles and without groups.
template <class Loader, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, min_ctas<Loader, Shape>()) quantize_rows_fp8(Fp8Params p) {
  static_assert(Shape::kAmax == Amax::kRow && Shape::kCover == Cover::kSingles && Shape::kRounds == 1 &&
                    !Shape::kGrouped,
                "a thread has one row, whose amax is found");
  static_assert(kBlock == 4 * kFp8Quad && Shape::kThreadsPerRow % kFp8Quad == 0,
                "neighbouring lanes have neighbouring blocks, of four words each");
#if __CUDA_ARCH__ >= 900
  // As in quantize_rows: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int const thread = static_cast<int>(Shape::kWarpRows ? threadIdx.x % 32 : threadIdx.x);
  int64_t const row = int64_t{blockIdx.x} * Shape::kCtaRows + (Shape::kWarpRows ? threadIdx.x / 32 : 0);
  if (row >= p.m) {
    return;  // whole warps, each of which has a row of its own
  }
  uint4* const codes = p.codes + row * p.num_blocks + thread;
  int64_t const source = source_row(p.input, row);
  if (source < 0) {  // all threads that share the row, which would meet at barriers below
    for (int offset = 0; thread + offset < p.num_blocks; offset += Shape::kThreadsPerRow) {
      codes[offset] = {};
    }
    if (thread == 0) {
      p.amax[row] = 0.0f;
    }
    return;
  }

  Loader const loader(p.input, source, thread);
  Turn<Loader, Shape> turn;
  int const num_turns = Shape::kLooped ? (p.num_blocks + Shape::kTurnBlocks - 1) / Shape::kTurnBlocks : 1;
  uint32_t bits = 0;
  // The first turn is loaded last, so that it stays in registers.
  for (int t = num_turns - 1; t >= 0; --t) {
    bits = max(bits, turn.load(loader, t, thread, p.num_blocks));
  }
  float norm = 0.0f;
  if constexpr (Loader::kIsNorm) {
    bits = turn.normalize(loader, p.input, thread, p.num_blocks, 0, &norm);
  }
  bool has_nan = false;
  float const amax = find_row_amax<Loader, Shape>(loader, bits, thread, p.num_blocks, norm, 0, &has_nan);
  if (thread == 0) {
    p.amax[row] = amax;
  }
  float const factor = fp8_factor(amax);
  int const first_of_warp = thread - thread % 32;
  for (int t = 0; t < num_turns; ++t) {
    if (t > 0) {
      turn.load(loader, t, thread, p.num_blocks);
    }
#pragma unroll
    for (int i = 0; i < Shape::kBlocksPerThread; ++i) {
      int const offset = turn.offset_of(t, i);
      if (first_of_warp + offset >= p.num_blocks) {
        break;  // the whole warp is behind the row
      }
      auto const& block = turn.blocks[i];
      uint4 const words =
          transpose_quad({encode_fp8_word(block, 0, factor), encode_fp8_word(block, 1, factor),
                          encode_fp8_word(block, 2, factor), encode_fp8_word(block, 3, factor)});
      if (thread + offset < p.num_blocks) {
        codes[offset] = words;
      }
    }
  }
}

/// Launches quantize_rows_fp8 and returns true, unless a row has more blocks than the shape has room for.
template <class Loader, bool kLooped, int kThreadsPerRow, int kBlocksPerThread>
bool launch_fp8_shape(Fp8Launch const& launch) {
  using Shape = RowShape<Amax::kRow, Cover::kSingles, false, kLooped, kThreadsPerRow, kBlocksPerThread>;
  if (!kLooped && launch.params.num_blocks > Shape::kTurnBlocks) {
    return false;
  }
  Ctas const ctas{static_cast<unsigned>(ceil_div(launch.params.m, Shape::kCtaRows)), Shape::kThreads};
  (void)launch_waiting(quantize_rows_fp8<Loader, Shape>, ctas, launch.device.can_overlap_launches(),
                       launch.stream, launch.params);
  return true;
}

/// Launches the shape for a call. As in launch_dense, few rows need all loads in flight at once, and many
/// rows fewer threads with more blocks each.
///
/// @tparam kDepth Blocks that a thread holds where there are many rows, 2 or 4.
template <class Loader, int kDepth>
void launch_fp8(Fp8Launch const& launch) {
  bool const has_few_rows = launch.params.m < 8 * launch.device.num_sms;
  bool const is_launched = has_few_rows ? launch_fp8_shape<Loader, false, 32, 1>(launch) ||
                                              launch_fp8_shape<Loader, false, 128, 1>(launch) ||
                                              launch_fp8_shape<Loader, false, 256, 1>(launch) ||
                                              launch_fp8_shape<Loader, false, 512, 1>(launch) ||
                                              launch_fp8_shape<Loader, false, 1024, 1>(launch)
                                        : launch_fp8_shape<Loader, false, 32, kDepth>(launch) ||
                                              launch_fp8_shape<Loader, false, 128, kDepth / 2>(launch) ||
                                              launch_fp8_shape<Loader, false, 128, kDepth>(launch) ||
                                              launch_fp8_shape<Loader, false, 256, kDepth>(launch) ||
                                              launch_fp8_shape<Loader, false, 512, kDepth>(launch);
  if (!is_launched && !launch_fp8_shape<Loader, false, 1024, 2>(launch)) {
    // A norm needs the whole row in registers, and has at most Rules::kMaxNormK elements.
    launch_fp8_shape<Loader, !Loader::kIsNorm, 1024, Loader::kIsNorm ? 4 : 2>(launch);
  }
}

/// The launches of quantize.cu and producers.cu: of rows of x, by number or by index; of SiLU(gate) * up; and
/// of RMS norms.
void launch_rows_fp8(Fp8Launch const& launch);
void launch_silu_fp8(Fp8Launch const& launch);
void launch_norm_fp8(Fp8Launch const& launch);

}  // namespace fp4gemm
