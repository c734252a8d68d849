// The rows of the kernel table for a CUTLASS kernel of SM100 or SM120. Every field is derived from the type
// K, which is cutlass_evt::Dense or cutlass_evt::Grouped with an architecture, a tile, a cluster and an
// epilogue. A kernel whose epilogue has SixteenBits has a row for bf16 and one for fp16.
#pragma once

#include <atomic>

#include "cutlass_evt/gemm.hpp"
#include "cutlass_evt/operands/mxfp4.hpp"
#include "cutlass_evt/operands/mxfp8.hpp"
#include "cutlass_evt/operands/mxfp8_mxfp4.hpp"
#include "cutlass_evt/operands/nvfp4.hpp"
#include "error.hpp"
#include "kernel_activation.hpp"
#include "kernel_row.hpp"
#include "launch.hpp"

namespace fp4gemm {

/// The Operands of a format of cutlass_evt/operands/.
template <class Format>
constexpr Operands kOperandsOf = Operands::kNvfp4;
template <>
constexpr Operands kOperandsOf<cutlass_evt::Mxfp8> = Operands::kMxfp8;
template <>
constexpr Operands kOperandsOf<cutlass_evt::Mxfp4> = Operands::kMxfp4;
template <>
constexpr Operands kOperandsOf<cutlass_evt::Mxfp8Mxfp4> = Operands::kMxfp8Mxfp4;

/// Mode I of a static shape.
template <int I, class Shape>
constexpr int kSize = static_cast<int>(cute::size<I>(Shape{}));

/// The parameters of a kernel. A type of our own is what nvcc's host code names: with CUTLASS 4.2 it spells
/// the Params of SM120's kernels so that g++ 12 finds no matching template.
template <class Base>
struct KernelParams {
  typename Base::Gemm::Params params;
};

/// The __global__ function of every CUTLASS kernel here, of which Base is the KernelBase. It may start while
/// its predecessor on the stream still runs (programmatic dependent launch). griddepcontrol.wait comes first,
/// since the wait inside of CUTLASS comes after the first reads of vectors and group tables; after it all
/// writes of the predecessor are visible.
template <class Base>
__global__ void __launch_bounds__(Base::Gemm::MaxThreadsPerBlock, Base::Gemm::MinBlocksPerMultiprocessor)
    gemm_kernel(__grid_constant__ KernelParams<Base> const kernel) {
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
  extern __shared__ char shared[];
  typename Base::Gemm gemm;
  gemm(kernel.params, shared);
}

/// What dense and grouped kernels share: the conversion of arguments and the launch.
template <class K>
struct KernelBase {
  using Gemm = typename K::Kernel;
  using Op = typename K::Op;
  using Cluster = typename K::Cluster;

  /// The fields that the arguments of both modes have in common: sizes, operands, the epilogue and the
  /// device.
  template <class Args>
  static Args arguments_of(Problem const& p) {
    Args args;
    args.m = static_cast<int>(p.m);
    args.n = static_cast<int>(p.n);
    args.k = static_cast<int>(p.k);
    args.a = p.a;
    args.scale_a = p.scale_a;
    args.b = p.b;
    args.scale_b = p.scale_b;
    args.epilogue = p.epilogue;
    args.device = p.device;
    args.num_sms = p.num_sms;
    return args;
  }

  /// Launches the kernel with CUTLASS's arguments, in the steps of CUTLASS's device adapter, whose __global__
  /// function gemm_kernel replaces: refuse sizes that the kernel does not address, make the parameters,
  /// tensor maps included, and launch. `name` is that of the row in the table, for errors.
  static fp4gemm_status_t run(char const* name, typename Gemm::Arguments const& args, Problem const& p,
                              void* workspace, fp4gemm_stream_t stream) {
    if (!Gemm::can_implement(args)) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s does not support m %lld, n %lld, k %lld", name,
                  static_cast<long long>(p.m), static_cast<long long>(p.n), static_cast<long long>(p.k));
    }
    if (Gemm::initialize_workspace(args, workspace, stream) != cutlass::Status::kSuccess) {
      return fail(FP4GEMM_ERROR_WORKSPACE, "workspace: %s failed to initialise it", name);
    }
    KernelParams<KernelBase> kernel{Gemm::to_underlying_arguments(args, workspace)};

    static std::atomic<uint64_t> prepared{0};
    FP4GEMM_TRY(allow_shared_memory(gemm_kernel<KernelBase>, Gemm::SharedStorageSize, p.device, prepared));
    FP4GEMM_CUDA(launch_waiting(gemm_kernel<KernelBase>,
                                {Gemm::get_grid_shape(kernel.params), Gemm::MaxThreadsPerBlock,
                                 Gemm::SharedStorageSize, dim3(kSize<0, Cluster>, kSize<1, Cluster>, 1)},
                                /*overlaps=*/true, stream, kernel));
    return FP4GEMM_SUCCESS;
  }
};

