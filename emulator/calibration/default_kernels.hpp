// CUTLASS's own kernels of block-scaled operands for SM100 or SM120 with the default epilogue (linear
// combination without C), by tile and layout, and their verification against CUTLASS's host reference.
// CALIBRATION_ARCH is 100 or 120; with CALIBRATION_MXFP8, CALIBRATION_MXFP4 or CALIBRATION_MXFP8_MXFP4 (A and
// B) the operands are those, otherwise NVFP4.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass/util/device_memory.h"
#include "cutlass/util/host_tensor.h"
#include "cutlass/util/packed_stride.hpp"
#include "cutlass/util/reference/host/gett.hpp"
#include "cutlass/util/reference/host/tensor_compare.h"
#include "cutlass/util/reference/host/tensor_fill.h"
#include "cutlass/util/reference/host/tensor_norm.h"

namespace calibration {

using namespace cute;

enum class Format { kNvfp4, kMxfp8, kMxfp4 };  // that of A, by which schedules and tiles are chosen
#if defined(CALIBRATION_MXFP8_MXFP4)
constexpr Format kFormat = Format::kMxfp8;
using ElementA = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
using ElementB = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
constexpr int kAlignmentB = 128;  // TMA unpacks whole multiples of 128 codes
#elif defined(CALIBRATION_MXFP8)
constexpr Format kFormat = Format::kMxfp8;
using ElementA = cutlass::mx_float8_t<cutlass::float_e4m3_t>;
using ElementB = ElementA;
constexpr int kAlignmentB = 16;
#elif defined(CALIBRATION_MXFP4)
constexpr Format kFormat = Format::kMxfp4;
using ElementA = cutlass::mx_float4_t<cutlass::float_e2m1_t>;
using ElementB = ElementA;
constexpr int kAlignmentB = 32;
#else
constexpr Format kFormat = Format::kNvfp4;
using ElementA = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
using ElementB = ElementA;
constexpr int kAlignmentB = 32;
#endif
constexpr int kAlignmentA = 128 / cutlass::sizeof_bits<typename ElementA::DataType>::value;

/// What an architecture chooses for its kernels of tile (M, N).
template <int kArch, int M, int N, bool kGrouped>
struct Machine;

template <int M, int N, bool kGrouped>
struct Machine<100, M, N, kGrouped> {
  using Arch = cutlass::arch::Sm100;
  static constexpr int kTileK = kFormat == Format::kMxfp8 ? 128 : 256;
  static constexpr bool kTwoSm = M == 256;
  // With n = 256 the two accumulators of CUTLASS overlap by the columns of the epilogue tile, since TMEM also
  // has to hold the scale factors.
  using EpilogueTile = Shape<_128, Int<N == 256 ? 64 : 32>>;
  using EpilogueSchedule =
      conditional_t<kGrouped,
                    conditional_t<kTwoSm, cutlass::epilogue::PtrArrayTmaWarpSpecialized2Sm,
                                  cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm>,
                    conditional_t<kTwoSm, cutlass::epilogue::TmaWarpSpecialized2Sm,
                                  cutlass::epilogue::TmaWarpSpecialized1Sm>>;
  using Nvfp4Schedule =
      conditional_t<kGrouped,
                    conditional_t<kTwoSm, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized2SmNvf4Sm100,
                                  cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100>,
                    conditional_t<kTwoSm, cutlass::gemm::KernelTmaWarpSpecialized2SmNvf4Sm100,
                                  cutlass::gemm::KernelTmaWarpSpecialized1SmNvf4Sm100>>;
  using Mxfp8Schedule =
      conditional_t<kGrouped, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf8f6f4Sm100,
                    cutlass::gemm::KernelTmaWarpSpecialized1SmMxf8f6f4Sm100>;
  using Mxfp4Schedule = conditional_t<kGrouped, cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmMxf4Sm100,
                                      cutlass::gemm::KernelTmaWarpSpecialized1SmMxf4Sm100>;
  static_assert(kFormat == Format::kNvfp4 || !kTwoSm,
                "no tile of this library that two SMs share has MX operands");
  using MainloopSchedule =
      conditional_t<kFormat == Format::kMxfp8, Mxfp8Schedule,
                    conditional_t<kFormat == Format::kMxfp4, Mxfp4Schedule, Nvfp4Schedule>>;
};

template <int M, int N, bool kGrouped>
struct Machine<120, M, N, kGrouped> {
  using Arch = cutlass::arch::Sm120;
  static constexpr int kTileK = 128;
  using EpilogueTile = cutlass::epilogue::collective::EpilogueTileAuto;
  using EpilogueSchedule = conditional_t<kGrouped, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
                                         cutlass::epilogue::TmaWarpSpecializedCooperative>;
  using MainloopSchedule = conditional_t<kGrouped, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative,
                                         cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
};

template <int M, int N, int ClusterM, int ClusterN, class Out_, class LayoutD_, bool kGrouped_>
struct Case {
  using Out = Out_;
  using Machine = calibration::Machine<CALIBRATION_ARCH, M, N, kGrouped_>;
  using Arch = typename Machine::Arch;
  using Tile = Shape<Int<M>, Int<N>, Int<Machine::kTileK>>;
  using Cluster = Shape<Int<ClusterM>, Int<ClusterN>, _1>;
  static constexpr bool kGrouped = kGrouped_;
  static constexpr int kAlignmentD = 128 / cutlass::sizeof_bits<Out>::value;
  template <class Layout>
  using Of = conditional_t<kGrouped, Layout*, Layout>;
  using LayoutA = Of<cutlass::layout::RowMajor>;
  using LayoutB = Of<cutlass::layout::ColumnMajor>;
  using LayoutD = Of<LayoutD_>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster, typename Machine::EpilogueTile, float,
      float, void, LayoutD, kAlignmentD, Out, LayoutD, kAlignmentD,
      typename Machine::EpilogueSchedule>::CollectiveOp;
  // 1024: CUTLASS 4.2.0 computes the number of stages without rounding the barriers up to 128 bytes.
  using Stages = cutlass::gemm::collective::StageCountAutoCarveout<
      static_cast<int>(sizeof(typename Epilogue::SharedStorage)) + 1024>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      Arch, cutlass::arch::OpClassBlockScaledTensorOp, ElementA, LayoutA, kAlignmentA, ElementB, LayoutB,
      kAlignmentB, float, Tile, Cluster, Stages, typename Machine::MainloopSchedule>::CollectiveOp;
  using Problem = conditional_t<kGrouped, cutlass::gemm::GroupProblemShape<Shape<int, int, int>>,
                                Shape<int, int, int, int>>;
  using Kernel = cutlass::gemm::kernel::GemmUniversal<Problem, Mainloop, Epilogue, void>;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<Kernel>;

