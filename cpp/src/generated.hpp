// GEMMs with an epilogue that is compiled at run time: what the plan, the checks and the kernels of an
// architecture share. fp4gemm/generated.h is the interface.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>

#include "architecture.hpp"
#include "cutlass_evt/epilogue/generated_arguments.hpp"
#include "kernel.hpp"

struct fp4gemm_generated;  // fp4gemm/generated.h

namespace fp4gemm {

/// A text that is written to memory of the caller.
struct SourceText {
  char* text;
  size_t bytes;
  size_t length = 0;  // without the terminating zero; may exceed what fits

  /// Appends as printf does.
  [[gnu::format(printf, 2, 3)]] void append(char const* format, ...);
};

/// What a kernel is compiled for, besides the formula.
struct GeneratedForm {
  int arch = 0;
  int device = 0;
  int tile = 0;  // the number of its configuration among those of the architecture
  cutlass_evt::GeneratedTypes types;
  int num_matrices = 0;
  int num_aux = 0;

  bool operator==(GeneratedForm const& other) const;
};

/// A kernel that was loaded. It lives as long as the process.
struct GeneratedKernel {
  void* function;  // a CUkernel
  GeneratedForm form;
  GeneratedKernel const* next = nullptr;  // of the same formula
};

/// The launch of a loaded kernel by the driver, as launch_waiting launches the kernels of the library.
struct GeneratedLaunch {
  int grid;
  int threads;
  int shared_bytes;
  int cluster;
  void* params;  // the kernel's one parameter
};
fp4gemm_status_t launch_generated(GeneratedKernel const& kernel, GeneratedLaunch const& launch,
                                  fp4gemm_stream_t stream);

/// Loads the kernel of a cubin and allows it `shared_bytes` of dynamic shared memory on a device.
fp4gemm_status_t load_generated(void const* cubin, int shared_bytes, int device, void** function);

/// A problem with a formula.
struct GeneratedProblem {
  Problem problem;
  int columns_of_d;
  int num_aux;
  cutlass_evt::GeneratedTypes types;
  cutlass_evt::GeneratedInputs inputs;
};

/// The kernels of an architecture that can have a formula in place of their own epilogue.
struct GeneratedKernels {
  /// The number of the configuration of a kernel of the table for groups of this kind; -1: there is none.
  int (*tile_of)(Kernel const& kernel, fp4gemm_ragged_t ragged);
  /// Writes what the source has of a configuration: the types Config and Kernel, in an anonymous namespace,
  /// for the GeneratedTypes of a type Types, and a static_assert of the size of the parameters.
  void (*write_source)(int tile, SourceText& to);
  int (*shared_bytes)(int tile);
  fp4gemm_status_t (*launch)(GeneratedKernel const& kernel, char const* name, GeneratedProblem const& problem,
                             void* workspace, fp4gemm_stream_t stream);
};

/// Writes the source of a kernel.
void write_generated_source(GeneratedKernels const& kernels, fp4gemm_kernel_info_t const& kernel,
                            GeneratedForm const& form, fp4gemm_generated const& generated, SourceText& to);

/// GeneratedKernels::tile_of; -1 for an architecture without such kernels.
inline int generated_tile(Architecture const& arch, Kernel const& kernel, fp4gemm_ragged_t ragged) {
  return arch.generated == nullptr ? -1 : arch.generated->tile_of(kernel, ragged);
}

}  // namespace fp4gemm

/// The list of the kernels of a formula. Kernels are added at its front, under the mutex, and never removed,
/// so that a thread can go through the list while another one adds a kernel.
struct fp4gemm_formula {
  std::mutex adding;
  std::atomic<fp4gemm::GeneratedKernel const*> kernels{nullptr};

  /// The kernel of a form, or null.
  fp4gemm::GeneratedKernel const* find(fp4gemm::GeneratedForm const& form) const {
    fp4gemm::GeneratedKernel const* kernel = kernels.load(std::memory_order_acquire);
    while (kernel != nullptr && !(kernel->form == form)) {
      kernel = kernel->next;
    }
    return kernel;
  }
};