/// A dense kernel: a workspace and one launch.
template <class K>
struct DenseImpl : KernelBase<K> {
  using Base = KernelBase<K>;
  using typename Base::Gemm;

  static typename Gemm::Arguments arguments(Problem const& p) {
    return K::lower(Base::template arguments_of<cutlass_evt::DenseArguments<typename K::Op>>(p));
  }

  static size_t workspace_bytes(Problem const& p) { return Gemm::get_workspace_size(arguments(p)); }

  static fp4gemm_status_t launch(char const* name, Problem const& p, void* workspace,
                                 fp4gemm_stream_t stream) {
    return Base::run(name, arguments(p), p, workspace, stream);
  }
};

/// A grouped kernel: two launches. The sizes of the groups are known on the device
/// alone, so that prepare_groups makes the table of problem sizes and pointers there, at the begin of the
/// workspace; the GEMM, whose own workspace lies behind it, reads the table.
template <class K>
struct GroupedImpl : KernelBase<K> {
  using Base = KernelBase<K>;
  using typename Base::Gemm;
  using Op = typename K::Op;
  using Table = typename K::Table;

  /// What prepare_groups makes the table of: the operands of all groups together, and where groups end.
  static cutlass_evt::GroupedArguments<Op> arguments(Problem const& p) {
    auto args = Base::template arguments_of<cutlass_evt::GroupedArguments<Op>>(p);
    args.ragged = p.ragged == FP4GEMM_RAGGED_M ? cutlass_evt::Ragged::kM : cutlass_evt::Ragged::kK;
    args.num_groups = p.num_groups;
    args.offs = p.offs;
    args.scale_tiles = static_cast<int>(fp4gemm_grouped_scale_rows(p.m, p.num_groups) / 128);
    return args;
  }

  /// lay_out only counts here: it is given no memory.
  static size_t workspace_bytes(Problem const& p) {
    Table table;
    size_t const bytes = Table::lay_out(nullptr, p.num_groups, &table);
    return bytes + Gemm::get_workspace_size(K::lower(arguments(p), table));
  }

  static fp4gemm_status_t launch(char const* name, Problem const& p, void* workspace,
                                 fp4gemm_stream_t stream) {
    auto args = arguments(p);
    Table table;
    size_t const bytes = Table::lay_out(workspace, p.num_groups, &table);

    // Groups that are ragged in k need more than one CTA: see prepare_groups.
    unsigned const ctas = p.ragged == FP4GEMM_RAGGED_K ? 1 + static_cast<unsigned>(p.num_sms) : 1;
    FP4GEMM_CUDA(launch_waiting(cutlass_evt::prepare_groups<typename K::Collectives, Op>,
                                {ctas, cutlass_evt::kPrepareThreads}, /*overlaps=*/true, stream, args,
                                table));
    return Base::run(name, K::lower(args, table), p, static_cast<char*>(workspace) + bytes, stream);
  }
};

/// The row of a kernel in the table, for C and D of the type Out.
template <class K, class Out>
struct KernelRow {
  using Impl = cute::conditional_t<K::kGrouped, GroupedImpl<K>, DenseImpl<K>>;
  using Op = typename K::Op;
  template <class Shape>
  static constexpr int kAlongM = Op::kSwapped ? kSize<1, Shape> : kSize<0, Shape>;
  template <class Shape>
  static constexpr int kAlongN = Op::kSwapped ? kSize<0, Shape> : kSize<1, Shape>;

  using Tile = typename K::Tile;
  using Cluster = typename K::Cluster;
  static constexpr KernelTraits kTraits{K::Arch::kArch,
                                        K::kGrouped,
                                        Op::kSwapped,
                                        Op::kGated,
                                        kAlongM<Tile>,
                                        kAlongN<Tile>,
                                        kSize<2, Tile>,
                                        kAlongM<Cluster>,
                                        kAlongN<Cluster>,
                                        Op::kName,
                                        OutType<Out>::kId,
                                        OutType<Out>::kName,
                                        kOperandsOf<typename K::Arch::Format>};
  static constexpr NameBuilder kName = kTraits.name();

  static size_t workspace_bytes(Problem const& p) { return Impl::workspace_bytes(p); }

  static fp4gemm_status_t launch(Problem const& p, void* workspace, fp4gemm_stream_t stream) {
    return Impl::launch(kName.text, p, workspace, stream);
  }
};

/// The row of K in the kernel table. Taking the addresses of workspace_bytes and launch instantiates the
/// kernel, so that it is compiled in the translation unit whose list has the row.
template <class K, class Out = typename K::Op::Result>
constexpr Kernel make_kernel() {
  return make_row<KernelRow<K, Out>>();
}

}  // namespace fp4gemm
