// Philox4x32-10, the counter-based generator of Salmon et al. (SC 2011), as cuRAND and TransformerEngine use
// it.
#pragma once

#include <cstdint>

namespace fp4gemm {

/// The random numbers of one (seed, offset): 128 bits for each sequence number.
class Philox {
 public:
  Philox() = default;

  __device__ Philox(uint64_t seed, uint64_t offset) : seed_(seed), offset_(offset) {}

  /// The 128 bits of a sequence number. The counter is (offset, sequence) and the key is the seed, low words
  /// first.
  __device__ uint4 draw(uint64_t sequence) const {
    uint4 c{static_cast<uint32_t>(offset_), static_cast<uint32_t>(offset_ >> 32),
            static_cast<uint32_t>(sequence), static_cast<uint32_t>(sequence >> 32)};
    uint32_t key_low = static_cast<uint32_t>(seed_);
    uint32_t key_high = static_cast<uint32_t>(seed_ >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      uint64_t const x = multiply(0xD2511F53u, c.x);
      uint64_t const z = multiply(0xCD9E8D57u, c.z);
      c = {static_cast<uint32_t>(z >> 32) ^ c.y ^ key_low, static_cast<uint32_t>(z),
           static_cast<uint32_t>(x >> 32) ^ c.w ^ key_high, static_cast<uint32_t>(x)};
      key_low += 0x9E3779B9u;
      key_high += 0xBB67AE85u;
    }
    return c;
  }

 private:
  /// The product of two words, by one instruction. For a product of 64-bit integers the compiler also adds
  /// the zeros of their high words.
  __device__ static uint64_t multiply(uint32_t a, uint32_t b) {
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
  }

  uint64_t seed_;
  uint64_t offset_;
};

}  // namespace fp4gemm
