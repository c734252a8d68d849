// The launches of quantization along columns.
#include "quantize/launch.cuh"
#include "quantize/square.cuh"

namespace fp4gemm {
namespace {

dim3 tile_grid(TileParams const& p) {
  // Whole tiles of 128 x 4 scales of either side.
  auto const columns = ceil_div(p.k, 128) * 128 / kTileColumns;
  return {static_cast<unsigned>(columns), static_cast<unsigned>(ceil_div(p.m, kTileRows))};
}

template <class T, class Cast, class Rotation>
void launch_tiles_of(TileLaunch const& launch) {
  dim3 const grid = tile_grid(launch.params);
  if (launch.params.row.codes != nullptr) {
    quantize_tiles<T, Cast, Rotation, true><<<grid, kTileThreads<T>, 0, launch.stream>>>(launch.params);
  } else {
    quantize_tiles<T, Cast, Rotation, false><<<grid, kTileThreads<T>, 0, launch.stream>>>(launch.params);
  }
}

template <class T, class Rotation>
void launch_amax_of(ColumnAmaxParams const& params, cudaStream_t stream) {
  dim3 const grid(static_cast<unsigned>(ceil_div(params.k, kColumnAmaxThreads * Panel<T>::kColumns)),
                  static_cast<unsigned>(ceil_div(params.m, kAmaxRows)));
  if (params.row_amax != nullptr) {
    columns_amax<T, Rotation, true><<<grid, kColumnAmaxThreads, 0, stream>>>(params);
  } else {
    columns_amax<T, Rotation, false><<<grid, kColumnAmaxThreads, 0, stream>>>(params);
  }
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
    dim3 const grid = tile_grid(launch.params);
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
