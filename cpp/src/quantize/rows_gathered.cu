// TransformerEngine's cast of rows that an index names, and of rows up to a number that the device knows.
#include "quantize/launch.cuh"

namespace fp4gemm {

void launch_rows_gathered(RowLaunch const& launch) {
  for_type(launch.dtype, [&](auto type) {
    using Loader = GatherLoader<decltype(type)>;
    if (launch.params.groups.offs != nullptr) {
      launch_rows_any<Loader, TeCast<Range::kRegular>, kPlainDepth<Loader>>(launch);
    } else {
      launch_dense<Loader, Amax::kRow>(launch);
    }
  });
}

}  // namespace fp4gemm
