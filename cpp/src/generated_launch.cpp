// Kernels with an epilogue that is compiled at run time are loaded and launched by the driver.
#include "driver.hpp"
#include "error.hpp"
#include "generated.hpp"

namespace fp4gemm {
namespace {

struct Driver {
  decltype(&cuLibraryLoadData) load =
      driver_function<decltype(&cuLibraryLoadData)>("cuLibraryLoadData", 12000);
  decltype(&cuLibraryGetKernel) get_kernel =
      driver_function<decltype(&cuLibraryGetKernel)>("cuLibraryGetKernel", 12000);
  decltype(&cuKernelSetAttribute) set_attribute =
      driver_function<decltype(&cuKernelSetAttribute)>("cuKernelSetAttribute", 12000);
  decltype(&cuLaunchKernelEx) launch =
      driver_function<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx", 12000);
  decltype(&cuDeviceGet) device_get = driver_function<decltype(&cuDeviceGet)>("cuDeviceGet");

  bool is_complete() const {
    return load != nullptr && get_kernel != nullptr && set_attribute != nullptr && launch != nullptr &&
           device_get != nullptr;
  }
};

Driver const& driver() {
  static Driver const found;
  return found;
}

fp4gemm_status_t check(char const* what, CUresult result) {
  return result == CUDA_SUCCESS ? FP4GEMM_SUCCESS
                                : fail(FP4GEMM_ERROR_CUDA, "cubin: the driver could not %s (CUresult %d)",
                                       what, static_cast<int>(result));
}

}  // namespace

fp4gemm_status_t load_generated(void const* cubin, int shared_bytes, int device, void** found) {
  if (!driver().is_complete()) {
    return fail(FP4GEMM_ERROR_CUDA, "cubin: the driver cannot load libraries, must be of CUDA 12.0 or newer");
  }
  CUlibrary library = nullptr;
  CUkernel function = nullptr;
  CUdevice handle = 0;
  FP4GEMM_TRY(check("load it", driver().load(&library, cubin, nullptr, nullptr, 0, nullptr, nullptr, 0)));
  FP4GEMM_TRY(
      check("find fp4gemm_generated in it", driver().get_kernel(&function, library, "fp4gemm_generated")));
  FP4GEMM_TRY(check("find the device", driver().device_get(&handle, device)));
  FP4GEMM_TRY(check("allow its kernel the shared memory that it needs",
                    driver().set_attribute(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes,
                                           function, handle)));
  *found = function;
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_generated(GeneratedKernel const& kernel, GeneratedLaunch const& launch,
                                  fp4gemm_stream_t stream) {
  CUlaunchAttribute attributes[2]{};
  attributes[0].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attributes[0].value.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  attributes[1].value.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(launch.grid);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(launch.threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(launch.shared_bytes);
  config.hStream = static_cast<CUstream>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  void* params[] = {launch.params};
  CUresult const result =
      driver().launch(&config, reinterpret_cast<CUfunction>(kernel.function), params, nullptr);
  return result == CUDA_SUCCESS
             ? FP4GEMM_SUCCESS
             : fail(FP4GEMM_ERROR_CUDA, "the driver refused to launch the kernel (CUresult %d)",
                    static_cast<int>(result));
}

}  // namespace fp4gemm
