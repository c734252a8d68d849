// A kernel of an epilogue library (epilogue_library.hpp). The unit includes cutlass_evt/arch/sm100.hpp or
// sm120.hpp first, and finds the formula as "fp4gemm_generated.hpp".
#pragma once

#include <algorithm>

#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass_evt/epilogue/generated_visitor.hpp"
#include "cutlass_evt/gemm.hpp"
#include "fp4gemm/epilogue_library.hpp"

namespace fp4gemm::epilogue_library {

/// Kernels of an architecture (Sm100 or Sm120) with a tile, whose D has the type Out: float or SixteenBits.
/// Name is that of epilogue::Generated.
template <class Arch, class Tile, class Out, bool kGrouped, class Name>
struct Launcher {
  using Op = cutlass_evt::epilogue::Generated<Out, Name>;
  using Cluster = cutlass_evt::Cluster<1, 1>;
  using K = cute::conditional_t<kGrouped, cutlass_evt::Grouped<Arch, Tile, Cluster, Op>,
                                cutlass_evt::Dense<Arch, Tile, Cluster, Op>>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<typename K::Kernel>;
  using Arguments =
      cute::conditional_t<kGrouped, cutlass_evt::GroupedArguments<Op>, cutlass_evt::DenseArguments<Op>>;

 private:
  static cutlass_evt::EpilogueVector vector(fp4gemm_vector_t const& v) {
    return {v.data, v.group_stride, v.numel != 1};
  }

  static typename Op::Arguments epilogue(fp4gemm_gemm_args_t const& args,
                                         fp4gemm_generated_t const& generated) {
    typename Op::Arguments to;
    to.alpha = args.alpha;
    to.alpha_groups = args.alpha_groups;
    to.per_row[cutlass_evt::kAlphaRow] = vector(args.alpha_row);
    to.per_column[cutlass_evt::kAlphaCol] = vector(args.alpha_col);
    to.per_column[cutlass_evt::kBias] = vector(args.bias);
    to.c = args.c;
    to.c_row_stride = args.c_row_stride;
    to.d = args.d;
    to.d_row_stride = args.d_row_stride;
    to.output = cutlass_evt::OutputType{static_cast<int>(args.out_dtype)};
    std::transform(generated.rows, generated.rows + generated.num_rows, to.inputs.rows, vector);
    std::transform(generated.columns, generated.columns + generated.num_columns, to.inputs.columns, vector);
    std::copy_n(generated.groups, generated.num_groups, to.inputs.groups);
    std::copy_n(generated.scalars, generated.num_scalars, to.inputs.scalars);
    auto const copy = [](fp4gemm_generated_matrix_t const* from, int count, auto* matrices, auto* types) {
      for (int i = 0; i < count; ++i) {
        matrices[i] = {from[i].data, from[i].row_stride};
        types[i] = cutlass_evt::OutputType{static_cast<int>(from[i].dtype)};
      }
    };
    copy(generated.matrices, generated.num_matrices, to.inputs.matrices, to.types.matrices);
    copy(generated.aux, generated.num_aux, to.inputs.aux, to.types.aux);
    to.offs = kGrouped ? args.offs : nullptr;
    to.m = static_cast<int>(args.m);
    return to;
  }

  static Arguments arguments(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const& generated,
                             int device) {
    Arguments to;
    to.m = static_cast<int>(args.m);
    to.n = static_cast<int>(args.n);
    to.k = static_cast<int>(args.k);
    to.a = args.a.data;
    to.scale_a = args.a.scales;
    to.b = args.b.data;
    to.scale_b = args.b.scales;
    to.epilogue = epilogue(args, generated);
    to.device = device;
    cudaDeviceGetAttribute(&to.num_sms, cudaDevAttrMultiProcessorCount, device);
    if constexpr (kGrouped) {
      to.ragged = cutlass_evt::Ragged::kM;
      to.num_groups = args.num_groups;
      to.offs = args.offs;
      to.scale_tiles = static_cast<int>((args.m + 127 * int64_t{args.num_groups}) / 128);
    }
    return to;
  }

  static size_t workspace_bytes(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const& generated,
                                int device) {
    auto const lowered = arguments(args, generated, device);
    if constexpr (kGrouped) {
      typename K::Table table;
      size_t const bytes = K::Table::lay_out(nullptr, args.num_groups, &table);
      return bytes + Gemm::get_workspace_size(K::lower(lowered, table));
    } else {
      return Gemm::get_workspace_size(K::lower(lowered));
    }
  }

  static char const* run(typename Gemm::Arguments const& args, void* workspace, fp4gemm_stream_t stream) {
    if (Gemm::can_implement(args) != cutlass::Status::kSuccess) {
      return "m, n, k: the kernel does not support these sizes";
    }
    Gemm gemm;
    if (gemm.initialize(args, workspace, stream) != cutlass::Status::kSuccess ||
        gemm.run(stream) != cutlass::Status::kSuccess) {
      cudaError_t const error = cudaGetLastError();
      return error == cudaSuccess ? "CUTLASS refused to launch the kernel" : cudaGetErrorString(error);
    }
    return nullptr;
  }

  static char const* launch(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const& generated,
                            void* workspace, int device, fp4gemm_stream_t stream) {
    auto const lowered = arguments(args, generated, device);
    if constexpr (kGrouped) {
      typename K::Table table;
      size_t const bytes = K::Table::lay_out(workspace, args.num_groups, &table);
      cutlass_evt::prepare_groups<typename K::Collectives, Op>
          <<<1, cutlass_evt::kPrepareThreads, 0, stream>>>(lowered, table);
      if (cudaError_t const error = cudaGetLastError()) {
        return cudaGetErrorString(error);
      }
      return run(K::lower(lowered, table), static_cast<char*>(workspace) + bytes, stream);
    } else {
      return run(K::lower(lowered), workspace, stream);
    }
  }

 public:
  static constexpr Kernel kKernel{kGrouped, cute::is_same_v<Out, float>, &workspace_bytes, &launch};
};

}  // namespace fp4gemm::epilogue_library
