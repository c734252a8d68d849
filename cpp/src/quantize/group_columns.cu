// The launches of quantization along columns of groups of few rows.
#include "quantize/group_columns.cuh"

#include "quantize/grid.hpp"
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

int64_t num_strips(int64_t k) { return scale_rows_of(k) / kStripColumns; }

template <class T, class Cast, class Rotation>
void launch_groups_of(TileLaunch const& launch, float* amax) {
  TileParams const& p = launch.params;
  auto const width = static_cast<unsigned>(num_strips(p.k));
  for_grid_parts(p.groups.num, kMaxGridY, [&](int64_t first_group, unsigned count) {
    (void)launch_waiting(quantize_group_columns<T, Cast, Rotation>, {dim3(width, count), kStripThreads<T>},
                         launch.device.can_overlap_launches(), launch.stream, p, amax,
                         static_cast<unsigned>(first_group));
  });
}

}  // namespace

int64_t group_columns_ctas(int64_t k, int num_groups) { return num_strips(k) * num_groups; }

void launch_group_columns(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, float* amax) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    using Variant = VariantCast<Range::kRegular>;
    if (launch.params.cast.is_eden) {
      launch_groups_of<T, EdenCast<Range::kRegular>, DrawnSigns>(launch, amax);
      return;
    }
    switch (hadamard) {
      case FP4GEMM_HADAMARD_NONE: launch_groups_of<T, Variant, void>(launch, amax); break;
      case FP4GEMM_HADAMARD_BF16: launch_groups_of<T, Variant, __nv_bfloat16>(launch, amax); break;
      case FP4GEMM_HADAMARD_FP32: launch_groups_of<T, Variant, float>(launch, amax); break;
    }
  });
}

}  // namespace fp4gemm
