// The SM90 kernels of two fp16 operands, dense and grouped. One kernel serves every epilogue and output type,
// so that each has several rows in the kernel table.
#include <array>
#include <iterator>

#include "kernel_row.hpp"
#include "sm90/arch.hpp"
#include "sm90/gemm_launch.cuh"

namespace fp4gemm {
namespace {

using namespace sm90;

/// One row of the table. A grouped row is launched with TileM for groups that are ragged in m and with TileK,
/// of the same size, for groups that are ragged in k; a dense row has one tile.
template <bool kIsGrouped, bool kIsGated, class Out, class TileM, class TileK = TileM>
struct Impl {
  using LaunchM = GemmLaunch<TileM, Sm90RaggedMSchedule>;
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
        return GemmLaunch<TileK, Sm90RaggedKSchedule>::launch(kName.text, p, stream);
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
