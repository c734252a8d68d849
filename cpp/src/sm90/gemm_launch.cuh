// The SM90 kernel of two fp16 operands on the host: its tiles, and the launch.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "check.hpp"
#include "cutlass_evt/kernel/sm90_gemm.hpp"
#include "cutlass_evt/kernel/sm90_gemm_generated_params.hpp"
#include "cutlass_evt/tensor_map.hpp"
#include "error.hpp"
#include "generated.hpp"
#include "launch.hpp"

namespace fp4gemm::sm90 {

// The tiles, with the members that Sm90GemmConfig names. The figures are those that were fastest on an H200
// (2026-11-26) of a few that fit.

struct Tile128x256 {
  static constexpr int kRows = 128, kColumns = 256, kCluster = 2, kCtasPerSm = 1;
  static constexpr int kStages = 4, kSliceRowBytes = 64, kSlots = 3;
};

struct Tile128x128 {
  static constexpr int kRows = 128, kColumns = 128, kCluster = 2, kCtasPerSm = 1;
  static constexpr int kStages = 6, kSliceRowBytes = 64, kSlots = 3;
};

// For dense products of few rows, which may have fewer tiles than there are SMs: then the bytes that each CTA
// has requested at a time bound the product.
struct Tile64x128 {
  static constexpr int kRows = 64, kColumns = 128, kCluster = 1, kCtasPerSm = 1;
  static constexpr int kStages = 8, kSliceRowBytes = 64, kSlots = 3;
};

// For groups that are ragged in m. Groups of few rows have many tiles: a second CTA on the SM multiplies
// while the first one stores.
struct Tile64x128Twice {
  static constexpr int kRows = 64, kColumns = 128, kCluster = 1, kCtasPerSm = 2;
  static constexpr int kStages = 4, kSliceRowBytes = 64, kSlots = 3;
};

// For groups that are ragged in k, which are bound by storing D if k is small: slices of 128 bytes are whole
// lines of the L2 cache.
struct StoringTile128x256 {
  static constexpr int kRows = 128, kColumns = 256, kCluster = 2, kCtasPerSm = 1;
  static constexpr int kStages = 3, kSliceRowBytes = 128, kSlots = 4;
};

struct StoringTile64x128 {
  static constexpr int kRows = 64, kColumns = 128, kCluster = 1, kCtasPerSm = 2;
  static constexpr int kStages = 3, kSliceRowBytes = 128, kSlots = 3;
};

using cutlass_evt::OutputType;
using cutlass_evt::Sm90RaggedKSchedule;
using cutlass_evt::Sm90RaggedMSchedule;

/// The launch of the kernel for one tile and schedule. TMA loads A and B and stores D; the host encodes its
/// maps, which are parameters of the kernel. The kernel reads the ends of groups, and needs no workspace.
template <class Tile, template <class> class Schedule>
struct GemmLaunch {
  using Config = cutlass_evt::Sm90GemmConfig<cutlass::half_t, Tile>;
  using Params = cutlass_evt::Sm90GemmParams;
  static constexpr bool kRaggedK = std::is_same<Schedule<Config>, Sm90RaggedKSchedule<Config>>::value;
  static_assert(Rules::group_columns(FP4GEMM_FORMAT_NVFP4) % Config::kDepth == 0 &&
                    Rules::group_columns(FP4GEMM_FORMAT_MXFP8) % Config::kDepth == 0,
                "groups that are ragged in k begin at whole steps");

