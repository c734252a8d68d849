// A GPU architecture as data: the devices that it serves, its kernels and its policy of selection.
//
// To add one: a folder cpp/src/smNN with an arch.cpp that defines fp4gemm::smNN::architecture, an arch.hpp
// that names its kernel lists and the sources of these lists, a header cpp/cutlass_evt/arch/smNN.hpp, and a
// row in cpp/cmake/archs.cmake. Nothing else in the library knows the number of an architecture.
#pragma once

#include "kernel.hpp"
#include "policy.hpp"

namespace fp4gemm {

struct GeneratedKernels;  // generated.hpp

struct Architecture {
  int arch;                        // 10 * major + minor of the compute capability that names it
  char const* devices;             // the compute capabilities that its kernels serve: "10.0 10.3"
  bool is_executed;                // this project has executed its kernels on such hardware
  KernelList const* const* lists;  // any may be empty; ends with null
  Policy const* policy;            // by which one of its kernels is selected
  /// Refuses what none of its kernels can address; null: nothing that the C interface accepts.
  fp4gemm_status_t (*check_problem)(Problem const&);
  GeneratedKernels const* generated;  // null: its kernels have no form with a formula of the caller's

  int num_kernels() const {
    int count = 0;
    for (KernelList const* const* list = lists; *list != nullptr; ++list) {
      count += (*list)->size;
    }
    return count;
  }
};

/// The architectures that were built; ends with null.
Architecture const* const* architectures();

/// The architecture whose kernels serve a device of compute capability device_arch (10 * major + minor), or
/// null.
Architecture const* architecture_of(int device_arch);

/// True if a text such as "10.0 10.3" lists the compute capability device_arch (10 * major + minor).
bool lists_device(char const* capabilities, int device_arch);

}  // namespace fp4gemm
