// The FP8 cast of rows of x, by number or by index.
#include "quantize/rows_fp8.cuh"

namespace fp4gemm {

void launch_rows_fp8(Fp8Launch const& launch) {
  for_type(launch.dtype, [&](auto type) {
    using Loader = PlainLoader<decltype(type)>;
    launch_fp8<Loader, kPlainDepth<Loader>>(launch);
  });
}

}  // namespace fp4gemm
