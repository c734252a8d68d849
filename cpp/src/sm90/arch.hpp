// The number of SM90, which its traits and its kernels share.
#pragma once

namespace fp4gemm::sm90 {

constexpr int kArch = 90;

}  // namespace fp4gemm::sm90
