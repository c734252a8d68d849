// The table rows of the kernels on prepacked weights, which SM90 and SM120 have. One compiled kernel serves
// dense and grouped GEMMs, every output type and the gated epilogue; each combination has a row and a name of
// its own.
//
// Family is the architecture, a type with these members:
//   kArch                  10 * major + minor
//   Config<Tile>           the kernel's configuration of a tile, a cutlass_evt::MixedInputConfig
//   kCanQuantize<Tile>     whether there is a kernel too that quantizes A itself: QuantizingConfig<Tile> with
//                          the Quantizer
//   figures<Tile>()        Kernel::figures
//   entry<..>()            the __global__ function of a configuration, an epilogue and a quantizer
#pragma once

#include <array>
#include <atomic>

#include "cutlass_evt/epilogue/columns.hpp"
#include "cutlass_evt/kernel/mixed_input.hpp"
#include "cutlass_evt/tensor_map.hpp"
#include "error.hpp"
#include "generated.hpp"
#include "kernel_activation.hpp"
#include "kernel_row.hpp"
#include "launch.hpp"
#include "nonce.hpp"
#include "tile_list.hpp"

namespace fp4gemm {

/// The launch, which all rows of one configuration share. Config is a cutlass_evt::MixedInputConfig, or with
/// a Quantizer a cutlass_evt::MixedInputQuantizingConfig. Tokens are the rows of A; the rows of the kernel's
/// tiles are those of B.
template <class Family, class Config, class Quantizer = cutlass_evt::MixedInputNoQuantizer>
struct PrepackedLaunch {
  using Epilogue = cutlass_evt::epilogue::ColumnsEpilogue;
  /// What the parameters of a kernel with a formula depend on; the formula is compiled at run time.
  struct GeneratedEpilogue {
    using Arguments = cutlass_evt::GeneratedArguments;
  };
  using Kernel = cutlass_evt::MixedInputKernel<Config, Epilogue, Quantizer>;
  using Params = typename Kernel::Params;
  using Element = typename Config::Element;
  using Packing = typename Config::Packing;

  /// What the kernel reads, and the type of the tokens in its tensor map.
  static constexpr Operands kOperands =
      std::is_same<Element, cutlass::bfloat16_t>::value     ? Operands::kPrepackedBf16
      : std::is_same<Element, cutlass::float_e4m3_t>::value ? Operands::kPrepackedFp8
                                                            : Operands::kPrepacked;
  static constexpr CUtensorMapDataType kTokenType =
      kOperands == Operands::kPrepackedBf16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
      : kOperands == Operands::kPrepackedFp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                             : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;

  /// CTA tiles along the rows of B.
  static int64_t row_tiles(Problem const& p) { return cute::ceil_div(p.n, int64_t{Config::kRows}); }

  /// Tiles along the tokens: of groups, the most that there can be, since their sizes are on the device.
  static int64_t token_tiles(Problem const& p) {
    return cutlass_evt::most_token_tiles(p.m, p.num_groups, Config::kTokens);
  }

  /// The grid of the persistent kernel: as many CTAs as run at a time, in whole clusters. The cost model has
  /// the same rule (cost.cpp).
  static int num_ctas(Problem const& p) {
    int const an_sm = cutlass_evt::ctas_on_an_sm(row_tiles(p), token_tiles(p), p.num_sms, Config::kCtasPerSm);
    return p.num_sms * an_sm / Config::kCluster * Config::kCluster;
  }

  static size_t workspace_bytes(Problem const& p) { return Kernel::workspace_bytes(num_ctas(p)); }

