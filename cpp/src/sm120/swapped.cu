// The SM120 kernels for few tokens, with bf16 output: the operands change places, so that tokens are the n of
// a tile, which CUTLASS allows below 128 from 4.5 on. With an older CUTLASS the list is empty.
#include "cutlass/version.h"

#if CUTLASS_VERSION >= 450
#include "sm120/kernels.cuh"

namespace fp4gemm {

constexpr Kernel kKernels[] = {
    make_kernel<Sm120Dense<Tile<128, 64, 128>, cutlass::bfloat16_t, true>>(),
    make_kernel<Sm120Dense<Tile<128, 32, 256>, cutlass::bfloat16_t, true>>(),
    make_kernel<Sm120Grouped<Tile<128, 32, 128>, cutlass::bfloat16_t, true>>(),
};
KernelList const sm120::lists::swapped = make_list(kKernels);

}  // namespace fp4gemm

#else
#include "sm120/arch.hpp"

namespace fp4gemm {

KernelList const sm120::lists::swapped = {nullptr, 0};

}  // namespace fp4gemm

#endif
