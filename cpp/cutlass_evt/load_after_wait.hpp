// Loads of what the kernel ahead on the stream may have written, for kernels that start before it has ended.
#pragma once

#include <cstdint>

namespace cutlass_evt {

/// *from, which is in global memory and aligned to its size: 1, 4, 8 or 16 bytes. A kernel that is launched
/// with programmatic dependent launch uses this after griddepcontrol.wait in place of __ldg. __ldg is
/// ld.global.nc, which PTX allows only for memory that nothing writes while the kernel runs, and the kernel
/// ahead may write the operands of this one until the wait is over.
///
/// The asm is volatile and clobbers memory, as the asm of the wait does, so that the compiler keeps the order
/// of the two. An ordinary C++ load would be as safe, but nvcc 13.0 then compiles some casts to 7 % more
/// instructions, which spill registers. This compiles as __ldg did.
template <class T>
__device__ __forceinline__ T load_after_wait(T const* from) {
  static_assert(sizeof(T) == 1 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,
                "no load of this size");
  if constexpr (sizeof(T) == 16) {
    uint4 bits;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                 : "l"(from)
                 : "memory");
    return reinterpret_cast<T const&>(bits);
  } else if constexpr (sizeof(T) == 8) {
    uint2 bits;
    asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(bits.x), "=r"(bits.y) : "l"(from) : "memory");
    return reinterpret_cast<T const&>(bits);
  } else if constexpr (sizeof(T) == 4) {
    uint32_t bits;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
    return reinterpret_cast<T const&>(bits);
  } else {
    uint32_t bits;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
    return static_cast<T>(bits);
  }
}

/// The same for memory that no thread reads again, which is kept out of L1.
__device__ __forceinline__ uint32_t load_once_after_wait(uint32_t const* from) {
  uint32_t bits;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(bits) : "l"(from) : "memory");
  return bits;
}

__device__ __forceinline__ uint16_t load_once_after_wait(uint16_t const* from) {
  uint16_t bits;
  asm volatile("ld.global.L1::no_allocate.u16 %0, [%1];" : "=h"(bits) : "l"(from) : "memory");
  return bits;
}

}  // namespace cutlass_evt
