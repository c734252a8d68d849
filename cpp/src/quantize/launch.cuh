// The kernel launches that the plan in quantize.cu is made of: one function, and one file, for each family.
#pragma once

#include "error.hpp"
#include "quantize/columns.cuh"
#include "quantize/rows.cuh"

namespace fp4gemm {

/// What all launches along rows share.
struct RowLaunch {
  RowParams params;  // amax_in null: row amaxes are to be found
  fp4gemm_dtype_t dtype;
  int64_t scale_rows;  // of the buffer, a multiple of 128
  DeviceProperties device;
  cudaStream_t stream;
};

/// The launch for rows of k elements with an amax each, where `out` gives none; the casts' options are the
/// caller's.
inline RowLaunch row_launch(Input const& input, int64_t m, int64_t k, fp4gemm_dtype_t dtype,
                            fp4gemm_quantized_t const& out, Groups const& groups,
                            DeviceProperties const& device, cudaStream_t stream) {
  int const num_blocks = static_cast<int>(k / kBlock);
  RowParams const params{input,
                         m,
                         num_blocks,
                         num_words_of(num_blocks),
                         out.codes,
                         out.scales,
                         static_cast<uint4*>(out.decoded),
                         out.amax,
                         out.amax_given,
                         AmaxAt::kRow,
                         groups,
                         {}};
  return {params, dtype, scale_rows_of(m, groups.offs, groups.num), device, stream};
}

void launch_rows_te(RowLaunch const& launch);
void launch_rows_variant(RowLaunch const& launch);
void launch_rows_hadamard(RowLaunch const& launch, fp4gemm_hadamard_t hadamard);
void launch_rows_four_over_six(RowLaunch const& launch);

/// What all launches along columns share.
struct TileLaunch {
  TileParams params;
  fp4gemm_dtype_t dtype;
  cudaStream_t stream;
};

void launch_tiles(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, bool is_variant);
void launch_tiles_four_over_six(TileLaunch const& launch);
void launch_squares(TileLaunch const& launch, bool four_over_six);

/// max |x| of the rotated or plain (m, k) input, into one number.
fp4gemm_status_t launch_tensor_amax(Input const& input, int64_t m, int64_t k, fp4gemm_dtype_t dtype,
                                    fp4gemm_hadamard_t hadamard, float* amax, int num_sms,
                                    cudaStream_t stream);

/// max |x| of each group, at the amax of its first row.
fp4gemm_status_t launch_group_amax(Input const& input, int64_t m, int64_t k, fp4gemm_dtype_t dtype,
                                   fp4gemm_hadamard_t hadamard, Groups const& groups, float* amax,
                                   cudaStream_t stream);

/// max |x| of columns, or of all columns together, and perhaps of rows.
fp4gemm_status_t launch_columns_amax(ColumnAmaxParams const& params, fp4gemm_dtype_t dtype,
                                     fp4gemm_hadamard_t hadamard, cudaStream_t stream);

/// Calls launch with a value of the type that dtype names.
template <class Launch>
void for_type(fp4gemm_dtype_t dtype, Launch const& launch) {
  switch (dtype) {
    case FP4GEMM_BF16: launch(__nv_bfloat16{}); break;
    case FP4GEMM_FP16: launch(__half{}); break;
    case FP4GEMM_FP32: launch(float{}); break;
  }
}

/// Blocks that a thread holds in registers.
template <class Loader>
constexpr int kDepth = sizeof(typename Loader::Element) == 4 ? 2 : 4;

/// Launches quantize_rows if a row fits.
template <class Loader, class Cast, Amax kAmax, Cover kCover, bool kGrouped, bool kLooped, int kThreadsPerRow,
          int kBlocksPerThread>
bool launch_rows(RowLaunch const& launch) {
  if (!kLooped && 4 * launch.params.num_words > kThreadsPerRow * kBlocksPerThread) {
    return false;
  }
  constexpr int kCtaRows = kThreadsPerRow == 32 || kCover == Cover::kQuads ? kQuad : 1;
  constexpr int kThreads = kRowThreads<kThreadsPerRow>;
  size_t const staged_bytes = kCover == Cover::kQuads && launch.params.num_words <= kMaxStagedWords
                                  ? launch.params.num_words * sizeof(uint4)
                                  : 0;
  // The kernel waits for what went before by itself, so that its launch may overlap the end of that.
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(launch.scale_rows / kCtaRows);
  config.blockDim = kThreads;
  config.dynamicSmemBytes = staged_bytes;
  config.stream = launch.stream;
  config.attrs = &overlap;
  config.numAttrs = launch.device.arch >= 90 ? 1 : 0;
  // A failure is kept for cudaGetLastError, which the caller asks.
  (void)cudaLaunchKernelEx(
      &config,
      quantize_rows<Loader, Cast, kAmax, kCover, kGrouped, kLooped, kThreadsPerRow, kBlocksPerThread>,
      launch.params);
  return true;
}

/// The shapes that serve every size, for all but the most common cast. kDeep: blocks that a thread holds;
/// fewer for what computes much, so that more threads have room.
template <class Loader, class Cast, int kDeep>
void launch_rows_any(RowLaunch const& launch) {
  constexpr Cover kQuads = Cover::kQuads;
  constexpr Amax kEither = Amax::kEither;
  constexpr int kMiddle = 512 / kDeep;
  (void)(launch_rows<Loader, Cast, kEither, kQuads, true, false, 32, kDeep>(launch) ||
         launch_rows<Loader, Cast, kEither, kQuads, true, false, kMiddle, kDeep>(launch) ||
         launch_rows<Loader, Cast, kEither, kQuads, true, true, 256, 2>(launch));
}

}  // namespace fp4gemm
