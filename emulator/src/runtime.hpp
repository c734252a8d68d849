// What the files of the replacement runtime share.
#pragma once

#include <driver_types.h>

#include <memory>

#include "ptx.hpp"

namespace ptxemu {

/// The PTX kernel behind a host function; null, with the reason as the last error, if there is none.
std::shared_ptr<Kernel> find_kernel(void const* function);

/// Keeps an error for cudaGetLastError, and returns it.
cudaError_t remember(cudaError_t error);

/// Runs what is queued; its error, or `otherwise`.
cudaError_t synchronize(cudaError_t otherwise = cudaSuccess);

}  // namespace ptxemu
