// The launch of SM90's kernels of groups that are ragged in k.
#include "sm90/ragged_k.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>

#include "cutlass_evt/epilogue/rowcol.hpp"
#include "cutlass_evt/kernel/sm90_ragged_k.hpp"
#include "cutlass_evt/tensor_map.hpp"
#include "error.hpp"
#include "launch.hpp"

namespace fp4gemm::sm90 {
namespace {

/// The launch of one configuration. TMA loads A and B and stores D; the host encodes its maps, which are
/// parameters of the kernel, and the kernel reads the ends of the groups.
template <class Config>
struct RaggedKLaunch {
  using Params = cutlass_evt::Sm90RaggedKParams;

  static constexpr CUtensorMapDataType kOutType =
      std::is_same<typename Config::Out, float>::value             ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : std::is_same<typename Config::Out, cutlass::half_t>::value ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;

  static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void const* address,
                         cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box) {
    cuuint32_t const steps[3] = {1, 1, 1};
    return cutlass_evt::encode_tensor_map(map, type, rank, const_cast<void*>(address), sizes, strides, box,
                                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }

  /// The map of A or B: (k, rows), with boxes of 64 by box_rows.
  static CUresult describe_operand(Problem const& p, void const* data, int64_t rows, int box_rows,
                                   CUtensorMap* map) {
    // Without columns, all groups are empty and nothing is loaded; a map needs an address and a size still.
    bool const has_columns = p.k > 0;
    cuuint64_t const sizes[2] = {static_cast<cuuint64_t>(has_columns ? p.k : Config::kDepth),
                                 static_cast<cuuint64_t>(has_columns ? rows : 1)};
    cuuint64_t const strides[1] = {sizes[0] * 2};
    cuuint32_t const box[2] = {Config::kDepth, static_cast<cuuint32_t>(box_rows)};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, has_columns ? data : p.epilogue.d, sizes, strides,
                  box);
  }

  /// The map of D: (n, m, num_groups), with boxes of one slice.
  static CUresult describe_d(Problem const& p, CUtensorMap* map) {
    int64_t const row_bytes = p.epilogue.d_row_stride * static_cast<int64_t>(sizeof(typename Config::Out));
    cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(p.n), static_cast<cuuint64_t>(p.m),
                                 static_cast<cuuint64_t>(p.num_groups)};
    cuuint64_t const strides[2] = {static_cast<cuuint64_t>(row_bytes),
                                   static_cast<cuuint64_t>(row_bytes * p.m)};
    cuuint32_t const box[3] = {Config::kSliceColumns, 16, 1};
    return encode(map, kOutType, 3, p.epilogue.d, sizes, strides, box);
  }

