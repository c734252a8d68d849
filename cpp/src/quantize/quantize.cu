// NVFP4 quantization: the choice of kernels for a call, and the search for the amax of whole tensors and
// groups.
#include "quantize/quantize.hpp"

#include <algorithm>

#include "quantize/grid.hpp"
#include "quantize/launch.cuh"
#include "quantize/rows_fp8.cuh"
#include "quantize/stacks.hpp"

namespace fp4gemm {
namespace {

constexpr int kAmaxThreads = 256;
constexpr int kAmaxUnroll = 4;

// Rows of a group, on average, up to which quantize_group_columns is used. A group may have any number of
// rows, but those of a long group take longer than in columns_amax and quantize_tiles, since one CTA has all
// rows of a strip.
constexpr int64_t kMostRowsPerGroup = 128;

// Rows of x up to which its single launch is faster even where it has fewer CTAs than there are SMs.
constexpr int64_t kFewRows = 512;

/// Combines max |x| of `rows` rows of `blocks_per_row` blocks into amax[matrix], which must not be negative
/// before, for matrix blockIdx.z + first_matrix of a stack of such matrices.
///
/// @tparam Loader What x is loaded by (loaders.cuh), which includes the Hadamard transform.
template <class Loader>
__global__ void __launch_bounds__(kAmaxThreads)
    tensor_amax(Input input, unsigned first_matrix, int64_t rows, int64_t blocks_per_row, float* amax) {
  using Element = typename Loader::Element;
  static_assert(cuda::std::is_same_v<decltype(&Loader::load), Block<Element> (Loader::*)(int64_t) const>,
                "a contiguous x is one row, whose blocks have numbers beyond 32 bits from 2^35 elements on");
  int64_t const matrix = int64_t{first_matrix} + blockIdx.z;
  uint32_t bits = 0;
  for (int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    Loader const loader(input, matrix * rows + row, 0);
    int64_t const step = int64_t{gridDim.x} * kAmaxThreads;
    int64_t block = int64_t{blockIdx.x} * kAmaxThreads + threadIdx.x;
    for (; block + (kAmaxUnroll - 1) * step < blocks_per_row; block += kAmaxUnroll * step) {
      Block<Element> loaded[kAmaxUnroll];
#pragma unroll
      for (int i = 0; i < kAmaxUnroll; ++i) {
        loaded[i] = loader.load(block + i * step);
      }
#pragma unroll
      for (int i = 0; i < kAmaxUnroll; ++i) {
        bits = max(bits, block_amax_bits(loaded[i]));
      }
    }
    for (; block < blocks_per_row; block += step) {
      bits = max(bits, block_amax_bits(loader.load(block)));
    }
  }
  bits = row_max<kAmaxThreads>(bits, 0);
  if (threadIdx.x == 0) {
    combine_amax(amax + matrix, Block<Element>::from_bits(bits));
  }
}

/// Combines max |x| of each group into the amax of its first row, with a CTA for each row.
template <class Loader>
__global__ void __launch_bounds__(kAmaxThreads)
    group_amax(Input input, Groups groups, int64_t m, int num_blocks, float* amax) {
  using Element = typename Loader::Element;
  int const row = static_cast<int>(blockIdx.x);
  int start = 0;  // the first row of the group: the last end that is not behind the row
  for (int first = 0; first < groups.num; first += 32) {
    int const e = first + static_cast<int>(threadIdx.x % 32);
    int const end = e < groups.num ? clamp_row(__ldg(groups.offs + e), m) : 0;
    start = max(
        start, static_cast<int>(__reduce_max_sync(0xFFFFFFFFu, static_cast<unsigned>(end <= row ? end : 0))));
  }
  if (row >= __ldg(groups.offs + groups.num - 1)) {
    return;
  }
  Loader const loader(input, row, 0);
  uint32_t bits = 0;
  for (int block = static_cast<int>(threadIdx.x); block < num_blocks; block += kAmaxThreads) {
    bits = max(bits, block_amax_bits(loader.load(block)));
  }
  bits = row_max<kAmaxThreads>(bits, 0);
  if (threadIdx.x == 0) {
    combine_amax(amax + start, Block<Element>::from_bits(bits));
  }
}

/// Calls launch with the loader for a type of x and a Hadamard transform, as a type_identity.
template <class Launch>
void for_loader(fp4gemm_dtype_t dtype, fp4gemm_hadamard_t hadamard, bool draws_signs, Launch const& launch) {
  for_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (draws_signs) {
      launch(cuda::std::type_identity<HadamardLoader<T, DrawnSigns>>{});
      return;
    }
    switch (hadamard) {
      case FP4GEMM_HADAMARD_NONE: launch(cuda::std::type_identity<PlainLoader<T>>{}); break;
      case FP4GEMM_HADAMARD_BF16: launch(cuda::std::type_identity<HadamardLoader<T, __nv_bfloat16>>{}); break;
      case FP4GEMM_HADAMARD_FP32: launch(cuda::std::type_identity<HadamardLoader<T, float>>{}); break;
    }
  });
}

