// The launchers of the kernels of training. Arguments have been checked; the device is current.
#pragma once

#include "device.hpp"
#include "fp4gemm/training.h"

namespace fp4gemm {

constexpr int kSwigluStep = 8;  // f is a multiple of it: a thread has 8 neighbouring elements

fp4gemm_status_t launch_swiglu(fp4gemm_swiglu_args_t const& args, DeviceProperties const& properties,
                               fp4gemm_stream_t stream);

fp4gemm_status_t launch_swiglu_backward(fp4gemm_swiglu_args_t const& args, DeviceProperties const& properties,
                                        fp4gemm_stream_t stream);

}  // namespace fp4gemm
