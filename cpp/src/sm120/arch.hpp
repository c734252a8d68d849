// The number of SM120, which its traits and its kernels share.
#pragma once

namespace fp4gemm::sm120 {

constexpr int kArch = 120;

}  // namespace fp4gemm::sm120
