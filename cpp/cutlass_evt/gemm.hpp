// Dense<...> and Grouped<...>: a GEMM kernel as a type, and how arguments by name become CUTLASS's.
#pragma once

#include "cutlass/cutlass.h"
#include "cutlass/gemm/gemm.h"
#include "cutlass/kernel_hardware_info.h"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/groups.hpp"
#include "cutlass_evt/tile.hpp"

namespace cutlass_evt {

/// D (m, n) = epilogue(A (m, k) @ B (n, k)^T). All matrices are row-major, A and B contiguous.
template <class Op>
struct DenseArguments {
  int m = 0, n = 0, k = 0;
  void const* a = nullptr;
  void const* scale_a = nullptr;
  void const* b = nullptr;
  void const* scale_b = nullptr;
  typename Op::Arguments epilogue;
  int device = 0;
  int num_sms = 0;
};

/// A dense kernel, and how DenseArguments become its CUTLASS arguments.
///
/// Arch is a struct of cutlass_evt/arch/, such as Sm100. Tile and Cluster are those of the kernel, which
/// computes D^T if Op is swapped. Op is an epilogue, see Fusion.
template <class Arch_, class Tile_, class Cluster_, class Op_>
struct Dense {
  using Arch = Arch_;
  using Tile = Tile_;
  using Cluster = Cluster_;
  using Op = Op_;
  static constexpr bool kGrouped = false;
  using Collectives = typename Arch::template Collectives<Tile, Cluster, Op, kGrouped>;
  using Kernel = typename Collectives::Kernel;

  static typename Kernel::Arguments lower(DenseArguments<Op> const& args) {
    constexpr bool kSwapped = Op::kSwapped;
    int const m = kSwapped ? args.n : args.m;
    int const n = kSwapped ? args.m : args.n;
    typename Kernel::Arguments out{};
    out.mode = cutlass::gemm::GemmUniversalMode::kGemm;
    out.problem_shape = {m, n, args.k, 1};
    out.mainloop = Collectives::Operands::mainloop_arguments(
        kSwapped ? args.b : args.a, kSwapped ? args.scale_b : args.scale_a, kSwapped ? args.a : args.b,
        kSwapped ? args.scale_a : args.scale_b, m, n, args.k);
    out.epilogue.thread = args.epilogue;
    out.epilogue.ptr_D = static_cast<typename Op::ElementOutput*>(args.epilogue.d);
    cute::get<kSwapped ? 1 : 0>(out.epilogue.dD) = args.epilogue.d_row_stride * kStoredElements<Op>;
    out.hw_info.device_id = args.device;
    out.hw_info.sm_count = args.num_sms;
    return out;
  }
};

/// A grouped kernel; the parameters are those of Dense. Its tables lie in the caller's workspace, where
/// prepare_groups fills them before the kernel runs.
template <class Arch_, class Tile_, class Cluster_, class Op_>
struct Grouped {
  using Arch = Arch_;
  using Tile = Tile_;
  using Cluster = Cluster_;
  using Op = Op_;
  static constexpr bool kGrouped = true;
  using Collectives = typename Arch::template Collectives<Tile, Cluster, Op, kGrouped>;
  using Kernel = typename Collectives::Kernel;
  using Table = GroupTable<Collectives, Op>;

  static typename Kernel::Arguments lower(GroupedArguments<Op> const& args, Table const& table) {
    typename Kernel::Arguments out{};
    out.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
    out.problem_shape = {args.num_groups, table.shapes, nullptr};
    out.mainloop = Collectives::Operands::grouped_mainloop_arguments(table);
    out.epilogue.thread = {args.epilogue, table.epilogue};
    out.epilogue.ptr_D = table.d;
    out.epilogue.dD = table.stride_d;
    out.hw_info.device_id = args.device;
    out.hw_info.sm_count = args.num_sms;
    return out;
  }
};

}  // namespace cutlass_evt
