// The SM90 kernels whose epilogue is compiled at run time: their sources, and their launches. This unit
// compiles no kernel.
#include <array>

#include "sm90/gemm_launch.cuh"
#include "sm90/prepacked.cuh"
#include "sm90/tiles_fp8.hpp"

namespace fp4gemm {
namespace sm90 {
namespace {

/// The rows of the kernel table that an entry stands for.
enum class Mode { kDense, kGrouped, kBoth };

/// A configuration, and what it has in common with the rows of the kernel table that it stands for. No two
/// entries have the same source: a caller that has compiled a source has the kernel of one entry.
struct Entry {
  Operands operands;
  Mode mode;
  fp4gemm_ragged_t ragged;  // of groups of fp16 operands
  int tile_m, tile_n, tile_k;
  bool fast_accum;
  int shared_bytes;
  void (*write_source)(SourceText& to);
  decltype(GeneratedKernels::launch) launch;
};

template <class Tile, template <class> class Schedule>
constexpr Entry of_fp16(Mode mode) {
  using Launch = GemmLaunch<Tile, Schedule>;
  using Config = typename Launch::Config;
  return {Operands::kFp16,
          mode,
          Launch::kRaggedK ? FP4GEMM_RAGGED_K : FP4GEMM_RAGGED_M,
          Config::kRows,
          Config::kColumns,
          Config::kDepth,
          false,
          Config::kSharedBytes,
          &Launch::write_source,
          &Launch::launch_generated};
}

constexpr char const* element_name(Operands operands) {
  return operands == Operands::kPrepackedBf16  ? "cutlass::bfloat16_t"
         : operands == Operands::kPrepackedFp8 ? "cutlass::float_e4m3_t"
                                               : "cutlass::half_t";
}

template <class Tile>
void write_prepacked_source(SourceText& to) {
  using Config = ConfigOf<Tile>;
  using Launch = PrepackedLaunch<PrepackedFamily, Config>;
  using Params =
      cutlass_evt::MixedInputParams<typename Launch::GeneratedEpilogue, cutlass_evt::MixedInputNoQuantizer>;
  to.append(
      "#include \"cutlass_evt/kernel/sm90_nvfp4.hpp\"\n"
      "#include \"cutlass_evt/kernel/mixed_input_generated.hpp\"\n"
      "namespace {\n"
      "using Config = cutlass_evt::Sm90Nvfp4Config<%s, %d, %d, %d, %d, %d, %d, %d>;\n"
      "using Kernel =\n"
      "    cutlass_evt::MixedInputKernel<Config, cutlass_evt::epilogue::GeneratedColumnsEpilogue<Types>>;\n"
      "static_assert(sizeof(Kernel::Params) == %d && Config::kSharedBytes == %d, \"of another library\");\n"
      "}  // namespace\n",
      element_name(Launch::kOperands), Config::kRowGroups, Config::kDepthGroups, Config::kTokens,
      Config::kCluster, Config::kChunks, Config::kCtasPerSm, kPartTokensOf<Tile>,
      static_cast<int>(sizeof(Params)), Config::kSharedBytes);
}

template <class Tile>
constexpr Entry of_prepacked() {
  using Config = ConfigOf<Tile>;
  using Launch = PrepackedLaunch<PrepackedFamily, Config>;
  return {Launch::kOperands,
          Mode::kBoth,
          FP4GEMM_RAGGED_M,
          Tile::kTokens,
          Tile::kRows,
          Tile::kDepth,
          Launch::kOperands == Operands::kPrepackedFp8 && !Config::kPromotes,
          Config::kSharedLimit,
          &write_prepacked_source<Tile>,
          &Launch::launch_generated};
}

template <class... Tiles>
constexpr std::array<Entry, sizeof...(Tiles)> of_list(TileList<Tiles...>) {
  return {of_prepacked<Tiles>()...};
}

// All tiles of the table but that of 80 tokens, for which CuTe would have to be compiled with all shapes of
// wgmma, and the kernel of packed codes.
using GeneratedWideTiles =
    TileList<Tile64x128x256, Tile96x128x128, Tile128x128x128, Tile128x192x128, Tile256x128x64>;

template <size_t... Counts>
constexpr auto concatenated(std::array<Entry, Counts> const&... lists) {
  std::array<Entry, (Counts + ...)> all{};
  size_t at = 0;
  auto const add = [&](auto const& list) {
    for (Entry const& entry : list) {
      all[at++] = entry;
    }
  };
  (add(lists), ...);
  return all;
}

using cutlass_evt::Sm90RaggedKSchedule;
using cutlass_evt::Sm90RaggedMSchedule;

constexpr auto kEntries =
    concatenated(std::array<Entry, 6>{of_fp16<Tile128x256, Sm90RaggedMSchedule>(Mode::kBoth),
                                      of_fp16<Tile64x128, Sm90RaggedMSchedule>(Mode::kDense),
                                      of_fp16<Tile128x128, Sm90RaggedMSchedule>(Mode::kDense),
                                      of_fp16<Tile64x128Twice, Sm90RaggedMSchedule>(Mode::kGrouped),
                                      of_fp16<StoringTile128x256, Sm90RaggedKSchedule>(Mode::kGrouped),
                                      of_fp16<StoringTile64x128, Sm90RaggedKSchedule>(Mode::kGrouped)},
                 of_list(NarrowTiles{}), of_list(GeneratedWideTiles{}), of_list(Bf16Tiles{}),
                 of_list(Fp8Tiles{}), of_list(Fp8FastTiles{}));

bool serves(Entry const& entry, bool is_grouped, fp4gemm_ragged_t ragged) {
  if (entry.operands != Operands::kFp16) {
    return true;
  }
  if (is_grouped) {
    return entry.mode != Mode::kDense && entry.ragged == ragged;
  }
  return entry.mode != Mode::kGrouped;
}

int tile_of(Kernel const& kernel, fp4gemm_ragged_t ragged) {
  for (size_t i = 0; i < kEntries.size(); ++i) {
    Entry const& entry = kEntries[i];
    fp4gemm_kernel_info_t const& info = kernel.info;
    if (entry.operands == kernel.operands && entry.tile_m == info.tile_m && entry.tile_n == info.tile_n &&
        entry.tile_k == info.tile_k && entry.fast_accum == (info.fast_accum != 0) &&
        serves(entry, kernel.is_grouped, ragged)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

void write_source(int tile, SourceText& to) { kEntries[static_cast<size_t>(tile)].write_source(to); }
int shared_bytes(int tile) { return kEntries[static_cast<size_t>(tile)].shared_bytes; }

fp4gemm_status_t launch(GeneratedKernel const& kernel, char const* name, GeneratedProblem const& problem,
                        void* workspace, fp4gemm_stream_t stream) {
  return kEntries[static_cast<size_t>(kernel.form.tile)].launch(kernel, name, problem, workspace, stream);
}

}  // namespace

GeneratedKernels const generated_kernels{&tile_of, &write_source, &shared_bytes, &launch};

}  // namespace sm90
}  // namespace fp4gemm
