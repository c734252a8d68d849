// The runtime library of the CUTLASS DSL (nvidia-cutlass-dsl, the variable CUTE_DSL_LIBS), as far as the host
// code that the DSL compiles calls it to load and to launch kernels. The functions have the names of CUDA's
// with an underscore. The machine code that they get is not used: a launch executes the PTX of the same name
// that was loaded before.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime.hpp"
#include "session.hpp"
#include "tensormap.hpp"

namespace ptxemu {

namespace {

/// CUtensorMapDataType by the number in the hardware's tensor map; those that the DSL's kernels used here.
std::unordered_map<u32, u32> const kTypes = {{0, CU_TENSOR_MAP_DATA_TYPE_UINT8},
                                             {1, CU_TENSOR_MAP_DATA_TYPE_UINT16},
                                             {10, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16},
                                             {11, CU_TENSOR_MAP_DATA_TYPE_16U4_ALIGN8B}};

/// The emulator's tensor map of one that the host code has written by itself, without the driver. NVIDIA does
/// not document the encoding; it was read from the maps that version 4.8.1 of the DSL wrote for tensors of
/// known sizes. Raises Fatal for bits whose meaning those do not show.
void translate(u64 const (&words)[8], CUtensorMap& out) {
  u32 const head = static_cast<u32>(words[1]);
  u32 const rank = (head >> 4 & 7) + 1, type = head >> 7 & 15, swizzle = head >> 13 & 3;
  constexpr u32 kSame = 0x40002, kKnown = kSame | 7 << 4 | 15 << 7 | 3 << 13 | kOutOfBoundsBit;
  auto const found = kTypes.find(type);
  if ((head & kSame) != kSame || (head & ~kKnown) != 0 || rank > 5 || found == kTypes.end() ||
      (words[6] >> 32 & 0xFFFFFF) != 0) {
    throw Fatal(format_text("a tensor map whose encoding is not known: %016llx %016llx",
                            static_cast<unsigned long long>(words[1]),
                            static_cast<unsigned long long>(words[6])));
  }
  auto const half = [&](int i) { return static_cast<u32>(words[i / 2] >> i % 2 * 32); };
  cuuint64_t dims[5], strides[5];
  cuuint32_t box[5], ones[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < 5; ++i) {
    dims[i] = u64{half(8 + i)} + 1;
    strides[i] = u64{half(3 + i)} * 16;
    box[i] = static_cast<u32>((i == 0 ? words[6] >> 56 : words[7] >> 8 * (i - 1)) & 0xFF) + 1;
  }
  CUresult const result = cuTensorMapEncodeTiled(
      &out, static_cast<CUtensorMapDataType>(found->second), rank, reinterpret_cast<void*>(words[0]), dims,
      strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, static_cast<CUtensorMapSwizzle>(swizzle),
      CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw Fatal("a tensor map that the driver would refuse: " + Session::instance().last_error);
  }
}

cudaError_t launch(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  std::shared_ptr<Kernel> const kernel = find_kernel(function);
  if (kernel == nullptr) {
    return cudaErrorInvalidDeviceFunction;
  }
  // A parameter of 128 bytes is a tensor map, of which the host code writes 64, or calls for the driver's.
  std::vector<CUtensorMap> maps(kernel->parameters.size());
  std::vector<void*> given(arguments, arguments + kernel->parameters.size());
  for (size_t i = 0; i < given.size(); ++i) {
    if (kernel->parameters[i].bytes == sizeof(CUtensorMap)) {
      EncodedTensorMap map;
      std::memcpy(&map, given[i], sizeof map);
      if (!map.is_valid()) {
        u64 words[8];
        std::memcpy(words, given[i], sizeof words);
        translate(words, maps[i]);
        given[i] = &maps[i];
      }
    }
  }
  return cudaLaunchKernelExC(config, function, given.data());
}

}  // namespace

}  // namespace ptxemu

using namespace ptxemu;

extern "C" {

void __cudaRegisterFunction(void**, char const* host_function, char*, char const* device_name, int, uint3*,
                            uint3*, dim3*, dim3*, int*);

cudaError_t _cudaLibraryLoadData(cudaLibrary_t* library, void const* code, void*, void*, unsigned, void*,
                                 void*, unsigned) {
  *library = static_cast<cudaLibrary_t>(const_cast<void*>(code));
  return cudaSuccess;
}
cudaError_t _cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }

/// The handle of a kernel is the address of its name.
cudaError_t _cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, char const* name) {
  static auto* const names = new std::unordered_map<std::string, std::string>;  // never destroyed
  std::string const& kept = names->emplace(name, name).first->second;
  __cudaRegisterFunction(nullptr, kept.c_str(), nullptr, kept.c_str(), -1, nullptr, nullptr, nullptr, nullptr,
                         nullptr);
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<char*>(kept.c_str()));
  return cudaSuccess;
}

CUresult _cuKernelGetAttribute(int* value, CUfunction_attribute, CUkernel, CUdevice) {
  *value = 0;  // the code asks for the static shared memory, of which its kernels have none
  return CUDA_SUCCESS;
}
cudaError_t _cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) {
  return cudaSuccess;
}
cudaError_t _cudaFuncSetAttribute(void const* function, cudaFuncAttribute attribute, int value) {
  return cudaFuncSetAttribute(function, attribute, value);
}
cudaError_t _cudaGetDevice(int* device) { return cudaGetDevice(device); }
cudaError_t _cudaGetDeviceCount(int* count) { return cudaGetDeviceCount(count); }
cudaError_t _cudaSetDevice(int device) { return cudaSetDevice(device); }
cudaError_t _cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  return cudaDeviceGetAttribute(value, attribute, device);
}
cudaError_t _cudaDeviceSynchronize() { return cudaDeviceSynchronize(); }
cudaError_t _cudaStreamSynchronize(cudaStream_t stream) { return cudaStreamSynchronize(stream); }

/// The DSL's library ends the process.
void cuda_dialect_assert_success(int error) {
  if (error != 0) {
    Session::instance().report_fatal("the host code expects success, got error " + std::to_string(error) +
                                     ": " + Session::instance().last_error);
  }
}

CUresult _cuTensorMapEncodeTiled(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                                 cuuint64_t const* dims, cuuint64_t const* strides, cuuint32_t const* box,
                                 cuuint32_t const* element_strides, CUtensorMapInterleave interleave,
                                 CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                 CUtensorMapFloatOOBfill fill) {
  return cuTensorMapEncodeTiled(out, type, rank, address, dims, strides, box, element_strides, interleave,
                                swizzle, promotion, fill);
}

cudaError_t _cudaLaunchKernelEx(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  try {
    return launch(config, function, arguments);
  } catch (std::exception const& error) {
    Session::instance().report_fatal(error.what());
    return cudaErrorInvalidValue;
  }
}

}  // extern "C"
