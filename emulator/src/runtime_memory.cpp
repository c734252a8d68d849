// Replacement CUDA runtime: device memory, copies, and the encoding of tensor maps under the rules of the
// driver API.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "memory.hpp"
#include "runtime.hpp"
#include "session.hpp"
#include "tensormap.hpp"

using namespace ptxemu;

namespace {

u64 address_of(void const* pointer) { return reinterpret_cast<u64>(pointer); }

/// Whether a copy may access the range: a range that begins in an allocation must end in it, and host memory,
/// which is in no allocation, is not checked.
bool is_inside(void const* pointer, size_t bytes) {
  DeviceMemory& memory = DeviceMemory::instance();
  return bytes == 0 || !memory.owns(address_of(pointer)) || memory.contains(address_of(pointer), bytes);
}

cudaError_t invalid(char const* what, void const* pointer, size_t bytes) {
  Session::instance().report_fatal(
      format_text("%s of %zu bytes at %p leaves its allocation", what, bytes, pointer));
  return remember(cudaErrorInvalidValue);
}

CUresult refuse(std::string const& why) {
  Session::instance().report_fatal("cuTensorMapEncodeTiled: " + why);
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

extern "C" {

// All allocators return the same kind of memory, which host and device may access, after the queued launches
// have executed.
cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  synchronize();
  *pointer = bytes == 0 ? nullptr : DeviceMemory::instance().allocate(bytes);
  return bytes == 0 || *pointer != nullptr ? cudaSuccess : remember(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocHost(void** pointer, size_t bytes) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaMallocManaged(void** pointer, size_t bytes, unsigned) { return cudaMalloc(pointer, bytes); }
cudaError_t cudaFree(void* pointer) {
  cudaError_t const error = synchronize();
  bool const ok = pointer == nullptr || DeviceMemory::instance().free(pointer);
  return ok ? error : remember(cudaErrorInvalidValue);
}
cudaError_t cudaFreeAsync(void* pointer, cudaStream_t) { return cudaFree(pointer); }
cudaError_t cudaFreeHost(void* pointer) { return cudaFree(pointer); }
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  *free_bytes = *total_bytes = 192ull << 30;
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, void const* from, size_t bytes, cudaMemcpyKind) {
  if (cudaError_t const error = synchronize(); error != cudaSuccess) {
    return error;
  }
  if (!is_inside(to, bytes) || !is_inside(from, bytes)) {
    return invalid("copy", is_inside(to, bytes) ? from : to, bytes);
  }
  DeviceMemory::instance().copy_marks(address_of(to), address_of(from), bytes);
  std::memmove(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, void const* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t) {
  return cudaMemcpy(to, from, bytes, kind);
}
cudaError_t cudaMemcpy2D(void* to, size_t to_pitch, void const* from, size_t from_pitch, size_t width,
                         size_t height, cudaMemcpyKind kind) {
  for (size_t row = 0; row < height; ++row) {
    cudaError_t const error = cudaMemcpy(static_cast<char*>(to) + row * to_pitch,
                                         static_cast<char const*>(from) + row * from_pitch, width, kind);
    if (error != cudaSuccess) {
      return error;
    }
  }
  return cudaSuccess;
}
cudaError_t cudaMemset(void* pointer, int value, size_t bytes) {
  if (cudaError_t const error = synchronize(); error != cudaSuccess) {
    return error;
  }
  if (!is_inside(pointer, bytes)) {
    return invalid("memset", pointer, bytes);
  }
  DeviceMemory::instance().mark(address_of(pointer), bytes, true);
  std::memset(pointer, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* pointer, int value, size_t bytes, cudaStream_t) {
  return cudaMemset(pointer, value, bytes);
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                cuuint64_t const* dims, cuuint64_t const* strides, cuuint32_t const* box,
                                cuuint32_t const* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill fill) {
  if (rank < 1 || rank > 5) {
    return refuse(format_text("tensorRank is %u, must be 1 to 5", rank));
  }
  if (address_of(out) % 64 != 0) {
    return refuse(format_text("tensorMap %p must be a multiple of 64 bytes", static_cast<void*>(out)));
  }
  bool const packed =
      type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B || type == CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B;
  if (packed && fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return refuse("oobFill must be none with a packed data type");
  }
  if (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || swizzle > static_cast<int>(kSwizzle128Atom32) ||
      type > CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN16B || fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) {
    return refuse(format_text("interleave %d, swizzle %d, type %d, fill %d are not modelled", interleave,
                              swizzle, type, fill));
  }
  TensorMap map = {};
  map.address = address_of(address);
  map.rank = rank;
  map.dtype = static_cast<u32>(type);
  map.swizzle = static_cast<u32>(swizzle);
  map.has_faulty_bit = Session::instance().options.faulty_tensor_maps != 0;
  for (u32 i = 0; i < 5; ++i) {
    bool const used = i < rank;
    // A number beyond the field becomes one that breaks the same rule.
    map.dim[i] = !used || dims[i] > 0xFFFFFFFFull ? 0 : static_cast<u32>(dims[i]);
    map.box[i] = used ? box[i] : 1;
    map.element_stride[i] = used ? element_strides[i] : 1;
    map.stride[i] = used && i > 0 ? strides[i - 1] : 0;
  }
  if (std::string const broken = map.broken_rule(); !broken.empty()) {
    return refuse(broken);
  }
  EncodedTensorMap const encoded(map);
  std::memset(out, 0, sizeof *out);
  std::memcpy(out, &encoded, sizeof encoded);
  return CUDA_SUCCESS;
}

}  // extern "C"
