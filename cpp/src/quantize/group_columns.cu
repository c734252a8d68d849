// The launches of quantization along columns of groups of few rows.
#include "quantize/group_columns.cuh"

#include "quantize/grid.hpp"
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

int64_t num_strips(int64_t k) { return scale_rows_of(k) / kStripColumns; }

template <class T, class Cast, class Rotated>
void launch_groups_of(TileLaunch const& launch, float* amax) {
  TileParams const& p = launch.params;
  auto const width = static_cast<unsigned>(num_strips(p.k));
  for_grid_parts(p.groups.num, kMaxGridY, [&](int64_t first_group, unsigned count) {
    (void)launch_waiting(quantize_group_columns<T, Cast, Rotated>, {dim3(width, count), kStripThreads<T>},
                         launch.device.can_overlap_launches(), launch.stream, p, amax,
                         static_cast<unsigned>(first_group));
  });
}

}  // namespace

int64_t group_columns_ctas(int64_t k, int num_groups) { return num_strips(k) * num_groups; }

void launch_group_columns(TileLaunch const& launch, fp4gemm_hadamard_t hadamard, float* amax) {
  using Variant = VariantCast<Range::kRegular>;
  if (hadamard == FP4GEMM_HADAMARD_NONE) {
    for_type(launch.dtype, [&](auto type) { launch_groups_of<decltype(type), Variant, void>(launch, amax); });
    return;
  }
  for_rotated_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    if (hadamard == FP4GEMM_HADAMARD_BF16) {
      launch_groups_of<T, Variant, __nv_bfloat16>(launch, amax);
    } else {
      launch_groups_of<T, Variant, float>(launch, amax);
    }
  });
}

}  // namespace fp4gemm
