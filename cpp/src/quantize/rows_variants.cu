// The other casts along rows: per-token encoding, stochastic rounding, four over six, and the Hadamard
// transform, also with scales that are corrected.
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

using Variant = VariantCast<Range::kRegular>;
using FourOverSix = FourOverSixCast<Range::kRegular>;

}  // namespace

void launch_rows_variant(RowLaunch const& launch) {
  for_type(launch.dtype,
           [&](auto type) { launch_rows_any<PlainLoader<decltype(type)>, Variant, 2>(launch); });
}

void launch_rows_hadamard(RowLaunch const& launch, fp4gemm_hadamard_t hadamard) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    if (launch.params.cast.is_eden) {
      launch_rows_any<HadamardLoader<T, DrawnSigns>, EdenCast<Range::kRegular>, 2>(launch);
    } else if (hadamard == FP4GEMM_HADAMARD_BF16) {
      launch_rows_any<HadamardLoader<T, __nv_bfloat16>, Variant, 2>(launch);
    } else {
      launch_rows_any<HadamardLoader<T, float>, Variant, 2>(launch);
    }
  });
}

void launch_rows_four_over_six(RowLaunch const& launch) {
  for_type(launch.dtype,
           [&](auto type) { launch_rows_any<PlainLoader<decltype(type)>, FourOverSix, 2>(launch); });
}

}  // namespace fp4gemm
