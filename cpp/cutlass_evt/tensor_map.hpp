// cuTensorMapEncodeTiled with a work-around for a driver bug on Blackwell.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cutlass_evt {

using TensorMapEncoder = decltype(&cuTensorMapEncodeTiled);

/// The driver's cuTensorMapEncodeTiled, or null where the driver has none. It is looked up once: the library
/// does not link the driver.
inline TensorMapEncoder tensor_map_encoder() {
  static TensorMapEncoder const found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                         &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      function = nullptr;
    }
    return reinterpret_cast<TensorMapEncoder>(function);
  }();
  return found;
}

/// Bits of one element of a tensor map.
constexpr int tensor_map_element_bits(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 8;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 16;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32_FTZ:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32:
    case CU_TENSOR_MAP_DATA_TYPE_TFLOAT32_FTZ: return 32;
    case CU_TENSOR_MAP_DATA_TYPE_UINT64:
    case CU_TENSOR_MAP_DATA_TYPE_INT64:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT64: return 64;
    default: return 4;  // the packed types; more bits than this would overestimate the tensor
  }
}

/// Bytes from the first to the last element of a tensor. strides[i] is that of dimension i + 1, in bytes.
inline uint64_t tensor_map_span(CUtensorMapDataType type, uint32_t rank, cuuint64_t const* sizes,
                                cuuint64_t const* strides) {
  uint64_t bytes = sizes[0] * static_cast<uint64_t>(tensor_map_element_bits(type)) / 8;
  for (uint32_t i = 1; i < rank; ++i) {
    bytes += (sizes[i] - 1) * strides[i - 1];
  }
  return bytes;
}

// The driver bug: drivers up to CUDA 13.2 (the notes of release 595 list it as a known issue) always set bit
// 21 of word 1. On Blackwell it must be 1 for tensors of 128 KiB or more and 0 below; older GPUs ignore it.
// Loads through a map of a smaller tensor with gaps may fault while the bit is set. NVIDIA's work-around is
// to clear the bit.
constexpr int kFirstDriverWithoutTensorMapBug = 13030;
constexpr uint64_t kTensorMapBugBytes = 128 * 1024;
constexpr uint64_t kTensorMapBugBit = uint64_t{1} << 21;

/// True if the bit must be cleared on the current device. Maps of other generations have another layout.
inline bool has_tensor_map_bug() {
  static int const driver = [] {
    int version = 0;
    return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
  }();
  int device = 0;
  int major = 0;
  return driver < kFirstDriverWithoutTensorMapBug && cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         major >= 10;
}

/// cuTensorMapEncodeTiled for the current device, with the work-around. The size of the allocation is unknown
/// here, so that the bit is cleared for every tensor that spans less than 128 KB. That includes the
/// one-element maps from which CUTLASS's grouped kernels make those of their groups.
inline CUresult encode_tensor_map(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                  cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                                  cuuint32_t const* steps, CUtensorMapInterleave interleave,
                                  CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                  CUtensorMapFloatOOBfill fill) {
  TensorMapEncoder const encode = tensor_map_encoder();
  if (encode == nullptr) {
    return CUDA_ERROR_NOT_FOUND;
  }
  CUresult const result =
      encode(map, type, rank, address, sizes, strides, box, steps, interleave, swizzle, promotion, fill);
  if (result == CUDA_SUCCESS && tensor_map_span(type, rank, sizes, strides) < kTensorMapBugBytes &&
      has_tensor_map_bug()) {
    map->opaque[1] &= ~kTensorMapBugBit;
  }
  return result;
}

}  // namespace cutlass_evt
