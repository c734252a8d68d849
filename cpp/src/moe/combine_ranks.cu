// Weighted sums of what the experts of several ranks computed: in the order of the slots, or as a tree over
// blocks of experts.
#include "error.hpp"
#include "moe/combine.cuh"
#include "moe/ranks.hpp"
#include "quantize/grid.hpp"
#include "quantize/quantize.hpp"

namespace fp4gemm {
namespace {

/// x rounded to T.
template <class T>
__device__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

struct RanksParams {
  int const* row_of_pair;
  SlotWeights weights;
  void* out;
  int64_t num_rows;  // of each buffer
  int num_buffers;
  int64_t d;
  int top_k;
  int ctas_per_token;
  void const* y[kMaxRanks];
};

/// combine_rows (combine.cu) of the rows of several buffers.
template <class T, class Out>
__global__ void __launch_bounds__(kCombineThreads) combine_rank_rows(__grid_constant__ RanksParams const p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  CombineTile const tile(p.ctas_per_token);
  if (tile.column >= p.d) {
    return;
  }
  float sums[kCombineStep] = {};
  add_slots<T>(sums, p.weights, tile.token, p.top_k, [&](int64_t slot) -> T const* {
    int64_t const number = p.row_of_pair[slot];
    if (number < 0 || number >= p.num_buffers * p.num_rows) {
      return nullptr;
    }
    auto const row = static_cast<unsigned>(number) % static_cast<unsigned>(p.num_rows);
    auto const buffer = static_cast<unsigned>(number) / static_cast<unsigned>(p.num_rows);
    return static_cast<T const*>(p.y[buffer]) + row * p.d + tile.column;
  });
  store_columns(static_cast<Out*>(p.out) + tile.token * p.d + tile.column, sums);
}

/// The sums of the inner nodes of a tree of neighbours whose leaves come one after the other. Node n of a
/// level is held until its right neighbour is known, as the digits of a binary counter.
///
/// @tparam T The type that each sum is rounded to.
template <class T>
class Tree {
 public:
  /// Adds leaf number kIndex, which has been rounded, and leaves the sum of all leaves so far in `sums` if
  /// their number is a power of two.
  template <int kIndex>
  __device__ void add(float (&sums)[kCombineStep]) {
    add_at<kIndex, 0>(sums);
  }

 private:
  template <int kIndex, int kLevel>
  __device__ void add_at(float (&sums)[kCombineStep]) {
    if constexpr (kIndex % 2 == 1) {
#pragma unroll
      for (int j = 0; j < kCombineStep; ++j) {
        sums[j] = rounded<T>(__fadd_rn(left_[kLevel][j], sums[j]));
      }
      add_at<kIndex / 2, kLevel + 1>(sums);
    } else {
#pragma unroll
      for (int j = 0; j < kCombineStep; ++j) {
        left_[kLevel][j] = sums[j];
      }
    }
  }

