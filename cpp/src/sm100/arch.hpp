// The number of SM100, which its traits and its kernels share.
#pragma once

namespace fp4gemm::sm100 {

constexpr int kArch = 100;

}  // namespace fp4gemm::sm100
