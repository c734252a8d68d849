// Functions that the files of the replacement runtime share.
#pragma once

#include <driver_types.h>

#include <memory>

#include "ptx.hpp"

namespace ptxemu {

/// The PTX kernel of a host function; null if there is none, with the reason in Session::last_error.
std::shared_ptr<Kernel> find_kernel(void const* function);
/// The PTX kernel of this name for the emulated device, likewise.
std::shared_ptr<Kernel> find_kernel(std::string const& name);

/// Keeps an error for cudaGetLastError and returns it.
cudaError_t remember(cudaError_t error);

/// Executes the queued launches; returns their error, or `otherwise` if there is none.
cudaError_t synchronize(cudaError_t otherwise = cudaSuccess);

}  // namespace ptxemu
