// The routing of a mixture of experts: a stable counting sort of the slots of all tokens by expert. With
// ranks, the rows of each rank are numbered from 0, and those of one rank are listed.
#include <cuda_runtime.h>

#include "error.hpp"
#include "launch.hpp"
#include "moe/moe.hpp"
#include "moe/ranks.hpp"

namespace fp4gemm {
namespace {

struct RouteParams {
  void const* ids;
  int num_slots;  // of all tokens: slot j of token i has number i * top_k + j
  int top_k;
  int num_experts;
  int counting_warps, steps;  // as in RoutePlan
  int* counts;                // (CTAs, num_experts) slots of a CTA that name an expert; of several CTAs alone
  int* offs;
  int* token_of_row;
  int* row_of_pair;
  // Of ranks alone:
  int num_ranks;
  int rank;
  int capacity;  // rows of a rank
  int* slot_of_row;
  int* status;
};

/// What a launch does. A single CTA does all; several take two launches, since each has to know the counts of
/// those before it.
enum class Pass { kAll, kCount, kPlace };

/// The sum over the threads of the CTA before this one, and in *total that over all. All threads must call
/// it; `sums` has an element for each warp. The caller's next write to `sums` must come after a barrier.
__device__ int sum_before(int own, int* sums, int* total) {
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  int up_to = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int const other = __shfl_up_sync(0xFFFFFFFFu, up_to, step);
    up_to += lane >= step ? other : 0;
  }
  if (lane == 31) {
    sums[warp] = up_to;
  }
  __syncthreads();  // the sums of all warps are written
  int const of_warp = lane < static_cast<int>(blockDim.x / 32) ? sums[lane] : 0;
  *total = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, static_cast<unsigned>(of_warp)));
  unsigned const before = __reduce_add_sync(0xFFFFFFFFu, static_cast<unsigned>(lane < warp ? of_warp : 0));
  return static_cast<int>(before) + up_to - own;
}

/// Writes the ends of the rows of the rank's experts, and the most rows that a rank needs. CTA 0 calls it.
/// ends[e] is the end of the rows of expert e, firsts[r] the first row of rank r, and firsts[num_ranks] the
/// number of all rows.
__device__ void store_ends(RouteParams const& p, int const* ends, int const* firsts) {
  int const local = p.num_experts / p.num_ranks;
  for (int e = static_cast<int>(threadIdx.x); e < local; e += static_cast<int>(blockDim.x)) {
    p.offs[e] = min(ends[p.rank * local + e] - firsts[p.rank], p.capacity);
  }
  if (threadIdx.x == 0) {
    int most = 0;
    for (int r = 0; r < p.num_ranks; ++r) {
      most = max(most, firsts[r + 1] - firsts[r]);
    }
    p.status[0] = most;
  }
}

/// The number of the row `row` of all ranks, which names expert `expert`: its rank, and its place there. The
/// rows of p.rank are listed. -1 for a row that the rank has no memory for.
__device__ int place_on_rank(RouteParams const& p, int const* firsts, int row, int expert, int slot) {
  int const owner = expert / (p.num_experts / p.num_ranks);
  int const place = row - firsts[owner];
  if (place >= p.capacity) {
    return -1;
  }
  if (owner == p.rank) {
    p.token_of_row[place] = slot / p.top_k;
    p.slot_of_row[place] = slot % p.top_k;
  }
  return owner * p.capacity + place;
}

