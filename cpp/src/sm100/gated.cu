// The SM100 kernels with the gated epilogue, bf16 and fp16.
#include "cutlass_evt/arch/sm100.hpp"
#include "cutlass_evt/epilogue/gated.hpp"
#include "kernel_impl.cuh"

namespace fp4gemm {

using cutlass_evt::Cluster;
using cutlass_evt::Tile;

template <class Tile, class Cluster, class Out>
using Sm100DenseGated =
    cutlass_evt::Dense<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

template <class Tile, class Cluster, class Out>
using Sm100GroupedGated =
    cutlass_evt::Grouped<cutlass_evt::Sm100, Tile, Cluster, cutlass_evt::epilogue::Gated<Out>>;

extern KernelList const kSm100DenseGatedBf16;
constexpr Kernel kDenseBf16[] = {
    make_kernel<Sm100DenseGated<Tile<256, 256, 256>, Cluster<2, 1>, cutlass::bfloat16_t>>(),
    make_kernel<Sm100DenseGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
};
KernelList const kSm100DenseGatedBf16 = make_list(kDenseBf16);

extern KernelList const kSm100DenseGatedFp16;
constexpr Kernel kDenseFp16[] = {
    make_kernel<Sm100DenseGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
};
KernelList const kSm100DenseGatedFp16 = make_list(kDenseFp16);

extern KernelList const kSm100GroupedGatedBf16;
constexpr Kernel kGroupedBf16[] = {
    make_kernel<Sm100GroupedGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::bfloat16_t>>(),
};
KernelList const kSm100GroupedGatedBf16 = make_list(kGroupedBf16);

extern KernelList const kSm100GroupedGatedFp16;
constexpr Kernel kGroupedFp16[] = {
    make_kernel<Sm100GroupedGated<Tile<128, 128, 256>, Cluster<1, 1>, cutlass::half_t>>(),
};
KernelList const kSm100GroupedGatedFp16 = make_list(kGroupedFp16);

}  // namespace fp4gemm
