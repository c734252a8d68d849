// The launches of quantization along columns.
#include "quantize/launch.cuh"
#include "quantize/square.cuh"

namespace fp4gemm {
namespace {

/// columns: of x^T.
dim3 tile_grid(int64_t k, int64_t columns) {
  // Whole tiles of 128 x 4 scales of either side.
  return {static_cast<unsigned>(scale_rows_of(k) / kTileColumns),
          static_cast<unsigned>(ceil_div(columns, kTileRows))};
}

/// Calls launch with the form as a constant.
template <class Launch>
void for_form(Groups const& groups, bool wants_rows, Launch const& launch) {
  if (groups.offs != nullptr) {
    launch(cuda::std::integral_constant<Form, Form::kGroups>{});
  } else if (wants_rows) {
    launch(cuda::std::integral_constant<Form, Form::kBoth>{});
  } else {
    launch(cuda::std::integral_constant<Form, Form::kColumns>{});
  }
}

template <class T, class Cast, class Rotation>
void launch_tiles_of(TileLaunch const& launch) {
  TileParams const& p = launch.params;
  dim3 const grid = tile_grid(p.k, int64_t{p.column.num_blocks} * kBlock);
  for_form(p.groups, p.row.codes != nullptr, [&](auto form) {
    quantize_tiles<T, Cast, Rotation, decltype(form)::value><<<grid, kTileThreads<T>, 0, launch.stream>>>(p);
  });
}

template <class T, class Rotation>
void launch_amax_of(ColumnAmaxParams const& params, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(ceil_div(params.k, kColumnAmaxThreads * Panel<T>::kColumns)),
                  static_cast<unsigned>(ceil_div(params.columns, kAmaxRows)));
  for_form(params.groups, params.row_amax != nullptr, [&](auto form) {
    columns_amax<T, Rotation, decltype(form)::value><<<grid, kColumnAmaxThreads, 0, stream>>>(params);
  });
}

}  // namespace

void launch_tiles(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, bool is_variant) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    using Variant = VariantCast<Range::kRegular>;
    if (hadamard == FP4GEMM_HADAMARD_BF16) {
      launch_tiles_of<T, Variant, __nv_bfloat16>(launch);
    } else if (hadamard == FP4GEMM_HADAMARD_FP32) {
      launch_tiles_of<T, Variant, float>(launch);
    } else if (is_variant) {
      launch_tiles_of<T, Variant, void>(launch);
    } else {
      launch_tiles_of<T, TeCast<Range::kRegular>, void>(launch);
    }
  });
}

void launch_tiles_four_over_six(TileLaunch const& launch) {
  for_type(launch.dtype, [&](auto type) {
    launch_tiles_of<decltype(type), FourOverSixCast<Range::kRegular>, void>(launch);
  });
}

void launch_squares(TileLaunch const& launch, bool four_over_six) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    dim3 const grid = tile_grid(launch.params.k, launch.params.m);
    if (four_over_six) {
      quantize_squares<T, true><<<grid, kTileThreads<T>, 0, launch.stream>>>(launch.params);
    } else {
      quantize_squares<T, false><<<grid, kTileThreads<T>, 0, launch.stream>>>(launch.params);
    }
  });
}

fp4gemm_status_t launch_columns_amax(ColumnAmaxParams const& params, fp4gemm_dtype_t dtype,
                                     fp4gemm_hadamard_t hadamard, cudaStream_t stream) {
  if (params.row_amax != nullptr) {
    FP4GEMM_CUDA(cudaMemsetAsync(params.row_amax, 0, params.m * sizeof(float), stream));
  }
  FP4GEMM_CUDA(cudaMemsetAsync(params.column_amax, 0,
                               (params.column_is_tensor ? 1 : params.k) * sizeof(float), stream));
  for_type(dtype, [&](auto type) {
    using T = decltype(type);
    switch (hadamard) {
      case FP4GEMM_HADAMARD_NONE: launch_amax_of<T, void>(params, stream); break;
      case FP4GEMM_HADAMARD_BF16: launch_amax_of<T, __nv_bfloat16>(params, stream); break;
      case FP4GEMM_HADAMARD_FP32: launch_amax_of<T, float>(params, stream); break;
    }
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