/// Orders the slots of a CTA among those that name the same expert, and places them.
///
/// @tparam Id The type of an id, int32_t or int64_t.
/// @tparam kPass What the launch does.
/// @tparam kRanks Whether rows are numbered rank by rank.
///
/// Dynamic shared memory: 2 * num_experts ints, then counting_warps * num_experts 16-bit counters. A CTA has
/// at most 8192 slots, so that they do not overflow.
template <class Id, Pass kPass, bool kRanks>
__global__ void __launch_bounds__(32 * kMaxRouteWarps) route_slots(RouteParams p) {
  extern __shared__ int starts[];  // the first row of each expert, for the slots of this CTA
  __shared__ int sums[kMaxRouteWarps];
  __shared__ int firsts[kRanks ? kMaxRanks + 1 : 1];  // the first row of each rank, and the number of rows
  int* const totals = starts + p.num_experts;         // of all CTAs
  auto* const counters = reinterpret_cast<unsigned short*>(totals + p.num_experts);
  int const lane = static_cast<int>(threadIdx.x % 32);
  int const warp = static_cast<int>(threadIdx.x / 32);
  int const experts = p.num_experts;
  for (int i = static_cast<int>(threadIdx.x); i < p.counting_warps * experts;
       i += static_cast<int>(blockDim.x)) {
    counters[i] = 0;
  }
#if __CUDA_ARCH__ >= 900
  // The kernel may start while the one before it still runs: no thread reads or writes global memory before
  // this wait. The kernel after it may be started now, since it waits in the same way or is launched without
  // overlap.
  asm volatile("griddepcontrol.wait;\n griddepcontrol.launch_dependents;" ::: "memory");
#endif
  int const cta = static_cast<int>(blockIdx.x);
  int64_t const first = (int64_t{cta} * p.counting_warps + warp) * p.steps * 32 + lane;
  if constexpr (kRanks && kPass != Pass::kPlace) {
    if (cta == 0 && threadIdx.x == 0) {
      p.status[1] = 0;  // the pass that places sets it, after a barrier of this CTA or in the next launch
    }
  }
  int expert[kMaxRouteSteps];  // -1: none, or no slot
  bool is_invalid = false;     // whether a slot has an id that is neither an expert nor -1
  int order[kMaxRouteSteps];   // among the slots of the warp that name the same expert
#pragma unroll
  for (int s = 0; s < kMaxRouteSteps; ++s) {
    int64_t const slot = first + 32 * s;
    expert[s] = -1;
    if (s < p.steps && warp < p.counting_warps && slot < p.num_slots) {
      Id const id = static_cast<Id const*>(p.ids)[slot];
      expert[s] = id >= 0 && id < experts ? static_cast<int>(id) : -1;
      is_invalid = is_invalid || id < -1 || id >= experts;
    }
  }
  __syncthreads();  // the counters are zero

  unsigned short* const own = counters + warp * experts;
#pragma unroll
  for (int s = 0; s < kMaxRouteSteps; ++s) {
    if (s < p.steps && warp < p.counting_warps) {  // the same for all lanes
      unsigned const same = __match_any_sync(0xFFFFFFFFu, expert[s]);
      int const before = __popc(same & ((1u << lane) - 1u));
      order[s] = before + (expert[s] >= 0 ? own[expert[s]] : 0);
      __syncwarp();  // all lanes have read the counters
      if (expert[s] >= 0 && before == 0) {
        own[expert[s]] = static_cast<unsigned short>(own[expert[s]] + __popc(same));
      }
      __syncwarp();  // and the next step reads them anew
    }
  }
  __syncthreads();  // the counters of all warps are complete

  // Each thread has neighbouring experts. The counters become those of the warps before.
  int const per_thread = (experts + static_cast<int>(blockDim.x) - 1) / static_cast<int>(blockDim.x);
  int const first_expert = min(static_cast<int>(threadIdx.x) * per_thread, experts);
  int const last_expert = min(first_expert + per_thread, experts);
  int of_thread = 0;
  for (int e = first_expert; e < last_expert; ++e) {
    int in_cta = 0;
    for (int w = 0; w < p.counting_warps; ++w) {
      int const count = counters[w * experts + e];
      counters[w * experts + e] = static_cast<unsigned short>(in_cta);
      in_cta += count;
    }
    if constexpr (kPass == Pass::kAll) {
      starts[e] = 0;
      totals[e] = in_cta;
      of_thread += in_cta;
    } else if constexpr (kPass == Pass::kCount) {
      p.counts[int64_t{cta} * experts + e] = in_cta;
    } else {
      int all = 0;
      int before = 0;  // in CTAs before this one
#pragma unroll 4
      for (int other = 0; other < static_cast<int>(gridDim.x); ++other) {
        int const count = p.counts[int64_t{other} * experts + e];
        before += other < cta ? count : 0;
        all += count;
      }
      starts[e] = before;
      totals[e] = all;
      of_thread += all;
    }
  }
  if constexpr (kPass != Pass::kCount) {
    int num_rows = 0;
    int row = sum_before(of_thread, sums, &num_rows);  // the first row of first_expert
    for (int e = first_expert; e < last_expert; ++e) {
      int const count = totals[e];
      starts[e] += row;
      if constexpr (kRanks) {
        int const local = experts / p.num_ranks;
        if (e % local == 0) {
          firsts[e / local] = row;
        }
      }
      row += count;
      if constexpr (kRanks) {
        totals[e] = row;  // from here on, the end of the rows of the expert
      } else if (cta == 0) {
        p.offs[e] = row;
      }
    }
    if (kRanks && threadIdx.x == 0) {
      firsts[p.num_ranks] = num_rows;
    }
    __syncthreads();  // the first rows of all experts are known
    if constexpr (kRanks) {
      if (cta == 0) {
        store_ends(p, totals, firsts);
      }
      if (is_invalid) {
        p.status[1] = 1;
      }
    }
#pragma unroll
    for (int s = 0; s < kMaxRouteSteps; ++s) {
      int64_t const slot = first + 32 * s;
      if (s < p.steps && warp < p.counting_warps && slot < p.num_slots) {
        int place = -1;
        if (expert[s] >= 0) {
          place = starts[expert[s]] + own[expert[s]] + order[s];
          if constexpr (kRanks) {
            place = place_on_rank(p, firsts, place, expert[s], static_cast<int>(slot));
          } else {
            p.token_of_row[place] = static_cast<int>(slot) / p.top_k;
          }
        }
        p.row_of_pair[slot] = place;
      }
    }
    // The rows that no slot has.
    int const threads = static_cast<int>(gridDim.x * blockDim.x);
    int const used = kRanks ? firsts[p.rank + 1] - firsts[p.rank] : num_rows;
    int const limit = kRanks ? p.capacity : p.num_slots;
    for (int64_t r = used + static_cast<int64_t>(cta) * blockDim.x + threadIdx.x; r < limit; r += threads) {
      p.token_of_row[r] = -1;
      if constexpr (kRanks) {
        p.slot_of_row[r] = -1;
      }
    }
  }
}

