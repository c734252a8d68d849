// make_kernel<K>(): the table row of a cutlass_evt kernel, every field derived from its type.
#pragma once

#include <atomic>

#include "cutlass/device_kernel.h"
#include "cutlass_evt/gemm.hpp"
#include "error.hpp"
#include "kernel.hpp"

namespace fp4gemm {

template <class T>
struct OutType;
template <>
struct OutType<cutlass::bfloat16_t> {
  static constexpr fp4gemm_dtype_t kId = FP4GEMM_BF16;
  static constexpr char const* kName = "bf16";
};
template <>
struct OutType<cutlass::half_t> {
  static constexpr fp4gemm_dtype_t kId = FP4GEMM_FP16;
  static constexpr char const* kName = "fp16";
};
template <>
struct OutType<float> {
  static constexpr fp4gemm_dtype_t kId = FP4GEMM_FP32;
  static constexpr char const* kName = "fp32";
};

/// Text that is put together at compile time.
struct NameBuilder {
  char text[64] = {};
  int size = 0;

  constexpr NameBuilder& operator<<(char const* part) {
    for (; *part != '\0'; ++part) {
      text[size++] = *part;
    }
    return *this;
  }
  constexpr NameBuilder& operator<<(int number) {
    char digits[12] = {};
    int count = 0;
    do {
      digits[count++] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    while (count > 0) {
      text[size++] = digits[--count];
    }
    return *this;
  }
};

template <class K>
struct KernelImpl {
  using Gemm = typename K::Kernel;
  using Op = typename K::Op;
  using Out = OutType<typename Op::ElementOutput>;
  static constexpr int kTileM = cute::size<0>(typename K::Tile{});
  static constexpr int kTileN = cute::size<1>(typename K::Tile{});
  static constexpr int kTileK = cute::size<2>(typename K::Tile{});
  static constexpr int kClusterM = cute::size<0>(typename K::Cluster{});
  static constexpr int kClusterN = cute::size<1>(typename K::Cluster{});

  /// For instance sm100_dense_256x128x256_c2x1_rowcol_bf16.
  static constexpr NameBuilder make_name() {
    NameBuilder name;
    name << "sm" << K::Arch::kArch << "_dense_" << kTileM << "x" << kTileN << "x" << kTileK << "_c"
         << kClusterM << "x" << kClusterN << "_" << Op::kName << "_" << Out::kName;
    return name;
  }
  static constexpr NameBuilder kName = make_name();

  static cutlass_evt::Vector vector(fp4gemm_vector_t v) { return {v.data, v.numel != 1}; }

  static typename Gemm::Arguments arguments(DenseProblem const& p) {
    cutlass_evt::DenseArguments<Op> args;
    args.m = static_cast<int>(p.m);
    args.n = static_cast<int>(p.n);
    args.k = static_cast<int>(p.k);
    args.a = p.a;
    args.scale_a = p.scale_a;
    args.b = p.b;
    args.scale_b = p.scale_b;
    args.epilogue.alpha_row = vector(p.alpha_row);
    args.epilogue.alpha_col = vector(p.alpha_col);
    args.epilogue.alpha = p.alpha;
    args.epilogue.bias = p.bias;
    args.d = static_cast<typename Op::ElementOutput*>(p.d);
    args.d_row_stride = p.d_row_stride;
    args.device = p.device;
    args.num_sms = p.num_sms;
    return K::lower(args);
  }

  static size_t workspace_bytes(DenseProblem const& p) { return Gemm::get_workspace_size(arguments(p)); }

  /// Lifts the kernel's shared memory limit, once a device; idempotent, so that a race does no harm.
  static cudaError_t prepare(int device) {
    static std::atomic<uint64_t> prepared{0};
    uint64_t const bit = device < 64 ? uint64_t{1} << device : 0;
    if ((prepared.load(std::memory_order_relaxed) & bit) != 0) {
      return cudaSuccess;
    }
    cudaError_t const error = cudaFuncSetAttribute(
        cutlass::device_kernel<Gemm>, cudaFuncAttributeMaxDynamicSharedMemorySize, Gemm::SharedStorageSize);
    if (error == cudaSuccess) {
      prepared.fetch_or(bit, std::memory_order_relaxed);
    }
    return error;
  }

  static fp4gemm_status_t launch(DenseProblem const& p, void* workspace, fp4gemm_stream_t stream) {
    typename Gemm::Arguments const args = arguments(p);
    if (!Gemm::can_implement(args)) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s does not take m %lld, n %lld, k %lld", kName.text,
                  static_cast<long long>(p.m), static_cast<long long>(p.n), static_cast<long long>(p.k));
    }
    if (Gemm::initialize_workspace(args, workspace, stream) != cutlass::Status::kSuccess) {
      return fail(FP4GEMM_ERROR_WORKSPACE, "workspace: %s could not initialise it", kName.text);
    }
    typename Gemm::Params params = Gemm::to_underlying_arguments(args, workspace);

    cudaLaunchAttribute cluster{};
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {kClusterM, kClusterN, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = Gemm::get_grid_shape(params);
    config.blockDim = Gemm::get_block_shape();
    config.dynamicSmemBytes = Gemm::SharedStorageSize;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    void* kernel_args[] = {&params};
    FP4GEMM_CUDA(prepare(p.device));
    FP4GEMM_CUDA(cudaLaunchKernelExC(&config, reinterpret_cast<void const*>(cutlass::device_kernel<Gemm>),
                                     kernel_args));
    return FP4GEMM_SUCCESS;
  }
};

template <class K>
constexpr Kernel make_kernel() {
  using Impl = KernelImpl<K>;
  return {{Impl::kName.text, "dense", K::Op::kName, K::Arch::kArch, Impl::kTileM, Impl::kTileN, Impl::kTileK,
           Impl::kClusterM, Impl::kClusterN, Impl::Out::kId, K::Arch::kDecodedOperands ? "f16" : "nvfp4"},
          K::Arch::kDecodedOperands ? FP4GEMM_FORMAT_FP16 : FP4GEMM_FORMAT_NVFP4,
          &Impl::workspace_bytes,
          &Impl::launch};
}

template <int N>
constexpr KernelList make_list(Kernel const (&kernels)[N]) {
  return {kernels, N};
}

}  // namespace fp4gemm