  static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void const* address,
                         cuuint64_t const* sizes, cuuint64_t const* strides, cuuint32_t const* box,
                         CUtensorMapSwizzle swizzle) {
    cuuint32_t const steps[3] = {1, 1, 1};
    return cutlass_evt::encode_tensor_map(map, type, rank, const_cast<void*>(address), sizes, strides, box,
                                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }

  /// The map of A or B: (k, rows, matrices), with boxes of kDepth by box_rows; that of A, with 0 matrices,
  /// has two dimensions.
  static CUresult describe_operand(Problem const& p, void const* data, int64_t rows, int matrices,
                                   int box_rows, CUtensorMap* map) {
    // Without columns, all groups are empty and nothing is loaded; a map needs an address and a size still.
    bool const has_columns = p.k > 0;
    cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(has_columns ? p.k : Config::kDepth),
                                 static_cast<cuuint64_t>(has_columns ? rows : 1),
                                 static_cast<cuuint64_t>(std::max(1, matrices))};
    cuuint64_t const row_bytes = sizes[0] * sizeof(typename Config::Element);
    cuuint64_t const strides[2] = {row_bytes, row_bytes * sizes[1]};
    cuuint32_t const box[3] = {Config::kDepth, static_cast<cuuint32_t>(box_rows), 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, matrices == 0 ? 2 : 3,
                  has_columns ? data : p.epilogue.d, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
  }

  /// The map of D, or of another output: (columns, m, planes), with boxes of one slice.
  static CUresult describe_output(void* data, int64_t row_stride, OutputType output, int columns, int64_t m,
                                  int planes, CUtensorMap* map) {
    int const bytes = output == OutputType::kFp32 ? 4 : 2;
    int64_t const row_bytes = row_stride * bytes;
    cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(m),
                                 static_cast<cuuint64_t>(planes)};
    cuuint64_t const strides[2] = {static_cast<cuuint64_t>(row_bytes),
                                   static_cast<cuuint64_t>(row_bytes * m)};
    cuuint32_t const box[3] = {static_cast<cuuint32_t>(Config::kSliceRowBytes / bytes), 16, 1};
    CUtensorMapDataType const type = output == OutputType::kFp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : output == OutputType::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode(map, type, 3, data, sizes, strides, box,
                  Config::kSliceRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
  }

  static int planes_of(Problem const& p) { return kRaggedK ? std::max(1, p.num_groups) : 1; }

  /// Makes the parameters of a launch of as many CTAs as run at a time, or of one for each tile if these are
  /// fewer; a persistent CTA computes tile after tile. `name` is that of the row in the table, for errors.
  static fp4gemm_status_t prepare(char const* name, Problem const& p, int columns_of_d, Params& params,
                                  int* grid) {
    constexpr int kClusterRows = Config::kRows * Config::kCluster;
    int const groups = std::max(1, p.num_groups);
    int const planes = planes_of(p);
    int const matrices = kRaggedK ? 1 : groups;
    int64_t const row_tiles = cute::ceil_div(p.m, int64_t{kClusterRows});
    int64_t const column_tiles = cute::ceil_div(p.n, int64_t{Config::kColumns});
    // A group that is ragged in m may end within a tile: all groups together have at most one row of tiles
    // for each group but one more than m rows fill.
    int64_t const extra = kRaggedK ? 0 : std::min(int64_t{groups - 1}, p.m);
    int const most_ctas = std::max(1, p.num_sms * Config::kCtasPerSm / Config::kCluster) * Config::kCluster;
    // The kernel keeps the numbers of the tiles of a plane and coordinates in 32 bits.
    int64_t const most_tiles = (INT32_MAX - most_ctas) / planes;
    if (p.n > INT32_MAX - Config::kColumns || p.m > INT32_MAX - kClusterRows) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s does not support m %lld with n %lld", name,
                  static_cast<long long>(p.m), static_cast<long long>(p.n));
    }
    if ((row_tiles + extra) * column_tiles > most_tiles) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                  "kernel: %s supports up to %lld tiles with %d groups, m %lld and n %lld need %lld", name,
                  static_cast<long long>(most_tiles), p.num_groups, static_cast<long long>(p.m),
                  static_cast<long long>(p.n), static_cast<long long>((row_tiles + extra) * column_tiles));
    }
    for (auto const& [map, rows] :
         {std::pair{&params.a, Config::kRows}, std::pair{&params.few_a, Config::kFewRows}}) {
      if (CUresult const result = describe_operand(p, p.a, p.m, 0, rows, map); result != CUDA_SUCCESS) {
        return fail(FP4GEMM_ERROR_CUDA,
                    "a: the driver refused a tensor map of (%lld, %lld) at %p (CUresult %d)",
                    static_cast<long long>(p.m), static_cast<long long>(p.k), p.a, static_cast<int>(result));
      }
    }
    if (CUresult const result = describe_operand(p, p.b, p.n, matrices, Config::kLoadColumns, &params.b);
        result != CUDA_SUCCESS) {
      return fail(FP4GEMM_ERROR_CUDA,
                  "b: the driver refused a tensor map of (%d, %lld, %lld) at %p (CUresult %d)", matrices,
                  static_cast<long long>(p.n), static_cast<long long>(p.k), p.b, static_cast<int>(result));
    }
    params.columns_of_d = columns_of_d;
    if (CUresult const result = describe_output(p.epilogue.d, p.epilogue.d_row_stride, p.epilogue.output,
                                                columns_of_d, p.m, planes, &params.d);
        result != CUDA_SUCCESS) {
      return fail(FP4GEMM_ERROR_CUDA,
                  "d: the driver refused a tensor map of (%d, %lld, %d) with rows of %lld elements at %p "
                  "(CUresult %d)",
                  planes, static_cast<long long>(p.m), params.columns_of_d,
                  static_cast<long long>(p.epilogue.d_row_stride), p.epilogue.d, static_cast<int>(result));
    }
    params.m = static_cast<int>(p.m);
    params.n = static_cast<int>(p.n);
    params.num_groups = groups;
    params.offs = p.num_groups == 0 ? nullptr : p.offs;
    params.steps = static_cast<int>(cute::ceil_div(p.k, int64_t{Config::kDepth}));
    params.group_steps = p.group_columns / Config::kDepth;
    params.row_tiles = static_cast<int>(row_tiles);
    params.column_tiles = static_cast<int>(column_tiles);
    params.epilogue = p.epilogue;

    *grid = static_cast<int>(
        std::min(int64_t{most_ctas}, (row_tiles + extra) * column_tiles * planes * Config::kCluster));
    return FP4GEMM_SUCCESS;
  }

  static fp4gemm_status_t launch(char const* name, Problem const& p, fp4gemm_stream_t stream) {
    Params params{};
    int grid = 0;
    int const columns_of_d = static_cast<int>(is_gated(p.epilogue.activation) ? p.n / 2 : p.n);
    FP4GEMM_TRY(prepare(name, p, columns_of_d, params, &grid));
    auto* const kernel = cutlass_evt::sm90_gemm<Config, Schedule<Config>>;
    static std::atomic<uint64_t> prepared{0};
    FP4GEMM_TRY(allow_shared_memory(kernel, Config::kSharedBytes, p.device, prepared));
    FP4GEMM_CUDA(launch_waiting(
        kernel,
        {static_cast<unsigned>(grid), Config::kThreads, Config::kSharedBytes, dim3(Config::kCluster, 1, 1)},
        /*overlaps=*/true, stream, params));
    return FP4GEMM_SUCCESS;
  }

  // ---- with a formula that is compiled at run time ----

  static fp4gemm_status_t launch_generated(GeneratedKernel const& kernel, char const* name,
                                           GeneratedProblem const& problem, void*, fp4gemm_stream_t stream) {
    Problem const& p = problem.problem;
    cutlass_evt::Sm90GemmGeneratedParams params{};
    int grid = 0;
    FP4GEMM_TRY(prepare(name, p, problem.columns_of_d, params, &grid));
    params.inputs = problem.inputs;
    for (int i = 0; i < problem.num_aux; ++i) {
      cutlass_evt::GeneratedMatrix const& aux = problem.inputs.aux[i];
      if (CUresult const result = describe_output(aux.data, aux.row_stride, problem.types.aux[i],
                                                  problem.columns_of_d, p.m, planes_of(p), &params.aux[i]);
          result != CUDA_SUCCESS) {
        return fail(FP4GEMM_ERROR_CUDA,
                    "generated.aux: the driver refused a tensor map of (%d, %lld, %d) with rows of %lld "
                    "elements at %p (CUresult %d)",
                    planes_of(p), static_cast<long long>(p.m), problem.columns_of_d,
                    static_cast<long long>(aux.row_stride), aux.data, static_cast<int>(result));
      }
    }
    return fp4gemm::launch_generated(
        kernel, {grid, Config::kThreads, Config::kSharedBytes, Config::kCluster, &params}, stream);
  }

  static void write_source(SourceText& to) {
    to.append(
        "#include \"cutlass_evt/kernel/sm90_gemm.hpp\"\n"
        "#include \"cutlass_evt/kernel/sm90_gemm_generated.hpp\"\n"
        "namespace {\n"
        "struct Tile {\n"
        "  static constexpr int kRows = %d, kColumns = %d, kCluster = %d, kCtasPerSm = %d;\n"
        "  static constexpr int kStages = %d, kSliceRowBytes = %d, kSlots = %d;\n"
        "};\n"
        "using Config = cutlass_evt::Sm90GemmConfig<cutlass::half_t, Tile>;\n"
        "using Kernel = cutlass_evt::Sm90GemmKernel<Config, cutlass_evt::%s<Config>,\n"
        "                                           cutlass_evt::Sm90GemmGeneratedEpilogue<Config, Types>>;\n"
        "static_assert(sizeof(Kernel::Params) == %d && Config::kSharedBytes == %d, \"of another library\");\n"
        "}  // namespace\n",
        Tile::kRows, Tile::kColumns, Tile::kCluster, Tile::kCtasPerSm, Tile::kStages, Tile::kSliceRowBytes,
        Tile::kSlots, kRaggedK ? "Sm90RaggedKSchedule" : "Sm90RaggedMSchedule",
        static_cast<int>(sizeof(cutlass_evt::Sm90GemmGeneratedParams)), Config::kSharedBytes);
  }
};

}  // namespace fp4gemm::sm90