  /// Encodes the tensor map of the tokens, in the form that MixedInputOperands describes: (kDepth, m, k /
  /// kDepth) if k is a multiple of kDepth, so that one copy loads several chunks of k; otherwise (k, m).
  /// Returns false if the driver refuses.
  static bool describe_tokens(Problem const& p, CUtensorMap* map) {
    using Mainloop = typename Kernel::Mainloop;
    constexpr int kDepth = Packing::kDepth;
    constexpr cuuint64_t kBytes = sizeof(Element);
    bool const whole = p.k % kDepth == 0;
    auto const k = static_cast<cuuint64_t>(p.k);
    auto const m = static_cast<cuuint64_t>(p.m);
    cuuint64_t const sizes[3] = {whole ? kDepth : k, m, whole ? k / kDepth : 1};
    cuuint64_t const strides[2] = {kBytes * k, whole ? kBytes * kDepth : kBytes * k * m};  // bytes
    cuuint32_t const box[3] = {kDepth, Mainloop::kLoadTokens,
                               static_cast<cuuint32_t>(whole ? Mainloop::kLoadChunks : 1)};
    cuuint32_t const steps[3] = {1, 1, 1};
    return cutlass_evt::encode_tensor_map(map, kTokenType, 3, const_cast<void*>(p.a), sizes, strides, box,
                                          steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                          CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                          CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  }

  /// Makes the parameters of a launch, a MixedInputParams. The workspace has num_ctas(p) areas of partial
  /// sums, as many flags, and the counter of the dynamic scheduler; none needs initialisation
  /// (MixedInputPartials, MixedInputDynamicScheduler). `name` is that of the row in the table, for errors.
  template <class AnyParams>
  static fp4gemm_status_t prepare(char const* name, Problem const& p, void* workspace, AnyParams& params) {
    int const grid = num_ctas(p);
    // The kernel keeps column and token numbers, up to the end of the last tile, and tile numbers, up to one
    // more for each CTA, in 32 bits.
    if (p.n > INT32_MAX - Config::kRows * Config::kCluster || p.m > INT32_MAX - Config::kTokens ||
        row_tiles(p) * token_tiles(p) > INT32_MAX - grid) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s does not support m %lld with n %lld", name,
                  static_cast<long long>(p.m), static_cast<long long>(p.n));
    }
    params.weights = static_cast<uint8_t const*>(p.b);
    params.weight_bytes = Packing::bytes(p.n, p.k);
    params.weights_are_fresh = p.b_is_fresh;
    params.n = static_cast<int>(p.n);
    params.groups = {static_cast<int>(p.m), p.num_groups > 0 ? p.num_groups : 1, p.offs};
    params.operands = {static_cast<int>(Packing::row_chunks(p.n)),
                       static_cast<int>(Packing::depth_chunks(p.k)), p.k % Packing::kDepth == 0};
    auto const ceil_div = [](int64_t a, int64_t b) { return static_cast<int>(cute::ceil_div(a, b)); };
    params.row_tiles = cutlass::FastDivmod(ceil_div(p.n, Config::kRows * Config::kCluster));
    params.steps = cutlass::FastDivmod(ceil_div(params.operands.depth_chunks, Config::kChunks));
    // Which tiles are split along k depends on the number of tiles, and the order of the sums with it.
    params.splits = !p.batch_invariant;
    // The host knows the number of tiles of a dense GEMM; a grouped kernel makes its plan from the group
    // ends.
    int const tiles = p.offs == nullptr ? params.row_tiles.divisor * static_cast<int>(token_tiles(p)) : 0;
    params.plan = Kernel::plan(tiles, params.steps.divisor, grid, params.splits);
    params.sums = static_cast<char*>(workspace);
    params.flags = reinterpret_cast<uint64_t*>(params.sums + grid * Kernel::kPartialBytes);
    params.nonce = workspace_nonce();
    // The dynamic tile scheduler gives each CTA a number of its own, so it needs clusters of one CTA.
    params.dynamic = {p.offs != nullptr && Config::kCluster == 1 ? params.flags + grid : nullptr,
                      params.nonce};
    static_cast<cutlass_evt::EpilogueArguments&>(params.epilogue) = p.epilogue;

    if constexpr (Config::kQuantizes) {
      params.tokens = {};
      params.quantizer = Quantizer::arguments(p.a, p.a_row_stride, p.a_dtype == FP4GEMM_BF16, p.m, p.k);
    } else if (!describe_tokens(p, &params.tokens)) {
      return fail(FP4GEMM_ERROR_CUDA, "a: the driver refused a tensor map of (%lld, %lld) at %p",
                  static_cast<long long>(p.m), static_cast<long long>(p.k), p.a);
    }
    return FP4GEMM_SUCCESS;
  }

