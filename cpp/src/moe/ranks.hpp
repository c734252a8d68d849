// The launchers of the kernels for expert parallelism. Arguments have been checked; the device is current.
#pragma once

#include <cstdint>

#include "device.hpp"
#include "fp4gemm/ranks.h"

namespace fp4gemm {

constexpr int kMaxRanks = 128;  // so that the addresses of all buffers fit in the parameters of a kernel
constexpr int kTreeBlocks = 8;  // blocks of experts whose sums are the leaves of the tree of combine_part

fp4gemm_status_t launch_quantize_records(fp4gemm_quantize_records_args_t const& args,
                                         DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_make_records(fp4gemm_make_records_args_t const& args,
                                     DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_gather_records(fp4gemm_gather_records_args_t const& args,
                                       DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_route_ranks(fp4gemm_route_ranks_args_t const& args,
                                    DeviceProperties const& properties, void* workspace,
                                    fp4gemm_stream_t stream);

fp4gemm_status_t launch_combine_ranks(fp4gemm_combine_ranks_args_t const& args,
                                      DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_combine_part(fp4gemm_combine_part_args_t const& args,
                                     DeviceProperties const& properties, fp4gemm_stream_t stream);

fp4gemm_status_t launch_combine_tree(fp4gemm_combine_tree_args_t const& args,
                                     DeviceProperties const& properties, fp4gemm_stream_t stream);

}  // namespace fp4gemm
