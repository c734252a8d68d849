// The SM100 kernels with the gated epilogue, bf16 and fp16.
#include "cutlass_evt/arch/sm100.hpp"
#include "cutlass_evt/epilogue/gated.hpp"
#include "kernel_impl.cuh"
#include "sm100/arch.hpp"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

template <class Tile, class Cluster, class Out>
using Sm100DenseGated =
    cutlass_evt::Dense<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

template <class Tile, class Cluster, class Out>
using Sm100GroupedGated =
    cutlass_evt::Grouped<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

constexpr Kernel kKernels[] = {
    make_kernel<Sm100DenseGated<Tile<256, 256, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100DenseGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100DenseGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
    make_kernel<Sm100GroupedGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100GroupedGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
};
KernelList const sm100::lists::gated = make_list(kKernels);

}  // namespace fp4gemm