  /// Launches as many CTAs as run at a time, or one for each tile if these are fewer; a persistent CTA
  /// computes tile after tile.
  static fp4gemm_status_t launch(char const* name, Problem const& p, fp4gemm_stream_t stream) {
    int64_t const row_tiles = cute::ceil_div(p.m, int64_t{Config::kRows * Config::kCluster});
    int64_t const column_tiles = cute::ceil_div(p.n, int64_t{Config::kColumns});
    int const most_ctas = std::max(1, p.num_sms * Config::kCtasPerSm / Config::kCluster) * Config::kCluster;
    // The kernel keeps tile numbers, up to one more for each CTA, and coordinates in 32 bits.
    int64_t const most_tiles = (INT32_MAX - most_ctas) / p.num_groups;
    if (row_tiles * column_tiles > most_tiles || p.n > INT32_MAX - Config::kColumns ||
        p.m > INT32_MAX - Config::kRows * Config::kCluster) {
      return fail(
          FP4GEMM_ERROR_NOT_SUPPORTED,
          "kernel: %s supports up to %lld tiles of a group with %d groups, m %lld and n %lld need %lld", name,
          static_cast<long long>(most_tiles), p.num_groups, static_cast<long long>(p.m),
          static_cast<long long>(p.n), static_cast<long long>(row_tiles * column_tiles));
    }
    Params params{};
    if (CUresult const result = describe_operand(p, p.a, p.m, Config::kRows, &params.a);
        result != CUDA_SUCCESS) {
      return fail(FP4GEMM_ERROR_CUDA,
                  "a: the driver refused a tensor map of (%lld, %lld) at %p (CUresult %d)",
                  static_cast<long long>(p.m), static_cast<long long>(p.k), p.a, static_cast<int>(result));
    }
    if (CUresult const result = describe_operand(p, p.b, p.n, Config::kLoadColumns, &params.b);
        result != CUDA_SUCCESS) {
      return fail(FP4GEMM_ERROR_CUDA,
                  "b: the driver refused a tensor map of (%lld, %lld) at %p (CUresult %d)",
                  static_cast<long long>(p.n), static_cast<long long>(p.k), p.b, static_cast<int>(result));
    }
    if (CUresult const result = describe_d(p, &params.d); result != CUDA_SUCCESS) {
      return fail(FP4GEMM_ERROR_CUDA,
                  "d: the driver refused a tensor map of (%d, %lld, %lld) with rows of %lld elements at %p "
                  "(CUresult %d)",
                  p.num_groups, static_cast<long long>(p.m), static_cast<long long>(p.n),
                  static_cast<long long>(p.epilogue.d_row_stride), p.epilogue.d, static_cast<int>(result));
    }
    params.m = static_cast<int>(p.m);
    params.n = static_cast<int>(p.n);
    params.num_groups = p.num_groups;
    params.offs = p.offs;
    params.room = p.k / Config::kDepth;
    params.tiles_each = cutlass::FastDivmod(static_cast<int>(row_tiles * column_tiles));
    params.row_tiles = cutlass::FastDivmod(static_cast<int>(row_tiles));
    params.tiles = params.tiles_each.divisor * p.num_groups;
    params.epilogue = p.epilogue;

    int64_t const grid = std::min(int64_t{most_ctas}, int64_t{params.tiles} * Config::kCluster);
    auto* const kernel = cutlass_evt::sm90_ragged_k_gemm<Config>;
    static std::atomic<uint64_t> prepared{0};
    FP4GEMM_TRY(allow_shared_memory(kernel, Config::kSharedBytes, p.device, prepared));
    FP4GEMM_CUDA(launch_waiting(
        kernel,
        {static_cast<unsigned>(grid), Config::kThreads, Config::kSharedBytes, dim3(Config::kCluster, 1, 1)},
        /*overlaps=*/true, stream, params));
    return FP4GEMM_SUCCESS;
  }
};

}  // namespace

template <class Out, int kRows, int kColumns, int kCluster>
fp4gemm_status_t launch_ragged_k(char const* name, Problem const& p, fp4gemm_stream_t stream) {
  using Op = cutlass_evt::epilogue::RowCol<Out>;
  using Config = cutlass_evt::Sm90RaggedKConfig<Op, kRows, kColumns, kCluster>;
  return RaggedKLaunch<Config>::launch(name, p, stream);
}

template fp4gemm_status_t launch_ragged_k<cutlass::bfloat16_t, 128, 256, 2>(char const*, Problem const&,
                                                                            fp4gemm_stream_t);
template fp4gemm_status_t launch_ragged_k<cutlass::bfloat16_t, 64, 128, 1>(char const*, Problem const&,
                                                                           fp4gemm_stream_t);
template fp4gemm_status_t launch_ragged_k<cutlass::half_t, 128, 256, 2>(char const*, Problem const&,
                                                                        fp4gemm_stream_t);
template fp4gemm_status_t launch_ragged_k<cutlass::half_t, 64, 128, 1>(char const*, Problem const&,
                                                                       fp4gemm_stream_t);
template fp4gemm_status_t launch_ragged_k<float, 128, 256, 2>(char const*, Problem const&, fp4gemm_stream_t);
template fp4gemm_status_t launch_ragged_k<float, 64, 128, 1>(char const*, Problem const&, fp4gemm_stream_t);

}  // namespace fp4gemm::sm90
