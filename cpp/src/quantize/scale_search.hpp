// The launcher of the scale search. Arguments have been checked; the device is current.
#pragma once

#include "device.hpp"
#include "fp4gemm/scale_search.h"

namespace fp4gemm {

fp4gemm_status_t launch_quantize_searched(fp4gemm_quantize_searched_args_t const& args,
                                          DeviceProperties const& properties, fp4gemm_stream_t stream);

}  // namespace fp4gemm
