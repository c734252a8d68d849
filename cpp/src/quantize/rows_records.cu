// Quantization of rows to records: codes, scales in plain order, and the amax of a row next to each other.
#include "moe/ranks.hpp"
#include "quantize/grid.hpp"
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

/// The arguments of quantize_to_records.
struct RecordParams {
  Input input;
  int64_t m;
  int num_blocks;  // of 16 elements in a row
  int num_words;   // of 4 scales in a row, padding included
  uint8_t* records;
  int64_t record_bytes;
  int64_t first_row;  // added to the numbers of rows, which select the random numbers
  CastOptions cast;
};

/// Writes the amax of a record, and the zeros behind it.
__device__ void store_amax(RecordParams const& p, uint8_t* record, float amax) {
  int64_t at = int64_t{8} * p.num_blocks + int64_t{kScaleWord} * p.num_words;
  *reinterpret_cast<float*>(record + at) = amax;
  for (at += 4; at < p.record_bytes; at += 4) {
    *reinterpret_cast<uint32_t*>(record + at) = 0;
  }
}

/// Quantizes rows of x as quantize_rows (rows.cuh) does, and writes their records.
///
/// @tparam Loader, Cast As of quantize_rows.
/// @tparam Shape How threads share the rows: a RowShape with Amax::kRow, Cover::kSingles and without groups.
template <class Loader, class Cast, class Shape>
__global__ void __launch_bounds__(Shape::kThreads, min_ctas<Loader, Shape>())
    quantize_to_records(RecordParams p) {
  using Element = typename Loader::Element;
  using AnyCast = typename Cast::template Rebind<Range::kAny>;
  static_assert(Shape::kAmax == Amax::kRow && Shape::kCover == Cover::kSingles && Shape::kRounds == 1 &&
                    !Shape::kGrouped,
                "a thread has one row, whose amax is found");
#if __CUDA_ARCH__ >= 900
  // As in quantize_rows: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int const thread = static_cast<int>(Shape::kWarpRows ? threadIdx.x % 32 : threadIdx.x);
  int64_t const row = int64_t{blockIdx.x} * Shape::kCtaRows + (Shape::kWarpRows ? threadIdx.x / 32 : 0);
  if (row >= p.m) {
    return;  // whole warps, each of which has a row of its own
  }
  typename Cast::Shared const shared(p.cast, 0);
  typename AnyCast::Shared const any_shared(p.cast, 0);
  int const num_scales = kScaleWord * p.num_words;
  int const num_turns = Shape::kLooped ? (num_scales + Shape::kTurnBlocks - 1) / Shape::kTurnBlocks : 1;
  int64_t const first_block = (p.first_row + row) * p.num_blocks + thread;
  uint8_t* const record = p.records + row * p.record_bytes;
  RowOutput const out{thread,
                      p.num_blocks,
                      num_scales,
                      false,
                      record + int64_t{8} * thread,
                      record + int64_t{8} * p.num_blocks + thread,
                      kScaleWord};

  Loader const loader(p.input, row, thread);
  Turn<Loader, Shape> turn;
  uint32_t bits = 0;
  // The first turn is loaded last, so that it stays in registers.
  for (int t = num_turns - 1; t >= 0; --t) {
    bits = max(bits, turn.load(loader, t, thread, p.num_blocks));
  }
  bool has_nan = false;
  float const amax = find_row_amax<Loader, Shape>(loader, bits, thread, p.num_blocks, 0.0f, 0, &has_nan);
  if (thread == 0) {
    store_amax(p, record, amax);
  }
  // All threads of a row have the same amax and has_nan.
  if (has_nan || !is_regular<Cast>(amax)) {
    AnyCast const cast(p.cast, any_shared, amax);
    quantize_irregular_row<Loader, AnyCast, Shape>(loader, cast, out, first_block, 0.0f);
  } else {
    Cast const cast(p.cast, shared, amax);
    quantize_regular_row<Loader, Cast, Shape>(loader, cast, out, first_block, num_turns, turn);
  }
}

struct RecordLaunch {
  RecordParams params;
  DeviceProperties const& device;
  cudaStream_t stream;
};

/// Launches quantize_to_records and returns true, unless a row has more blocks than the shape has room for.
template <class Loader, class Cast, bool kLooped, int kThreadsPerRow, int kBlocksPerThread>
bool launch_shape(RecordLaunch const& launch) {
  using Shape = RowShape<Amax::kRow, Cover::kSingles, false, kLooped, kThreadsPerRow, kBlocksPerThread>;
  if (!kLooped && kScaleWord * launch.params.num_words > Shape::kTurnBlocks) {
    return false;
  }
  Ctas const ctas{static_cast<unsigned>(ceil_div(launch.params.m, Shape::kCtaRows)), Shape::kThreads};
  (void)launch_waiting(quantize_to_records<Loader, Cast, Shape>, ctas, launch.device.can_overlap_launches(),
                       launch.stream, launch.params);
  return true;
}

/// @tparam kDepth Blocks that a thread holds in registers, as in launch_rows_any.
template <class Loader, class Cast, int kDepth>
void launch_cast(RecordLaunch const& launch) {
  (void)(launch_shape<Loader, Cast, false, 32, kDepth>(launch) ||
         launch_shape<Loader, Cast, false, 512 / kDepth, kDepth>(launch) ||
         launch_shape<Loader, Cast, true, 256, 2>(launch));
}

}  // namespace

fp4gemm_status_t launch_quantize_records(fp4gemm_quantize_records_args_t const& args,
                                         DeviceProperties const& properties, fp4gemm_stream_t stream) {
  if (args.m == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("quantize_records", args.m));
  int const num_blocks = static_cast<int>(args.k / kBlock);
  CastOptions cast;
  cast.rng_state = args.rng_state;
  cast.e4m3_max = static_cast<float>(args.e4m3_max);
  cast.mean_square = args.four_over_six == FP4GEMM_FOUR_OVER_SIX_MSE;
  cast.fast_error = args.fast_error != 0;
  RecordLaunch const launch{{{args.x, args.x_row_stride},
                             args.m,
                             num_blocks,
                             num_words_of(num_blocks),
                             static_cast<uint8_t*>(args.records),
                             fp4gemm_record_bytes(args.k),
                             args.first_row,
                             cast},
                            properties,
                            stream};
  for_type(args.x_dtype, [&](auto type) {
    using Loader = PlainLoader<decltype(type)>;
    if (args.four_over_six != FP4GEMM_FOUR_OVER_SIX_NONE) {
      launch_cast<Loader, FourOverSixCast<Range::kRegular>, 2>(launch);
    } else if (args.rng_state != nullptr) {
      launch_cast<Loader, VariantCast<Range::kRegular>, 2>(launch);
    } else {
      launch_cast<Loader, TeCast<Range::kRegular>, kPlainDepth<Loader>>(launch);
    }
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
