// TransformerEngine's cast along rows, the most common one, with shapes for few and for many rows. Its loader
// reads the rows in their order, or those that an index names.
#include "quantize/launch.cuh"

namespace fp4gemm {

void launch_rows_te(RowLaunch const& launch) {
  for_type(launch.params.input.dtype, [&](auto type) {
    using Loader = GatherLoader<decltype(type)>;
    if (launch.params.groups.offs != nullptr) {
      launch_rows_any<Loader, TeCast<Range::kRegular>, kPlainDepth<Loader>>(launch);
    } else {
      launch_dense<Loader>(launch);
    }
  });
}

}  // namespace fp4gemm