  using StrideA = remove_pointer_t<typename Kernel::StrideA>;
  using StrideB = remove_pointer_t<typename Kernel::StrideB>;
  using StrideD = remove_pointer_t<typename Kernel::StrideD>;
  using Scale = typename Mainloop::ElementSF;
  using Config = typename Mainloop::Sm1xxBlkScaledConfig;
  using LayoutSf = decltype(Config::deduce_layoutSFA());
};

/// Fills a tensor with small integers, so that sums are exact in any order.
template <class View>
void fill(View view, unsigned seed, int limit) {
  cutlass::reference::host::TensorFillRandomUniform(view, seed, limit, -limit, 0);
}

/// Fills scales: those of NVFP4 as above, those of MX formats, which have no sign and no zero, with 1/2, 1, 2
/// and 4.
template <class Scales>
void fill_scales(Scales& scales, unsigned seed) {
  if constexpr (kFormat != Format::kNvfp4) {
    for (size_t i = 0; i < scales.size(); ++i) {
      seed = seed * 1664525u + 1013904223u;
      scales.host_data()[i] = std::decay_t<decltype(scales.host_data()[i])>::bitcast(126 + (seed >> 30));
    }
  } else {
    fill(scales.host_view(), seed, 1);
  }
}

/// The operands and the result of one matrix product.
template <class Case>
struct Matrices {
  template <class T>
  using Host = cutlass::HostTensor<T, cutlass::layout::PackedVectorLayout>;
  using CodeA = typename ElementA::DataType;
  using CodeB = typename ElementB::DataType;
  using Out = typename Case::Out;

  int m, n, k;
  typename Case::StrideA stride_a;
  typename Case::StrideB stride_b;
  typename Case::StrideD stride_d;
  typename Case::LayoutSf layout_sfa, layout_sfb;
  Host<CodeA> a;
  Host<CodeB> b;
  Host<typename Case::Scale> sfa, sfb;
  Host<Out> d, reference;