  float left_[4][kCombineStep];
};

/// Calls leaf(i, sums) for i = 0 .. count - 1 and adds the results as a tree; sums becomes that of all.
/// `count` is 1, 2, 4 or 8.
template <class T, int kIndex = 0, class Leaf>
__device__ void add_leaves(Tree<T>& tree, int count, float (&sums)[kCombineStep], Leaf const& leaf) {
  if constexpr (kIndex < kTreeBlocks) {
    if (kIndex < count) {
      leaf(kIndex, sums);
      tree.template add<kIndex>(sums);
      add_leaves<T, kIndex + 1>(tree, count, sums, leaf);
    }
  }
}

struct PartParams {
  void const* y;
  SlotIds ids;
  int const* row_of_pair;
  SlotWeights weights;
  void* part;
  int64_t num_rows;
  int64_t first_number;  // of the rows of this rank
  int64_t d;
  int top_k;
  int experts_per_block;
  int first_block;
  int num_blocks;
  int ctas_per_token;
};

/// The part of one rank: the tree over its blocks of experts.
///
/// @tparam T The type of y.
/// @tparam Part The type of the parts.
template <class T, class Part>
__global__ void __launch_bounds__(kCombineThreads) combine_blocks(PartParams p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  CombineTile const tile(p.ctas_per_token);
  if (tile.column >= p.d) {
    return;
  }
  T const* const y = static_cast<T const*>(p.y) + tile.column;
  Tree<Part> tree;
  float sums[kCombineStep];
  add_leaves<Part>(tree, p.num_blocks, sums, [&](int block, float (&leaf)[kCombineStep]) {
#pragma unroll
    for (int j = 0; j < kCombineStep; ++j) {
      leaf[j] = 0.0f;
    }
    int64_t const first = int64_t{p.first_block + block} * p.experts_per_block;
#pragma unroll 1
    for (int s = 0; s < p.top_k; ++s) {
      int64_t const slot = tile.token * p.top_k + s;
      int64_t const id = p.ids.at(slot);
      int64_t const row = p.row_of_pair[slot] - p.first_number;
      if (id >= first && id < first + p.experts_per_block && row >= 0 && row < p.num_rows) {
        auto const columns = *reinterpret_cast<Columns<T> const*>(y + row * p.d);
        float const weight = p.weights.at(slot);
#pragma unroll
        for (int j = 0; j < kCombineStep; ++j) {
          leaf[j] = __fadd_rn(leaf[j], __fmul_rn(weight, to_float(columns.elements[j])));
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kCombineStep; ++j) {
      leaf[j] = rounded<Part>(leaf[j]);
    }
  });
  store_columns(static_cast<Part*>(p.part) + tile.token * p.d + tile.column, sums);
}

struct TreeParams {
  SlotIds ids;
  void* out;
  int64_t d;
  int top_k;
  int experts_per_rank;
  int num_ranks;
  int ctas_per_token;
  void const* parts[kTreeBlocks];
};

/// The tree over the parts of all ranks.
template <class Part, class Out>
__global__ void __launch_bounds__(kCombineThreads) combine_parts(__grid_constant__ TreeParams const p) {
#if __CUDA_ARCH__ >= 900
  // As in route.cu: nothing is read or written before this wait.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  CombineTile const tile(p.ctas_per_token);
  if (tile.column >= p.d) {
    return;
  }
  unsigned wanted = 0;  // bit r: the token names an expert of rank r
  for (int s = 0; s < p.top_k; ++s) {
    int64_t const id = p.ids.at(tile.token * p.top_k + s);
    int64_t const all = int64_t{p.num_ranks} * p.experts_per_rank;
    wanted |= id >= 0 && id < all ? 1u << static_cast<unsigned>(id / p.experts_per_rank) : 0u;
  }
  Tree<Part> tree;
  float sums[kCombineStep];
  add_leaves<Part>(tree, p.num_ranks, sums, [&](int rank, float (&leaf)[kCombineStep]) {
    Columns<Part> columns{};
    bool const is_wanted = (wanted >> rank & 1u) != 0;
    if (is_wanted) {
      columns = *reinterpret_cast<Columns<Part> const*>(static_cast<Part const*>(p.parts[rank]) +
                                                        tile.token * p.d + tile.column);
    }
#pragma unroll
    for (int j = 0; j < kCombineStep; ++j) {
      leaf[j] = is_wanted ? to_float(columns.elements[j]) : 0.0f;
    }
  });
  store_columns(static_cast<Out*>(p.out) + tile.token * p.d + tile.column, sums);
}

int64_t ctas_of_token(int64_t d) { return ceil_div(d, int64_t{kCombineThreads} * kCombineStep); }

}  // namespace

// The kernels that read several buffers are launched without overlap: other GPUs may have written the
// buffers, which the kernel before has waited for.

fp4gemm_status_t launch_combine_ranks(fp4gemm_combine_ranks_args_t const& args,
                                      DeviceProperties const& properties, fp4gemm_stream_t stream) {
  int64_t const ctas_per_token = ctas_of_token(args.d);
  int64_t const ctas = args.num_tokens * ctas_per_token;
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("combine_ranks", ctas));
  RanksParams params{};
  params.row_of_pair = args.row_of_pair;
  params.weights = {args.topk_weights, args.weights_dtype};
  params.out = args.out;
  params.num_rows = args.num_rows;
  params.num_buffers = args.num_buffers;
  params.d = args.d;
  params.top_k = args.top_k;
  params.ctas_per_token = static_cast<int>(ctas_per_token);
  for (int i = 0; i < args.num_buffers; ++i) {
    params.y[i] = args.y[i];
  }
  bool const overlaps = properties.can_overlap_launches() && args.num_buffers == 1;
  for_type(args.y_dtype, [&](auto y) {
    for_type(args.out_dtype, [&](auto out) {
      (void)launch_combine_kernel(combine_rank_rows<decltype(y), decltype(out)>, params, ctas, overlaps,
                                  stream);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_combine_part(fp4gemm_combine_part_args_t const& args,
                                     DeviceProperties const& properties, fp4gemm_stream_t stream) {
  int64_t const ctas_per_token = ctas_of_token(args.d);
  int64_t const ctas = args.num_tokens * ctas_per_token;
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("combine_part", ctas));
  int const num_blocks = kTreeBlocks / args.num_ranks;
  PartParams const params{args.y,
                          {args.topk_ids, args.ids_are_64_bits != 0},
                          args.row_of_pair,
                          {args.topk_weights, args.weights_dtype},
                          args.part,
                          args.num_rows,
                          args.rank * args.num_rows,
                          args.d,
                          args.top_k,
                          args.num_experts / kTreeBlocks,
                          args.rank * num_blocks,
                          num_blocks,
                          static_cast<int>(ctas_per_token)};
  for_type(args.y_dtype, [&](auto y) {
    for_type(args.part_dtype, [&](auto part) {
      (void)launch_combine_kernel(combine_blocks<decltype(y), decltype(part)>, params, ctas,
                                  properties.can_overlap_launches(), stream);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t launch_combine_tree(fp4gemm_combine_tree_args_t const& args,
                                     DeviceProperties const& properties, fp4gemm_stream_t stream) {
  int64_t const ctas_per_token = ctas_of_token(args.d);
  int64_t const ctas = args.num_tokens * ctas_per_token;
  if (ctas == 0) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_grid("combine_tree", ctas));
  TreeParams params{};
  params.ids = {args.topk_ids, args.ids_are_64_bits != 0};
  params.out = args.out;
  params.d = args.d;
  params.top_k = args.top_k;
  params.experts_per_rank = args.num_experts / args.num_ranks;
  params.num_ranks = args.num_ranks;
  params.ctas_per_token = static_cast<int>(ctas_per_token);
  for (int i = 0; i < args.num_ranks; ++i) {
    params.parts[i] = args.parts[i];
  }
  bool const overlaps = properties.can_overlap_launches() && args.num_ranks == 1;
  for_type(args.part_dtype, [&](auto part) {
    for_type(args.out_dtype, [&](auto out) {
      (void)launch_combine_kernel(combine_parts<decltype(part), decltype(out)>, params, ctas, overlaps,
                                  stream);
    });
  });
  FP4GEMM_CUDA(cudaGetLastError());
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
