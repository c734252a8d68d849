// Replacement CUDA runtime: registration of kernels, launches, attributes of functions and occupancy. The
// functions that start with two underscores are those that nvcc's generated code calls.
#include <cuda_runtime_api.h>

#include <unordered_map>

#include "queue.hpp"
#include "runtime.hpp"

namespace ptxemu {

namespace {

/// Names of kernels by the address of their host function. Static constructors of programs fill the map, so
/// it is made at its first use.
std::unordered_map<void const*, std::string>& kernel_names() {
  static auto* const names = new std::unordered_map<void const*, std::string>;
  return *names;
}

/// The arguments of a <<<...>>> between its push and its pop.
struct CallConfiguration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};
thread_local std::vector<CallConfiguration> call_configurations;

cudaError_t launch(void const* function, dim3 grid, dim3 block, dim3 cluster, size_t shared_bytes,
                   void** arguments, bool programmatic) {
  Session& session = Session::instance();
  std::shared_ptr<Kernel> kernel;
  try {
    kernel = find_kernel(function);
  } catch (std::exception const& error) {
    session.report_fatal(error.what());
  }
  if (kernel == nullptr) {
    return remember(cudaErrorInvalidDeviceFunction);
  }
  Launch launch;
  launch.kernel = kernel;
  // .reqnctapercluster sets the cluster of launches without the attribute.
  u32 const required = kernel->required_cluster[0];
  u32 const c[3] = {required && cluster.x == 0 ? required : cluster.x, cluster.y, cluster.z};
  u32 const g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
  for (int i = 0; i < 3; ++i) {
    launch.grid[i] = g[i];
    launch.block[i] = b[i];
    launch.cluster[i] = std::max(c[i], 1u);
  }
  launch.dynamic_shared_bytes = static_cast<u32>(shared_bytes);
  launch.programmatic = programmatic;
  launch.params.resize(kernel->param_bytes);
  for (size_t i = 0; i < kernel->parameters.size(); ++i) {
    Parameter const& parameter = kernel->parameters[i];
    std::memcpy(&launch.params[parameter.offset], arguments[i], parameter.bytes);
  }
  return remember(static_cast<cudaError_t>(LaunchQueue::instance().submit(std::move(launch))));
}

}  // namespace

std::shared_ptr<Kernel> find_kernel(std::string const& name) {
  Session& session = Session::instance();
  int const capability = session.options.compute_capability;
  std::shared_ptr<Kernel> kernel = session.library.find(name, capability);
  if (kernel == nullptr) {
    session.report_fatal(format_text(
        "no loaded PTX file has the kernel %s for compute capability %d.%d%s", name.c_str(), capability / 10,
        capability % 10, session.library.empty() ? " (no PTX for sm_10* or sm_12* was loaded at all)" : ""));
  }
  return kernel;
}

std::shared_ptr<Kernel> find_kernel(void const* function) {
  Session& session = Session::instance();
  auto const found = kernel_names().find(function);
  if (found == kernel_names().end()) {
    session.report_fatal("launch of a function that is no kernel of this program");
    return nullptr;
  }
  return find_kernel(found->second);
}

}  // namespace ptxemu

using namespace ptxemu;

extern "C" {

// The machine code of the program is not used, so registering it does nothing.
void** __cudaRegisterFatBinary(void*) {
  static void* handle[4];
  return handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, char const* host_function, char*, char const* device_name, int, uint3*,
                            uint3*, dim3*, dim3*, int*) {
  kernel_names()[host_function] = device_name;
}
void __cudaRegisterVar(void**, char*, char*, char const*, int, size_t, int, int) {}
void __cudaRegisterManagedVar(void**, void**, char*, char const*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  call_configurations.push_back({grid, block, shared_bytes, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  CallConfiguration const call = call_configurations.back();
  call_configurations.pop_back();
  *grid = call.grid;
  *block = call.block;
  *shared_bytes = call.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = call.stream;
  return cudaSuccess;
}

// A kernel's handle is the address of its host function.
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, void const* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t cudaGetKernel(cudaKernel_t* kernel, void const* function) {
  return __cudaGetKernel(kernel, function);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                               size_t shared_bytes, cudaStream_t) {
  return launch(kernel, grid, block, dim3(0, 0, 0), shared_bytes, arguments, false);
}
cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments,
                                    size_t shared_bytes, cudaStream_t stream) {
  return __cudaLaunchKernel(kernel, grid, block, arguments, shared_bytes, stream);
}
cudaError_t cudaLaunchKernel(void const* function, dim3 grid, dim3 block, void** arguments,
                             size_t shared_bytes, cudaStream_t) {
  return launch(function, grid, block, dim3(0, 0, 0), shared_bytes, arguments, false);
}

cudaError_t cudaLaunchKernelExC(cudaLaunchConfig_t const* config, void const* function, void** arguments) {
  dim3 cluster(0, 0, 0);
  bool programmatic = false;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    cudaLaunchAttribute const& attribute = config->attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      cluster = dim3(attribute.val.clusterDim.x, attribute.val.clusterDim.y, attribute.val.clusterDim.z);
    } else if (attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  return launch(function, config->gridDim, config->blockDim, cluster, config->dynamicSmemBytes, arguments,
                programmatic);
}

cudaError_t cudaFuncSetAttribute(void const*, cudaFuncAttribute attribute, int value) {
  u32 const most = device_of(Session::instance().options.compute_capability).block_shared_bytes;
  if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > static_cast<int>(most)) {
    return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void const* function) {
  *attributes = {};
  std::shared_ptr<Kernel> kernel;
  try {
    kernel = find_kernel(function);
  } catch (std::exception const& error) {
    Session::instance().report_fatal(error.what());
  }
  if (kernel == nullptr) {
    return remember(cudaErrorInvalidDeviceFunction);
  }
  attributes->maxThreadsPerBlock = kernel->max_threads == 0 ? 1024 : static_cast<int>(kernel->max_threads);
  attributes->sharedSizeBytes = kernel->static_shared_bytes;
  int const capability = Session::instance().options.compute_capability;
  attributes->maxDynamicSharedSizeBytes =
      static_cast<int>(device_of(capability).block_shared_bytes - kernel->static_shared_bytes);
  attributes->binaryVersion = attributes->ptxVersion = capability;
  attributes->numRegs = 64;  // registers are not modelled
  return cudaSuccess;
}

// Occupancy is not modelled: every kernel has one CTA on each SM.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, void const*, int, size_t,
                                                                   unsigned) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void const*, int, size_t) {
  *blocks = 1;
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, void const*, cudaLaunchConfig_t const* config) {
  int size = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) {
      auto const& dim = config->attrs[i].val.clusterDim;
      size = static_cast<int>(dim.x * dim.y * dim.z);
    }
  }
  *clusters = Session::instance().options.num_sms / size;
  return cudaSuccess;
}

}  // extern "C"