template <class Id, Pass kPass, bool kRanks>
fp4gemm_status_t launch_pass(RouteParams const& params, RoutePlan const& plan,
                             DeviceProperties const& properties, fp4gemm_stream_t stream) {
  Ctas const ctas{static_cast<unsigned>(plan.ctas), plan.threads,
                  params.num_experts * (2 * sizeof(int) + plan.counting_warps * sizeof(unsigned short))};
  FP4GEMM_CUDA(launch_waiting(route_slots<Id, kPass, kRanks>, ctas, properties.can_overlap_launches(), stream,
                              params));
  return FP4GEMM_SUCCESS;
}

template <class Id, bool kRanks>
fp4gemm_status_t launch(RouteParams const& params, RoutePlan const& plan, DeviceProperties const& properties,
                        fp4gemm_stream_t stream) {
  if (plan.ctas == 1) {
    return launch_pass<Id, Pass::kAll, kRanks>(params, plan, properties, stream);
  }
  FP4GEMM_TRY((launch_pass<Id, Pass::kCount, kRanks>(params, plan, properties, stream)));
  return launch_pass<Id, Pass::kPlace, kRanks>(params, plan, properties, stream);
}

/// What both kinds of arguments have.
template <class Args>
RouteParams params_of(Args const& args, RoutePlan const& plan, void* workspace) {
  RouteParams params{};
  params.ids = args.topk_ids;
  params.num_slots = static_cast<int>(args.num_tokens * args.top_k);
  params.top_k = args.top_k;
  params.num_experts = args.num_experts;
  params.counting_warps = plan.counting_warps;
  params.steps = plan.steps;
  params.counts = static_cast<int*>(workspace);
  params.offs = args.offs;
  params.token_of_row = args.token_of_row;
  params.row_of_pair = args.row_of_pair;
  return params;
}

}  // namespace

fp4gemm_status_t launch_route(fp4gemm_route_args_t const& args, DeviceProperties const& properties,
                              void* workspace, fp4gemm_stream_t stream) {
  RoutePlan const plan = route_plan(args.num_tokens * args.top_k, args.num_experts);
  RouteParams const params = params_of(args, plan, workspace);
  return args.ids_are_64_bits != 0 ? launch<int64_t, false>(params, plan, properties, stream)
                                   : launch<int32_t, false>(params, plan, properties, stream);
}

fp4gemm_status_t launch_route_ranks(fp4gemm_route_ranks_args_t const& args,
                                    DeviceProperties const& properties, void* workspace,
                                    fp4gemm_stream_t stream) {
  RoutePlan const plan = route_plan(args.num_tokens * args.top_k, args.num_experts);
  RouteParams params = params_of(args, plan, workspace);
  params.num_ranks = args.num_ranks;
  params.rank = args.rank;
  params.capacity = static_cast<int>(args.capacity);
  params.slot_of_row = args.slot_of_row;
  params.status = args.status;
  return args.ids_are_64_bits != 0 ? launch<int64_t, true>(params, plan, properties, stream)
                                   : launch<int32_t, true>(params, plan, properties, stream);
}

}  // namespace fp4gemm
