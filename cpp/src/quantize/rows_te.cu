// TransformerEngine's cast along rows, the most common one, with shapes for few and for many rows.
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

using Te = TeCast<Range::kRegular>;

}  // namespace

void launch_rows_te(RowLaunch const& launch) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    if (launch.params.groups.offs != nullptr) {
      launch_rows_any<PlainLoader<T>, Te, kPlainDepth<PlainLoader<T>>>(launch);
    } else if (launch.params.amax_in == nullptr) {
      launch_dense<PlainLoader<T>, Amax::kRow>(launch);
    } else {
      launch_dense<PlainLoader<T>, Amax::kGiven>(launch);
    }
  });
}

}  // namespace fp4gemm
