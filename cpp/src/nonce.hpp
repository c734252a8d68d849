// A random number that marks values in uninitialised workspace as written by this process.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>

namespace fp4gemm {

/// 62 random bits, drawn once per process; bit 63 is clear and bit 62 is set.
///
/// Kernels use the nonce as the value of flags and counters in workspace that nobody initialises. A constant
/// would be public: memory that held it by accident or by intent, for example from a copy of another
/// workspace, would pass for a flag that was raised. The two fixed bits keep the nonce, and the nonce plus a
/// count of up to 2^62, away from 0, which is the value of a lowered flag, and from small counts.
inline uint64_t workspace_nonce() noexcept {
  static uint64_t const nonce = []() noexcept {
    uint64_t bits;
    try {
      std::random_device device;
      bits = uint64_t{device()} << 32 | device();
    } catch (...) {
      // The system has no source of random numbers: the clock and the address of a local variable vary too.
      auto const now = static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
      bits = (now ^ reinterpret_cast<uintptr_t>(&bits)) * 0x9E3779B97F4A7C15ull;
    }
    return bits >> 2 | uint64_t{1} << 62;
  }();
  return nonce;
}

}  // namespace fp4gemm
