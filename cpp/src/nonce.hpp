// A random number that marks values in uninitialised workspace as written by this process.
#pragma once

#include <chrono>
#include <cstdint>
#include <random>

namespace fp4gemm {

/// 62 random bits, drawn once per process; bit 63 is clear and bit 62 is set.
///
/// Kernels use the nonce as the value of flags and counters in workspace memory that is not initialised. A
/// constant would not do: memory could hold it already, by accident or by intent, for example in a copy of
/// another workspace, and a kernel would read a flag that it never set. With the two fixed bits, neither the
/// nonce nor the nonce plus a count below 2^62 equals 0, the value of a cleared flag, or a small count.
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
