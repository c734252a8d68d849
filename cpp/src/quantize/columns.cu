// The launches of quantization along columns.
#include "quantize/grid.hpp"
#include "quantize/launch.cuh"
#include "quantize/tile_grids.hpp"

namespace fp4gemm {
namespace {

/// Calls launch with the form as a constant. Form::kBoth has no drawn signs, which rotate one direction.
template <class Rotation, class Launch>
void for_form(Groups const& groups, bool wants_rows, Launch const& launch) {
  if (groups.offs != nullptr) {
    launch(cuda::std::integral_constant<Form, Form::kGroups>{});
    return;
  }
  if constexpr (!cuda::std::is_same_v<Rotation, DrawnSigns>) {
    if (wants_rows) {
      launch(cuda::std::integral_constant<Form, Form::kBoth>{});
      return;
    }
  }
  launch(cuda::std::integral_constant<Form, Form::kColumns>{});
}

template <class T, class Cast, class Rotation>
void launch_tiles_of(TileLaunch const& launch, int num_matrices) {
  TileParams const& p = launch.params;
  for_form<Rotation>(p.groups, p.row.codes != nullptr, [&](auto form) {
    for_grid_parts(num_matrices, kMaxGridY, [&](int64_t first_matrix, unsigned matrices) {
      for_tile_grids(p.k, int64_t{p.column.num_blocks} * kBlock, [&](dim3 grid, unsigned first_tile) {
        grid.z = matrices;
        (void)launch_waiting(quantize_tiles<T, Cast, Rotation, decltype(form)::value>,
                             {grid, kTileThreads<T>}, launch.device.can_overlap_launches(), launch.stream, p,
                             first_tile, static_cast<unsigned>(first_matrix));
      });
    });
  });
}

/// Each CTA has the most rows for which there are three CTAs for each SM, since every CTA adds to the amaxes
/// in global memory.
template <class T, class Rotation>
void launch_amax_of(ColumnAmaxParams params, int num_matrices, int num_sms, cudaStream_t stream) {
  auto const width = static_cast<unsigned>(ceil_div(params.k, kColumnAmaxThreads * Panel<T>::kColumns));
  while (params.cta_rows > kBlock &&
         num_matrices * width * ceil_div(params.columns, params.cta_rows) < 3 * num_sms) {
    params.cta_rows /= 2;
  }
  for_form<Rotation>(params.groups, params.row_amax != nullptr, [&](auto form) {
    for_grid_parts(num_matrices, kMaxGridY, [&](int64_t first_matrix, unsigned matrices) {
      for_grid_parts(ceil_div(params.columns, params.cta_rows), kMaxGridY,
                     [&](int64_t first, unsigned count) {
                       columns_amax<T, Rotation, decltype(form)::value>
                           <<<dim3(width, count, matrices), kColumnAmaxThreads, 0, stream>>>(
                               params, static_cast<unsigned>(first), static_cast<unsigned>(first_matrix));
                     });
    });
  });
}

}  // namespace

void launch_tiles(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, bool is_variant, int num_matrices) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    using Variant = VariantCast<Range::kRegular>;
    if (launch.params.cast.is_eden) {
      launch_tiles_of<T, EdenCast<Range::kRegular>, DrawnSigns>(launch, num_matrices);
    } else if (hadamard == FP4GEMM_HADAMARD_BF16) {
      launch_tiles_of<T, Variant, __nv_bfloat16>(launch, num_matrices);
    } else if (hadamard == FP4GEMM_HADAMARD_FP32) {
      launch_tiles_of<T, Variant, float>(launch, num_matrices);
    } else if (is_variant) {
      launch_tiles_of<T, Variant, void>(launch, num_matrices);
    } else {
      launch_tiles_of<T, TeCast<Range::kRegular>, void>(launch, num_matrices);
    }
  });
}

void launch_tiles_four_over_six(TileLaunch const& launch, int num_matrices) {
  for_type(launch.dtype, [&](auto type) {
    launch_tiles_of<decltype(type), FourOverSixCast<Range::kRegular>, void>(launch, num_matrices);
  });
}

fp4gemm_status_t launch_columns_amax(ColumnAmaxParams const& params, int num_matrices, fp4gemm_dtype_t dtype,
                                     fp4gemm_hadamard_t hadamard, int num_sms, cudaStream_t stream) {
  if (params.row_amax != nullptr) {
    FP4GEMM_CUDA(cudaMemsetAsync(params.row_amax, 0, params.m * sizeof(float), stream));
  }
  int64_t const num_groups = params.groups.offs != nullptr ? params.groups.num : num_matrices;
  int64_t const num_amaxes = params.column_is_tensor ? num_groups : num_groups * params.k;
  FP4GEMM_CUDA(cudaMemsetAsync(params.column_amax, 0, num_amaxes * sizeof(float), stream));
  for_type(dtype, [&](auto type) {
    using T = decltype(type);
    if (params.rng_state != nullptr) {
      launch_amax_of<T, DrawnSigns>(params, num_matrices, num_sms, stream);
      return;
    }
    switch (hadamard) {
      case FP4GEMM_HADAMARD_NONE: launch_amax_of<T, void>(params, num_matrices, num_sms, stream); break;
      case FP4GEMM_HADAMARD_BF16:
        launch_amax_of<T, __nv_bfloat16>(params, num_matrices, num_sms, stream);
        break;
      case FP4GEMM_HADAMARD_FP32: launch_amax_of<T, float>(params, num_matrices, num_sms, stream); break;
    }
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
