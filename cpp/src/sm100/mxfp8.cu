// The SM100 kernels that multiply MXFP8 operands: one tile, which serves all shapes. The dense kernels share
// a mainloop, and so do the grouped ones.
#include "sm100/kernels.cuh"

namespace fp4gemm {

using Mxfp8Machine = cutlass_evt::Sm100With<cutlass_evt::Mxfp8>;
using Mxfp8Tile = Tile<128, 128, 128>;

template <template <class, class, class, class> class Mode, class Op>
using Mxfp8Gemm = Mode<Mxfp8Machine, Mxfp8Tile, Cluster<1, 1>, Op>;

using cutlass_evt::Dense;
using cutlass_evt::Grouped;
using cutlass_evt::epilogue::Gated;
using cutlass_evt::epilogue::RowCol;

constexpr Kernel kKernels[] = {
    make_kernel<Mxfp8Gemm<Dense, RowCol<SixteenBits>>, bf16>(),
    make_kernel<Mxfp8Gemm<Dense, RowCol<SixteenBits>>, fp16>(),
    make_kernel<Mxfp8Gemm<Dense, RowCol<float>>>(),
    make_kernel<Mxfp8Gemm<Dense, Gated<SixteenBits>>, bf16>(),
    make_kernel<Mxfp8Gemm<Dense, Gated<SixteenBits>>, fp16>(),
    make_kernel<Mxfp8Gemm<Grouped, RowCol<SixteenBits>>, bf16>(),
    make_kernel<Mxfp8Gemm<Grouped, RowCol<SixteenBits>>, fp16>(),
    make_kernel<Mxfp8Gemm<Grouped, RowCol<float>>>(),
    make_kernel<Mxfp8Gemm<Grouped, Gated<SixteenBits>>, bf16>(),
    make_kernel<Mxfp8Gemm<Grouped, Gated<SixteenBits>>, fp16>(),
};
KernelList const sm100::lists::mxfp8 = make_list(kKernels);

}  // namespace fp4gemm
