// Dense<Arch, Tile, Cluster, Op>: one GEMM kernel of ours as a type, with the arguments that it takes by
// name.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/tile.hpp"

namespace cutlass_evt {

/// D (m, n) = epilogue(A (m, k) @ B (n, k)^T); all row-major, A and B contiguous.
template <class Op>
struct DenseArguments {
  int m = 0, n = 0, k = 0;
  void const* a = nullptr;
  void const* scale_a = nullptr;  // null where the architecture multiplies decoded operands
  void const* b = nullptr;
  void const* scale_b = nullptr;
  typename Op::Arguments epilogue;
  typename Op::ElementOutput* d = nullptr;
  int64_t d_row_stride = 0;  // elements
  int device = 0;
  int num_sms = 0;
};

/// The kernel type, and how DenseArguments become its CUTLASS arguments.
template <class Arch_, class Tile_, class Cluster_, class Op_>
struct Dense {
  using Arch = Arch_;
  using Tile = Tile_;
  using Cluster = Cluster_;
  using Op = Op_;
  using Collectives = typename Arch::template Dense<Tile, Cluster, Op>;
  using Kernel = typename Collectives::Kernel;

  static typename Kernel::Arguments lower(DenseArguments<Op> const& args) {
    typename Kernel::Arguments out{};
    out.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    out.problem_shape = {args.m, args.n, args.k, 1};
    out.mainloop =
        Collectives::mainloop_arguments(args.a, args.scale_a, args.b, args.scale_b, args.m, args.n, args.k);
    out.epilogue.thread = args.epilogue;
    out.epilogue.ptr_D = args.d;
    cute::get<0>(out.epilogue.dD) = args.d_row_stride;
    out.hw_info.device_id = args.device;
    out.hw_info.sm_count = args.num_sms;
    return out;
  }
};

}  // namespace cutlass_evt