  static fp4gemm_status_t launch(char const* name, Problem const& p, void* workspace,
                                 fp4gemm_stream_t stream) {
    Params params;
    FP4GEMM_TRY(prepare(name, p, workspace, params));
    auto* const kernel = Family::template entry<Config, Epilogue, Quantizer>();
    static std::atomic<uint64_t> prepared{0};
    FP4GEMM_TRY(allow_shared_memory(kernel, Config::kSharedBytes, p.device, prepared));
    FP4GEMM_CUDA(launch_waiting(kernel,
                                {static_cast<unsigned>(num_ctas(p)), Config::kThreads, Config::kSharedBytes,
                                 dim3(Config::kCluster, 1, 1)},
                                /*overlaps=*/true, stream, params));
    return FP4GEMM_SUCCESS;
  }

  /// The same for a kernel with a formula that was compiled at run time. It has all the shared memory that a
  /// CTA may have: behind Config::kSharedBytes lie inputs of the formula.
  static fp4gemm_status_t launch_generated(GeneratedKernel const& kernel, char const* name,
                                           GeneratedProblem const& problem, void* workspace,
                                           fp4gemm_stream_t stream) {
    cutlass_evt::MixedInputParams<GeneratedEpilogue, Quantizer> params;
    FP4GEMM_TRY(prepare(name, problem.problem, workspace, params));
    params.epilogue.inputs = problem.inputs;
    return fp4gemm::launch_generated(
        kernel,
        {num_ctas(problem.problem), Config::kThreads, Config::kSharedLimit, Config::kCluster, &params},
        stream);
  }
};

/// One row of the table: a tile, the mode, the epilogue and the output type.
template <class Family, class Tile, bool kIsGrouped, bool kIsGated, class Out>
struct PrepackedImpl {
  using Config = typename Family::template Config<Tile>;
  using Launch = PrepackedLaunch<Family, Config>;
  static constexpr KernelTraits kTraits{Family::kArch,
                                        kIsGrouped,
                                        true,
                                        kIsGated,
                                        Tile::kTokens,
                                        Tile::kRows,
                                        Tile::kDepth,
                                        1,
                                        Config::kCluster,
                                        kIsGated ? "gated" : "rowcol",
                                        OutType<Out>::kId,
                                        OutType<Out>::kName,
                                        Launch::kOperands,
                                        Launch::kOperands == Operands::kPrepackedFp8 && !Config::kPromotes};
  static constexpr NameBuilder kName = kTraits.name();

  static size_t workspace_bytes(Problem const& p) { return Launch::workspace_bytes(p); }

  static fp4gemm_status_t launch(Problem const& p, void* workspace, fp4gemm_stream_t stream) {
    if constexpr (!kIsGrouped && Family::template kCanQuantize<Tile>) {
      using Quantizing = typename Family::template QuantizingConfig<Tile>;
      if (p.quantizes_a) {
        return PrepackedLaunch<Family, Quantizing, typename Family::Quantizer>::launch(kName.text, p,
                                                                                       workspace, stream);
      }
    }
    return Launch::launch(kName.text, p, workspace, stream);
  }
};

constexpr int kRowsPerTile = 10;

/// Every row of one tile.
template <class Family, class Tile>
constexpr std::array<Kernel, kRowsPerTile> prepacked_rows() {
  using bf16 = cutlass::bfloat16_t;
  using fp16 = cutlass::half_t;
  constexpr MeasuredFigures const* kFigures = Family::template figures<Tile>();
  return {make_row<PrepackedImpl<Family, Tile, false, false, bf16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, false, false, fp16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, false, false, float>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, false, true, bf16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, false, true, fp16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, true, false, bf16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, true, false, fp16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, true, false, float>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, true, true, bf16>>(kFigures),
          make_row<PrepackedImpl<Family, Tile, true, true, fp16>>(kFigures)};
}

/// The rows of every tile of a list.
template <class Family, class... Tiles>
constexpr auto prepacked_table(TileList<Tiles...>) {
  std::array<Kernel, kRowsPerTile> const rows[] = {prepacked_rows<Family, Tiles>()...};
  std::array<Kernel, kRowsPerTile * sizeof...(Tiles)> table{};
  for (size_t i = 0; i < table.size(); ++i) {
    table[i] = rows[i / kRowsPerTile][i % kRowsPerTile];
  }
  return table;
}

}  // namespace fp4gemm
