// A GEMM of the user's own with the row x column x alpha + bias epilogue of cutlass_evt, for the architecture
// EPILOGUE_ARCH: 90, 100 or 120. Computes on a GPU of that architecture and compares with the host; without
// one it only checks that the kernel accepts the problem.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "cutlass_evt/fusion.hpp"
#include "cutlass_evt/tile.hpp"

namespace {

/// What differs between the architectures: the type of the operands, as CUTLASS has no bf16 kernels for
/// SM120, and the tag and the schedules of CUTLASS.
template <int kArch>
struct Target;
template <>
struct Target<90> {
  using Element = cutlass::bfloat16_t;
  using Arch = cutlass::arch::Sm90;
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};
template <>
struct Target<100> {
  using Element = cutlass::bfloat16_t;
  using Arch = cutlass::arch::Sm100;
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecialized1SmSm100;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized1Sm;
};
template <>
struct Target<120> {
  using Element = cutlass::float_e4m3_t;
  using Arch = cutlass::arch::Sm120;
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

using Here = Target<EPILOGUE_ARCH>;
using Element = Here::Element;
constexpr int kAlignment = 16 / sizeof(Element);  // elements, 16 bytes
using RowMajor = cutlass::layout::RowMajor;
using ColumnMajor = cutlass::layout::ColumnMajor;
using Tile = cutlass_evt::Tile<128, 128, 128 / sizeof(Element)>;
using Cluster = cutlass_evt::Cluster<1, 1>;
using Epilogue = cutlass_evt::epilogue::RowCol<float>;

using CollectiveEpilogue = cutlass::epilogue::collective::CollectiveBuilder<
    Here::Arch, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, RowMajor, 4, float, RowMajor, 4,
    Here::Epilogue, cutlass_evt::Fusion<Epilogue>>::CollectiveOp;
using CollectiveMainloop = cutlass::gemm::collective::CollectiveBuilder<
    Here::Arch, cutlass::arch::OpClassTensorOp, Element, RowMajor, kAlignment, Element, ColumnMajor,
    kAlignment, float, Tile, Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
        sizeof(typename CollectiveEpilogue::SharedStorage))>,
    Here::Mainloop>::CollectiveOp;
using Gemm = cutlass::gemm::device::GemmUniversalAdapter<cutlass::gemm::kernel::GemmUniversal<
    cute::Shape<int, int, int, int>, CollectiveMainloop, CollectiveEpilogue>>;

constexpr int kM = 200, kN = 136, kK = 256;

template <class T>
T* to_device(std::vector<T> const& host) {
  T* device = nullptr;
  if (cudaMalloc(&device, host.size() * sizeof(T)) != cudaSuccess ||
      cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice) != cudaSuccess) {
    std::printf("no memory on the device\n");
    std::exit(1);
  }
  return device;
}

/// Small integers, so that every product and sum is exact whatever their order.
template <class T>
std::vector<T> integers(int size, int range) {
  std::vector<T> values(size);
  for (int i = 0; i < size; ++i) {
    values[i] = T(float((i * 7 + i / 11) % (2 * range + 1) - range));
  }
  return values;
}

}  // namespace

int main() {
  int devices = 0;
  cudaDeviceProp properties{};
  bool const served = cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0 &&
                      cudaGetDeviceProperties(&properties, 0) == cudaSuccess &&
                      properties.major == EPILOGUE_ARCH / 10;

  auto const a = integers<Element>(kM * kK, 3), b = integers<Element>(kN * kK, 2);
  auto const row = integers<float>(kM, 5), col = integers<float>(kN, 4), bias = integers<float>(kN, 9);
  std::vector<float> d(kM * kN, NAN);

  typename Gemm::Arguments args{};
  args.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  args.problem_shape = {kM, kN, kK, 1};
  args.mainloop.dA = {kK, {}, {}};
  args.mainloop.dB = {kK, {}, {}};
  args.epilogue.dD = {kN, {}, {}};
  Epilogue::Arguments epilogue;
  epilogue.alpha = 0.5f;
  if (!served) {
    args.epilogue.thread = epilogue;
    bool const accepts = Gemm::can_implement(args) == cutlass::Status::kSuccess;
    std::printf("no GPU of architecture %d; the kernel %s the problem\n", EPILOGUE_ARCH,
                accepts ? "accepts" : "refuses");
    return accepts ? 0 : 1;
  }

  args.mainloop.ptr_A = to_device(a);
  args.mainloop.ptr_B = to_device(b);
  args.epilogue.ptr_D = to_device(d);
  epilogue.per_row[cutlass_evt::kAlphaRow] = {to_device(row)};
  epilogue.per_column[cutlass_evt::kAlphaCol] = {to_device(col)};
  epilogue.per_column[cutlass_evt::kBias] = {to_device(bias)};
  args.epilogue.thread = epilogue;
  args.hw_info.sm_count = properties.multiProcessorCount;
  Gemm gemm;
  void* workspace = to_device(std::vector<char>(Gemm::get_workspace_size(args) + 1));
  if (gemm.initialize(args, workspace) != cutlass::Status::kSuccess ||
      gemm.run() != cutlass::Status::kSuccess ||
      cudaMemcpy(d.data(), args.epilogue.ptr_D, d.size() * sizeof(float), cudaMemcpyDeviceToHost) !=
          cudaSuccess) {
    std::printf("the kernel failed: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 1;
  }

  int wrong = 0;
  for (int i = 0; i < kM; ++i) {
    for (int j = 0; j < kN; ++j) {
      float acc = 0;
      for (int l = 0; l < kK; ++l) {
        acc += float(a[i * kK + l]) * float(b[j * kK + l]);
      }
      wrong += d[i * kN + j] != 0.5f * (col[j] * (row[i] * acc)) + bias[j];
    }
  }
  std::printf("%d of %d elements are wrong\n", wrong, kM * kN);
  return wrong == 0 ? 0 : 1;
}