/// The random state from which the signs of the Hadamard transform are drawn; null: they are not.
int64_t const* state_of_signs(fp4gemm_quantize_args_t const& args) {
  return args.encode == FP4GEMM_ENCODE_EDEN ? args.rng_state : nullptr;
}

fp4gemm_status_t launch_along_rows(fp4gemm_quantize_args_t const& args, DeviceProperties const& properties,
                                   cudaStream_t stream) {
  fp4gemm_quantized_t const& out = args.row;
  bool const per_row = args.scaling == FP4GEMM_SCALING_ROW;
  Input input{args.x, args.x_row_stride};
  input.signs = sign_masks(args.hadamard_signs, args.x_dtype);
  input.rng_state = state_of_signs(args);
  input.rows = args.x_rows;
  input.num_rows = args.x_num_rows;
  Groups groups{args.offs, args.num_groups};
  if (out.fp8 != nullptr) {
    launch_rows_fp8(
        fp8_launch(input, args.m, args.k, args.x_dtype, out.fp8, out.amax, groups, properties, stream));
    return FP4GEMM_SUCCESS;
  }
  bool const is_te = out.hadamard == FP4GEMM_HADAMARD_NONE && args.encode == FP4GEMM_ENCODE_TE &&
                     args.four_over_six == FP4GEMM_FOUR_OVER_SIX_NONE && args.rng_state == nullptr;
  if (is_te && out.decoded != nullptr && per_row && out.amax_given == nullptr && groups.offs != nullptr) {
    // Decoded rows have no scales whose place depends on the group; those of no group are zero.
    input.row_limit = groups.offs + groups.num - 1;
    groups = {};
  }
  RowLaunch launch = row_launch(input, args.m, args.k, args.x_dtype, out, groups, properties, stream);
  RowParams& params = launch.params;
  params.cast = cast_options(args);
  if (!per_row) {
    params.amax_at = args.offs != nullptr ? AmaxAt::kGroup : AmaxAt::kStart;
  }
  if (out.amax_given != nullptr) {
    // The amax of each group is repeated for its rows; others are the caller's.
    params.amax = args.offs != nullptr && !per_row ? out.amax : nullptr;
  } else if (!per_row && args.offs != nullptr) {
    FP4GEMM_TRY(
        launch_group_amax(input, args.m, args.k, args.x_dtype, out.hadamard, groups, out.amax, stream));
    params.amax_in = out.amax;
    params.amax_at = AmaxAt::kGroupStart;
  } else if (!per_row) {
    FP4GEMM_TRY(launch_tensor_amax(input, 1, args.m, args.k, args.x_dtype, out.hadamard, out.amax,
                                   properties.num_sms, stream));
    params.amax_in = out.amax;
    params.amax = nullptr;
  }
  bool const four_over_six = args.four_over_six != FP4GEMM_FOUR_OVER_SIX_NONE;
  if (args.residual_channels != nullptr) {
    params.channels = args.residual_channels;
    params.num_residual_blocks = args.num_residual_channels / kBlock;
    params.num_words = num_words_of(params.num_blocks + params.num_residual_blocks);
    launch_rows_residual(launch, four_over_six);
  } else if (four_over_six) {
    launch_rows_four_over_six(launch);
  } else if (out.hadamard != FP4GEMM_HADAMARD_NONE) {
    launch_rows_hadamard(launch, out.hadamard);
  } else if (params.cast.te_per_token || params.cast.rng_state != nullptr) {
    launch_rows_variant(launch);
  } else if (input.rows != nullptr || input.row_limit != nullptr) {
    launch_rows_gathered(launch);
  } else {
    launch_rows_te(launch);
  }
  return FP4GEMM_SUCCESS;
}

/// The number of columns of the quantized x^T.
int64_t columns_of(fp4gemm_quantize_args_t const& args) {
  return args.offs != nullptr ? fp4gemm_grouped_columns(args.m, args.num_groups) : args.m;
}

