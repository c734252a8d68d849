// The SM90 kernels of two fp16 operands, dense and grouped. One kernel serves every epilogue and output type,
// so that each has several rows in the kernel table.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <type_traits>
#include <utility>

#include "cutlass_evt/kernel/sm90_gemm.hpp"
#include "cutlass_evt/tensor_map.hpp"
#include "error.hpp"
#include "kernel_row.hpp"
#include "launch.hpp"
#include "sm90/arch.hpp"

namespace fp4gemm {
namespace sm90 {

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

}  // namespace sm90

namespace {

using namespace sm90;
using cutlass_evt::OutputType;
using cutlass_evt::Sm90RaggedKSchedule;
using cutlass_evt::Sm90RaggedMSchedule;

/// The launch of the kernel for one tile and schedule. TMA loads A and B and stores D; the host encodes its
/// maps, which are parameters of the kernel. The kernel reads the ends of groups, and needs no workspace.
template <class Tile, template <class> class Schedule>
struct Launch {
  using Config = cutlass_evt::Sm90GemmConfig<cutlass::half_t, Tile>;
  using Params = cutlass_evt::Sm90GemmParams;
  static constexpr bool kRaggedK = std::is_same<Schedule<Config>, Sm90RaggedKSchedule<Config>>::value;

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

  /// The map of D: (columns, m, planes), with boxes of one slice.
  static CUresult describe_d(Problem const& p, int columns, int planes, CUtensorMap* map) {
    OutputType const output = p.epilogue.output;
    int const bytes = output == OutputType::kFp32 ? 4 : 2;
    int64_t const row_bytes = p.epilogue.d_row_stride * bytes;
    cuuint64_t const sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(p.m),
                                 static_cast<cuuint64_t>(planes)};
    cuuint64_t const strides[2] = {static_cast<cuuint64_t>(row_bytes),
                                   static_cast<cuuint64_t>(row_bytes * p.m)};
    cuuint32_t const box[3] = {static_cast<cuuint32_t>(Config::kSliceRowBytes / bytes), 16, 1};
    CUtensorMapDataType const type = output == OutputType::kFp32   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                     : output == OutputType::kFp16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                   : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    return encode(map, type, 3, p.epilogue.d, sizes, strides, box,
                  Config::kSliceRowBytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B);
  }

  /// Launches as many CTAs as run at a time, or one for each tile if these are fewer; a persistent CTA
  /// computes tile after tile. `name` is that of the row in the table, for errors.
  static fp4gemm_status_t launch(char const* name, Problem const& p, fp4gemm_stream_t stream) {
    constexpr int kClusterRows = Config::kRows * Config::kCluster;
    int const groups = std::max(1, p.num_groups);
    int const planes = kRaggedK ? groups : 1;
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
    Params params{};
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
    params.columns_of_d = static_cast<int>(is_gated(p.epilogue.activation) ? p.n / 2 : p.n);
    if (CUresult const result = describe_d(p, params.columns_of_d, planes, &params.d);
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
    params.row_tiles = static_cast<int>(row_tiles);
    params.column_tiles = static_cast<int>(column_tiles);
    params.epilogue = p.epilogue;

    int64_t const grid =
        std::min(int64_t{most_ctas}, (row_tiles + extra) * column_tiles * planes * Config::kCluster);
    auto* const kernel = cutlass_evt::sm90_gemm<Config, Schedule<Config>>;
    static std::atomic<uint64_t> prepared{0};
    FP4GEMM_TRY(allow_shared_memory(kernel, Config::kSharedBytes, p.device, prepared));
    FP4GEMM_CUDA(launch_waiting(
        kernel,
        {static_cast<unsigned>(grid), Config::kThreads, Config::kSharedBytes, dim3(Config::kCluster, 1, 1)},
        /*overlaps=*/true, stream, params));
    return FP4GEMM_SUCCESS;
  }
};

/// One row of the table. A grouped row is launched with TileM for groups that are ragged in m and with TileK,
/// of the same size, for groups that are ragged in k; a dense row has one tile.
template <bool kIsGrouped, bool kIsGated, class Out, class TileM, class TileK = TileM>
struct Impl {
  using LaunchM = Launch<TileM, Sm90RaggedMSchedule>;
  using Config = typename LaunchM::Config;
  static constexpr KernelTraits kTraits{sm90::kArch,
                                        kIsGrouped,
                                        false,
                                        kIsGated,
                                        Config::kRows,
                                        Config::kColumns,
                                        Config::kDepth,
                                        Config::kCluster,
                                        1,
                                        kIsGated ? "gated" : "rowcol",
                                        OutType<Out>::kId,
                                        OutType<Out>::kName,
                                        Operands::kFp16};
  static constexpr NameBuilder kName = kTraits.name();
  static_assert(TileM::kRows == TileK::kRows && TileM::kColumns == TileK::kColumns &&
                    TileM::kCluster == TileK::kCluster,
                "the row has one name");

  static size_t workspace_bytes(Problem const&) { return 0; }

  static fp4gemm_status_t launch(Problem const& p, void*, fp4gemm_stream_t stream) {
    if constexpr (kIsGrouped && !kIsGated) {
      if (p.ragged == FP4GEMM_RAGGED_K) {
        return Launch<TileK, Sm90RaggedKSchedule>::launch(kName.text, p, stream);
      }
    }
    return LaunchM::launch(kName.text, p, stream);
  }
};

constexpr int kRowsPerTile = 5;

/// The rows of one tile. TileKFp32 is TileK of the row with fp32 results.
template <bool kIsGrouped, class TileM, class TileK = TileM, class TileKFp32 = TileK>
constexpr std::array<Kernel, kRowsPerTile> rows() {
  using bf16 = cutlass::bfloat16_t;
  using fp16 = cutlass::half_t;
  return {make_row<Impl<kIsGrouped, false, bf16, TileM, TileK>>(),
          make_row<Impl<kIsGrouped, false, fp16, TileM, TileK>>(),
          make_row<Impl<kIsGrouped, false, float, TileM, TileKFp32>>(),
          make_row<Impl<kIsGrouped, true, bf16, TileM>>(), make_row<Impl<kIsGrouped, true, fp16, TileM>>()};
}

// 64x128 comes before 128x128: where both have the same estimate the first is taken, and the smaller tile has
// more CTAs, which load more at a time.
constexpr std::array<Kernel, kRowsPerTile> kTiles[] = {
    rows<false, Tile128x256>(),
    rows<false, Tile64x128>(),
    rows<false, Tile128x128>(),
    // With fp32 results, groups that are ragged in k are 1 to 8 % faster with Tile128x256 than with
    // StoringTile128x256.
    rows<true, Tile128x256, StoringTile128x256, Tile128x256>(),
    rows<true, Tile64x128Twice, StoringTile64x128>(),
};

constexpr auto table() {
  std::array<Kernel, kRowsPerTile * std::size(kTiles)> table{};
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = kTiles[i / kRowsPerTile][i % kRowsPerTile];
  }
  return table;
}
constexpr auto kTable = table();

}  // namespace

KernelList const sm90::lists::gemm = make_list(kTable);

}  // namespace fp4gemm
