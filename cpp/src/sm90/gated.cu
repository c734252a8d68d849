// The SM90 kernels with the gated epilogue, bf16 and fp16.
#include "cutlass_evt/arch/sm90.hpp"
#include "cutlass_evt/epilogue/gated.hpp"
#include "kernel_impl.cuh"
#include "sm90/arch.hpp"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

template <class Tile, class Cluster, class Out>
using Sm90DenseGated =
    cutlass_evt::Dense<cutlass_evt::Sm90, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

template <class Tile, class Cluster, class Out>
using Sm90GroupedGated =
    cutlass_evt::Grouped<cutlass_evt::Sm90, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

constexpr Kernel kKernels[] = {
    make_kernel<Sm90DenseGated<Tile<128, 128, 64>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm90DenseGated<Tile<64, 128, 64>, Cluster<1, 1>, cutlass::half_t>>(),
    make_kernel<Sm90GroupedGated<Tile<64, 128, 64>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm90GroupedGated<Tile<64, 128, 64>, Cluster<1, 1>, cutlass::half_t>>(),
};
KernelList const sm90::lists::gated = make_list(kKernels);

}  // namespace fp4gemm