/// Finds the amaxes of the directions that are quantized and whose amax is not given. *row and *column become
/// the addresses of found and given ones.
fp4gemm_status_t find_amaxes(fp4gemm_quantize_args_t const& args, int num_matrices, int num_sms,
                             cudaStream_t stream, float const** row, float const** column) {
  bool const per_row = args.scaling == FP4GEMM_SCALING_ROW;
  bool const wants_row = args.row.codes != nullptr && args.row.amax_given == nullptr;
  bool const wants_column = is_wanted(args.column) && args.column.amax_given == nullptr;
  *row = args.row.amax_given != nullptr ? args.row.amax_given : args.row.amax;
  *column = args.column.amax_given != nullptr ? args.column.amax_given : args.column.amax;
  fp4gemm_hadamard_t const hadamard = args.column.hadamard;
  Groups const groups{args.offs, args.num_groups};
  ColumnAmaxParams const params{args.x,
                                args.x_row_stride,
                                args.m,
                                args.k,
                                columns_of(args),
                                nullptr,
                                args.column.amax,
                                !per_row,
                                sign_masks(args.hadamard_signs, args.x_dtype),
                                state_of_signs(args),
                                groups};
  Input const input{args.x, args.x_row_stride};
  if (per_row) {
    ColumnAmaxParams both = params;
    both.row_amax = wants_row ? args.row.amax : nullptr;
    return wants_column ? launch_columns_amax(both, num_matrices, args.x_dtype, hadamard, num_sms, stream)
                        : FP4GEMM_SUCCESS;
  }
  if (wants_row) {
    FP4GEMM_TRY(launch_tensor_amax(input, num_matrices, args.m, args.k, args.x_dtype, FP4GEMM_HADAMARD_NONE,
                                   args.row.amax, num_sms, stream));
  }
  if (wants_column && (hadamard != FP4GEMM_HADAMARD_NONE || groups.offs != nullptr)) {
    FP4GEMM_TRY(launch_columns_amax(params, num_matrices, args.x_dtype, hadamard, num_sms, stream));
  } else if (wants_column && wants_row) {
    FP4GEMM_CUDA(cudaMemcpyAsync(args.column.amax, args.row.amax, num_matrices * sizeof(float),
                                 cudaMemcpyDeviceToDevice, stream));
  } else if (wants_column) {
    FP4GEMM_TRY(launch_tensor_amax(input, num_matrices, args.m, args.k, args.x_dtype, FP4GEMM_HADAMARD_NONE,
                                   args.column.amax, num_sms, stream));
  }
  return FP4GEMM_SUCCESS;
}

/// Whether one kernel finds the amaxes of the columns and quantizes with them.
bool has_short_groups(fp4gemm_quantize_args_t const& args, int num_sms) {
  bool const fills_gpu = group_columns_ctas(args.k, args.num_groups) >= num_sms;
  return args.offs != nullptr && args.m <= kMostRowsPerGroup * args.num_groups &&
         (fills_gpu || args.m <= kFewRows) && args.scaling == FP4GEMM_SCALING_ROW &&
         args.four_over_six == FP4GEMM_FOUR_OVER_SIX_NONE && args.block_rows != kBlock &&
         args.row.codes == nullptr && args.column.amax_given == nullptr;
}

fp4gemm_status_t launch_along_columns(fp4gemm_quantize_args_t const& args, int num_matrices,
                                      DeviceProperties const& properties, cudaStream_t stream) {
  bool const per_row = args.scaling == FP4GEMM_SCALING_ROW;
  float const* row_amax = nullptr;
  float const* column_amax = nullptr;
  bool const finds_amax = has_short_groups(args, properties.num_sms);
  if (!finds_amax) {
    FP4GEMM_TRY(find_amaxes(args, num_matrices, properties.num_sms, stream, &row_amax, &column_amax));
  }
  auto const side = [&](fp4gemm_quantized_t const& out, float const* amax, int64_t length) {
    int const num_blocks = static_cast<int>(length / kBlock);
    return Side{out.codes, out.scales, static_cast<uint4*>(out.decoded), amax,
                per_row,   num_blocks, num_words_of(num_blocks)};
  };
  TileLaunch launch{{args.x,
                     args.x_row_stride,
                     args.m,
                     args.k,
                     side(args.row, row_amax, args.k),
                     side(args.column, column_amax, columns_of(args)),
                     sign_masks(args.hadamard_signs, args.x_dtype),
                     cast_options(args),
                     {args.offs, args.num_groups}},
                    args.x_dtype,
                    properties,
                    stream};
  bool const four_over_six = args.four_over_six != FP4GEMM_FOUR_OVER_SIX_NONE;
  if (finds_amax) {
    launch_group_columns(launch, args.column.hadamard, args.column.amax);
  } else if (args.block_rows == kBlock) {
    if (row_amax == nullptr) {
      launch.params.row.amax = column_amax;  // a square has one scale for both sides
    }
    launch_squares(launch, four_over_six, num_matrices);
  } else if (four_over_six) {
    launch_tiles_four_over_six(launch, num_matrices);
  } else {
    bool const is_variant = args.encode == FP4GEMM_ENCODE_TE_PER_TOKEN || args.rng_state != nullptr;
    launch_tiles(launch, args.column.hadamard, is_variant, num_matrices);
  }
  return FP4GEMM_SUCCESS;
}

}  // namespace

