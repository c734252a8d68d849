// Makes CUTLASS encode its tensor maps through encode_tensor_map. Include this ahead of every CUTLASS header
// that describes tensors to TMA; the assertion below fails otherwise. The units of one library must all
// include it or none: CUTLASS's functions that call the encoder are templates, of which the linker keeps one.
#pragma once

#include <type_traits>

#include "cutlass/cuda_host_adapter.hpp"
#include "cutlass_evt/tensor_map.hpp"

namespace cute {
struct SM90_TMA_LOAD_OP;  // cute/atom/copy_traits_sm90_tma.hpp, which calls the encoder, defines it
}  // namespace cute

namespace cutlass_evt::driver {

template <class T, class = void>
struct IsDefined : std::false_type {};
template <class T>
struct IsDefined<T, std::void_t<decltype(sizeof(T))>> : std::true_type {};
static_assert(!IsDefined<cute::SM90_TMA_LOAD_OP>::value,
              "this header must come before CUTLASS's TMA headers, which would call the driver directly");

using cutlass::call_cuTensorMapEncodeIm2col;

inline CUresult call_cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                            void* address, cuuint64_t const* sizes, cuuint64_t const* strides,
                                            cuuint32_t const* box, cuuint32_t const* steps,
                                            CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                            CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return encode_tensor_map(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle,
                           promotion, fill);
}

}  // namespace cutlass_evt::driver

// CUTLASS names the driver functions that it calls through this macro.
#undef CUTLASS_CUDA_DRIVER_WRAPPER_CALL
#define CUTLASS_CUDA_DRIVER_WRAPPER_CALL(func) ::cutlass_evt::driver::call_##func