  Matrices(int m_, int n_, int k_, unsigned seed) : m(m_), n(n_), k(k_) {
    using cutlass::make_cute_packed_stride;
    stride_a = make_cute_packed_stride(typename Case::StrideA{}, {m, k, 1});
    stride_b = make_cute_packed_stride(typename Case::StrideB{}, {n, k, 1});
    stride_d = make_cute_packed_stride(typename Case::StrideD{}, {m, n, 1});
    layout_sfa = Case::Config::tile_atom_to_shape_SFA(make_shape(m, n, k, 1));
    layout_sfb = Case::Config::tile_atom_to_shape_SFB(make_shape(m, n, k, 1));
    a.reset(cutlass::make_Coord(m * k));
    b.reset(cutlass::make_Coord(n * k));
    sfa.reset(cutlass::make_Coord(size(filter_zeros(layout_sfa))));
    sfb.reset(cutlass::make_Coord(size(filter_zeros(layout_sfb))));
    d.reset(cutlass::make_Coord(m * n));
    reference.reset(cutlass::make_Coord(m * n));
    fill(a.host_view(), seed + 1, 2);
    fill(b.host_view(), seed + 2, 2);
    fill_scales(sfa, seed + 3);
    fill_scales(sfb, seed + 4);
    a.sync_device();
    b.sync_device();
    sfa.sync_device();
    sfb.sync_device();
  }

  bool verify(float alpha) {
    if (m == 0) {
      return true;
    }
    auto const layout = [](int rows, int columns, auto stride) {
      return make_layout(make_shape(rows, columns, 1), stride);
    };
    Tensor tensor_a = make_tensor(recast_ptr<CodeA>(a.host_data()), layout(m, k, stride_a));
    Tensor tensor_b = make_tensor(recast_ptr<CodeB>(b.host_data()), layout(n, k, stride_b));
    Tensor tensor_sfa = make_tensor(sfa.host_data(), layout_sfa);
    Tensor tensor_sfb = make_tensor(sfb.host_data(), layout_sfb);
    Tensor tensor_d = make_tensor(recast_ptr<Out>(reference.host_data()), layout(m, n, stride_d));
    cutlass::reference::host::GettBlockScalingMainloopParams<float, decltype(tensor_a), decltype(tensor_sfa),
                                                             decltype(tensor_b), decltype(tensor_sfb)>
        mainloop{tensor_a, tensor_sfa, tensor_b, tensor_sfb};
    cutlass::reference::host::GettBlockScalingEpilogueParams<float, float, float, decltype(tensor_d),
                                                             decltype(tensor_d)>
        epilogue{alpha, 0.0f, tensor_d, tensor_d};
    cutlass::reference::host::Gemm3x(mainloop, epilogue);
    d.sync_host();
    return cutlass::reference::host::TensorEquals(reference.host_view(), d.host_view()) &&
           cutlass::reference::host::TensorNorm(reference.host_view()) > 0;
  }
};

/// The parameters of an SM120 kernel and, below, its __global__ function. Case, a type of our own, is what
/// nvcc's host code names: it spells CUTLASS's types of these kernels so that g++ 12 finds no matching
/// template, and a function that such types are arguments of is not registered.
template <class Case>
struct Params {
  typename Case::Kernel::Params params;
};

template <class Case>
__global__ void __launch_bounds__(Case::Kernel::MaxThreadsPerBlock, Case::Kernel::MinBlocksPerMultiprocessor)
    default_kernel(__grid_constant__ Params<Case> const kernel) {
  extern __shared__ char shared[];
  typename Case::Kernel gemm;
  gemm(kernel.params, shared);
}

template <class Case>
bool launch(typename Case::Gemm::Arguments const& arguments) {
  using Gemm = typename Case::Gemm;
  cutlass::device_memory::allocation<uint8_t> workspace(Gemm::get_workspace_size(arguments));
  if constexpr (CALIBRATION_ARCH == 100) {
    Gemm gemm;
    return gemm.can_implement(arguments) == cutlass::Status::kSuccess &&
           gemm.initialize(arguments, workspace.get()) == cutlass::Status::kSuccess &&
           gemm.run() == cutlass::Status::kSuccess && cudaDeviceSynchronize() == cudaSuccess;
  } else {
    using Kernel = typename Case::Kernel;
    if (!Kernel::can_implement(arguments) ||
        Kernel::initialize_workspace(arguments, workspace.get()) != cutlass::Status::kSuccess) {
      return false;
    }
    Params<Case> kernel{Kernel::to_underlying_arguments(arguments, workspace.get())};
    auto const entry = reinterpret_cast<void const*>(default_kernel<Case>);
    void* pointers[] = {&kernel};
    return cudaFuncSetAttribute(entry, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                Kernel::SharedStorageSize) == cudaSuccess &&
           cudaLaunchKernel(entry, Kernel::get_grid_shape(kernel.params), Kernel::get_block_shape(), pointers,
                            Kernel::SharedStorageSize, nullptr) == cudaSuccess &&
           cudaDeviceSynchronize() == cudaSuccess;
  }
}

/// Prints the result in the form that CTest looks for.
inline int report(char const* what, bool passed) {
  std::printf("  %s\n  Disposition: %s\n", what, passed ? "Passed" : "Failed");
  return passed ? 0 : 1;
}

}  // namespace calibration