fp4gemm_status_t launch_tensor_amax(Input const& input, int num_matrices, int64_t m, int64_t k,
                                    fp4gemm_dtype_t dtype, fp4gemm_hadamard_t hadamard, float* amax,
                                    int num_sms, cudaStream_t stream) {
  FP4GEMM_CUDA(cudaMemsetAsync(amax, 0, num_matrices * sizeof(float), stream));
  bool const flat = input.row_stride == k;  // a matrix is one long row
  Input rows_of = input;
  rows_of.row_stride = flat ? m * k : input.row_stride;
  int64_t const rows = flat ? 1 : m;
  int64_t const blocks_per_row = (flat ? m * k : k) / kBlock;
  int64_t const ctas = ceil_div(8 * int64_t{num_sms}, num_matrices);  // of a matrix
  int64_t const ctas_per_row = std::clamp<int64_t>(ceil_div(blocks_per_row, kAmaxThreads), 1, ctas);
  int64_t const grid_rows = std::clamp<int64_t>(ctas / ctas_per_row, 1, rows);
  for_grid_parts(num_matrices, kMaxGridY, [&](int64_t first_matrix, unsigned matrices) {
    dim3 const grid(static_cast<unsigned>(ctas_per_row), static_cast<unsigned>(grid_rows), matrices);
    for_loader(dtype, hadamard, input.rng_state != nullptr, [&](auto loader) {
      using Loader = typename decltype(loader)::type;
      tensor_amax<Loader><<<grid, kAmaxThreads, 0, stream>>>(rows_of, static_cast<unsigned>(first_matrix),
                                                             rows, blocks_per_row, amax);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_group_amax(Input const& input, int64_t m, int64_t k, fp4gemm_dtype_t dtype,
                                   fp4gemm_hadamard_t hadamard, Groups const& groups, float* amax,
                                   cudaStream_t stream) {
  FP4GEMM_CUDA(cudaMemsetAsync(amax, 0, m * sizeof(float), stream));
  for_loader(dtype, hadamard, input.rng_state != nullptr, [&](auto loader) {
    using Loader = typename decltype(loader)::type;
    group_amax<Loader><<<static_cast<unsigned>(m), kAmaxThreads, 0, stream>>>(
        input, groups, m, static_cast<int>(k / kBlock), amax);
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_quantize(fp4gemm_quantize_args_t const& args, DeviceProperties const& properties,
                                 fp4gemm_stream_t stream) {
  return launch_quantize_stack(args, 1, properties, stream);
}

fp4gemm_status_t launch_quantize_stack(fp4gemm_quantize_args_t const& args, int num_matrices,
                                       DeviceProperties const& properties, fp4gemm_stream_t stream) {
  bool const is_column = is_wanted(args.column);
  if (args.offs != nullptr && is_column && is_wanted(args.row)) {
    // Groups of rows and groups of columns have kernels of their own.
    fp4gemm_quantize_args_t one = args;
    one.column = FP4GEMM_QUANTIZED_INIT;
    FP4GEMM_TRY(launch_quantize(one, properties, stream));
    one.row = FP4GEMM_QUANTIZED_INIT;
    one.column = args.column;
    return launch_quantize(one, properties, stream);
  }
  if (args.m == 0) {
    // The amax of no elements is zero. Nothing else is written.
    bool const per_row = args.scaling == FP4GEMM_SCALING_ROW;
    fp4gemm_quantized_t const& side = is_column ? args.column : args.row;
    int64_t num_amaxes = per_row || args.offs != nullptr ? 0 : num_matrices;
    if (is_column) {
      int64_t const num_groups = args.offs != nullptr ? args.num_groups : 1;
      num_amaxes = per_row ? num_groups * args.k : num_groups;
    }
    if (side.amax_given == nullptr && num_amaxes > 0) {
      FP4GEMM_CUDA(cudaMemsetAsync(side.amax, 0, num_amaxes * sizeof(float), stream));
    }
    return FP4GEMM_SUCCESS;
  }
  bool const tiled = is_column || args.block_rows == kBlock;
  FP4GEMM_TRY(tiled ? launch_along_columns(args, num_matrices, properties, stream)
                    : launch_along_rows(args, properties, stream));
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
