// The launches from which quantize.cu chooses: one function for each family of kernels.
#pragma once

#include "device.hpp"
#include "error.hpp"
#include "for_type.cuh"
#include "launch.hpp"
#include "quantize/columns_amax.cuh"
#include "quantize/rows.cuh"

namespace fp4gemm {

/// The arguments of all launches along rows.
struct RowLaunch {
  RowParams params;  // amax_in null: the amax of each row is found
  fp4gemm_dtype_t dtype;
  int64_t scale_rows;  // of the buffer, a multiple of 128
  DeviceProperties device;
  cudaStream_t stream;
};

/// The launch for m rows of k elements. Each row has an amax, which is found unless `out` gives it. The
/// options of the cast keep their defaults; the caller sets them.
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
/// launch_rows_te with the gather that params.input describes, and an amax that is found.
void launch_rows_gathered(RowLaunch const& launch);
void launch_rows_variant(RowLaunch const& launch);
void launch_rows_hadamard(RowLaunch const& launch, fp4gemm_hadamard_t hadamard);
void launch_rows_four_over_six(RowLaunch const& launch);
/// Appends the errors of params.channels; params.num_words counts their scales too.
void launch_rows_residual(RowLaunch const& launch, bool four_over_six);

/// The arguments of all launches along columns.
struct TileLaunch {
  TileParams params;
  fp4gemm_dtype_t dtype;
  DeviceProperties device;
  cudaStream_t stream;
};

/// launch.params describes the first of num_matrices matrices, which follow each other as their results do;
/// with groups, or along rows too, there is one.
void launch_tiles(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, bool is_variant, int num_matrices);
void launch_tiles_four_over_six(TileLaunch const& launch, int num_matrices);
/// Quantizes columns of groups with few rows. Writes max |x| of each column in each group, after the
/// Hadamard transform if there is one, to amax (num_groups, k).
void launch_group_columns(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, float* amax);
/// The number of CTAs of that launch.
int64_t group_columns_ctas(int64_t k, int num_groups);
/// num_matrices: see launch_tiles.
void launch_squares(TileLaunch const& launch, bool four_over_six, int num_matrices);

/// Writes max |x| of each (m, k) matrix of the input, after the Hadamard transform if there is one, to amax
/// (num_matrices).
fp4gemm_status_t launch_tensor_amax(Input const& input, int num_matrices, int64_t m, int64_t k,
                                    fp4gemm_dtype_t dtype, fp4gemm_hadamard_t hadamard, float* amax,
                                    int num_sms, cudaStream_t stream);

/// Writes max |x| of each group to the amax of its first row, and zeros to those of all other rows.
fp4gemm_status_t launch_group_amax(Input const& input, int64_t m, int64_t k, fp4gemm_dtype_t dtype,
                                   fp4gemm_hadamard_t hadamard, Groups const& groups, float* amax,
                                   cudaStream_t stream);

/// Writes max |x| of each column, or of all columns together, in each group if there are groups and in each
/// of num_matrices matrices, and of each row where params.row_amax is not null. With groups, or with rows,
/// there is one matrix.
fp4gemm_status_t launch_columns_amax(ColumnAmaxParams const& params, int num_matrices, fp4gemm_dtype_t dtype,
                                     fp4gemm_hadamard_t hadamard, int num_sms, cudaStream_t stream);

/// Blocks that a thread holds in registers in the most common cast.
template <class Loader>
constexpr int kPlainDepth = sizeof(typename Loader::Element) == 4 ? 2 : 4;

/// Launches quantize_rows and returns true, unless a row has more blocks than the shape has room for. A
/// launch failure is left to cudaGetLastError, which the caller checks.
template <class Loader, class Cast, class Shape>
bool launch_rows(RowLaunch const& launch) {
  int const num_words = launch.params.num_words;
  if (!Shape::kLooped && kScaleWord * num_words > Shape::kTurnBlocks) {
    return false;
  }
  bool const is_staged = Shape::kCover == Cover::kQuads && num_words <= kMaxStagedWords;
  Ctas const ctas{static_cast<unsigned>(launch.scale_rows / Shape::kCtaRows), Shape::kThreads,
                  is_staged ? num_words * sizeof(uint4) : 0};
  (void)launch_waiting(quantize_rows<Loader, Cast, Shape>, ctas, launch.device.can_overlap_launches(),
                       launch.stream, launch.params);
  return true;
}

/// Launches shapes that serve all sizes, groups and either kind of amax.
///
/// @tparam kDepth Blocks that a thread holds in registers, 2 or 4; casts that compute much use fewer, so that
///     more threads fit on an SM.
template <class Loader, class Cast, int kDepth>
void launch_rows_any(RowLaunch const& launch) {
  constexpr Amax kEither = Amax::kEither;
  constexpr Cover kQuads = Cover::kQuads;
  (void)(launch_rows<Loader, Cast, RowShape<kEither, kQuads, true, false, 32, kDepth>>(launch) ||
         launch_rows<Loader, Cast, RowShape<kEither, kQuads, true, false, 128, kDepth>>(launch) ||
         launch_rows<Loader, Cast, RowShape<kEither, kQuads, true, false, 512 / kDepth, kDepth>>(launch) ||
         launch_rows<Loader, Cast, RowShape<kEither, kQuads, true, true, 256, 2>>(launch));
}

/// Launches a shape without groups.
template <class Loader, Amax kAmax, Cover kCover, bool kLooped, int kThreadsPerRow, int kBlocksPerThread>
bool launch_rows_dense(RowLaunch const& launch) {
  using Shape = RowShape<kAmax, kCover, false, kLooped, kThreadsPerRow, kBlocksPerThread>;
  return launch_rows<Loader, TeCast<Range::kRegular>, Shape>(launch);
}

/// Launches TransformerEngine's cast without groups, in shapes for few and for many rows. With few rows the
/// latency of one row matters, and all its loads should be in flight at once. With many rows, fewer threads
/// with more blocks each spend less time in the reduction, and scales are written 16 bytes at a time.
template <class Loader, Amax kAmax>
void launch_dense(RowLaunch const& launch) {
  constexpr int kDeep = kPlainDepth<Loader>;
  constexpr Cover kSingles = Cover::kSingles;
  constexpr Cover kQuads = Cover::kQuads;
  if (launch.params.m < 8 * launch.device.num_sms) {
    (void)(launch_rows_dense<Loader, kAmax, kSingles, false, 32, 1>(launch) ||
           launch_rows_dense<Loader, kAmax, kSingles, false, 128, 1>(launch) ||
           launch_rows_dense<Loader, kAmax, kSingles, false, 512, 1>(launch) ||
           launch_rows_dense<Loader, kAmax, kSingles, true, 1024, 1>(launch));
  } else {
    (void)(launch_rows_dense<Loader, kAmax, kQuads, false, 32, kDeep>(launch) ||
           launch_rows_dense<Loader, kAmax, kQuads, false, 128, kDeep / 2>(launch) ||
           launch_rows_dense<Loader, kAmax, kQuads, false, 128, kDeep>(launch) ||
           launch_rows_dense<Loader, kAmax, kQuads, false, 256, kDeep>(launch) ||
           launch_rows_dense<Loader, kAmax, kQuads, true, 256, kDeep>(launch));
  }
}

}  // namespace fp4gemm
