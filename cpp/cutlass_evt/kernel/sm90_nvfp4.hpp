// The SM90 kernel on prepacked NVFP4 weights: one persistent kernel for dense and grouped products, from one
// token to thousands.
//
// Why not one of CUTLASS's kernels around the mainloop: a decode step is a few microseconds, and what a
// library kernel spends around its mainloop (a dependency wait ahead of everything, a fix-up kernel layer,
// descriptors of D rewritten for each group) is as long as the mainloop. Here the weights are on their way
// before the kernel waits for its predecessor, D is stored without descriptors, and groups need no table in
// memory: the kernel reads the group ends itself.
#pragma once

#include "cutlass_evt/kernel/sm90_nvfp4_direct.hpp"
#include "cutlass_evt/kernel/sm90_nvfp4_schedule.hpp"
#include "cutlass_evt/kernel/sm90_nvfp4_slices.hpp"

namespace cutlass_evt {

/// D[group's rows] = epilogue(X (m, k) @ W[group] (n, k)^T). Dense: one group, offs null.
template <class Epilogue>
struct Sm90Nvfp4Params {
  CUtensorMap tokens;      // of X, see Sm90Nvfp4Operands; boxes are what one load of a CTA brings
  uint8_t const* weights;  // prepacked, one matrix after the other
  int64_t weight_bytes;    // of one matrix
  bool weights_are_fresh;  // the launch right before this one wrote them
  int n;
  Sm90Nvfp4GroupEnds groups;
  Sm90Nvfp4Operands operands;
  cutlass::FastDivmod row_tiles;  // of a matrix
  cutlass::FastDivmod steps;      // along k
  Sm90Nvfp4Plan plan;             // of a dense product
  bool splits;                    // tiles may be split along k, where that balances the work
  float* partials;
  uint64_t* flags;
  uint64_t nonce;            // the value of a raised flag: random, so that stale workspace does not hold it
  Sm90Nvfp4Tickets tickets;  // of groups' tiles, which take different times
  typename Epilogue::Arguments epilogue;
};

template <class Config, class Epilogue_>
struct Sm90Nvfp4Kernel {
  using Epilogue = Epilogue_;
  using Params = Sm90Nvfp4Params<Epilogue>;
  using Mainloop = Sm90Nvfp4Mainloop<Config>;
  using Shared = typename Mainloop::Shared;
  using Position = typename Mainloop::Position;
  using Multiply =
      cute::conditional_t<Config::kUsesWgmma, Sm90Nvfp4WgmmaMultiply<Config>, Sm90Nvfp4MmaMultiply<Config>>;
  using Accumulators = typename Multiply::Accumulators;
  using Schedule = Sm90Nvfp4Schedule;

  using Slices = Sm90Nvfp4Slices<Config, Accumulators>;
  using Direct = Sm90Nvfp4Direct<Config, Epilogue>;
  using Terms = Sm90Nvfp4Terms<Config, Epilogue>;
  static constexpr int kColumns = Slices::kColumns;
  static constexpr int kRounds = Slices::kRounds;

  /// Partial sums of one CTA.
  static constexpr int64_t kPartialFloats = int64_t{Accumulators::kSize} * Config::kConsumerThreads;

  static CUTLASS_HOST_DEVICE Sm90Nvfp4Plan plan(int tiles, int steps, int num_ctas, bool splits) {
    return {tiles, steps, num_ctas / Config::kCluster, least_split_steps(Config::kDepth), Config::kLeadSteps,
            splits};
  }

  /// Partial sums, flags, and the counter of tickets.
  static size_t workspace_bytes(int num_ctas) {
    return static_cast<size_t>(num_ctas) * (kPartialFloats * sizeof(float) + sizeof(uint64_t)) +
           sizeof(uint64_t);
  }

  using Groups = Sm90Nvfp4Groups<Config>;
  using Place = typename Groups::Place;

  using Task = Sm90Nvfp4Task;
  using TaskPosition = RingPosition<Config::kTasks>;

  CUTLASS_DEVICE static Place place_of(Params const& p, Shared const& shared, Schedule::Item const& item) {
    return Groups::place_of(p.groups, shared.table(), p.row_tiles, item.tile);
  }

  CUTLASS_DEVICE static int first_chunk(Place const& place, int rank) {
    return (place.row_tile * Config::kCluster + rank) * Config::kRowGroups;
  }

  CUTLASS_DEVICE static TileWork work_of(Params const& p, Task const& task, int rank) {
    Place const& place = task.place;
    return {p.weights + place.group * p.weight_bytes,
            first_chunk(place, rank),
            place.rows.begin + place.token,
            Config::tokens_for(place.rows.size - place.token),
            task.begin,
            task.end};
  }

  CUTLASS_DEVICE static Task task_of(Place const& place, Schedule const& schedule,
                                     Schedule::Item const& item) {
    return {place, item.begin, item.end, schedule.worker, item.begin == 0 ? schedule.others(item) : 0};
  }

  /// Tells the consumers, who then need not find out themselves: with groups that is a search.
  CUTLASS_DEVICE static void tell(Shared const& shared, int slot, Task const& task) {
    *shared.task(slot) = task;
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared.told_at(slot)) : "memory");
  }

  /// The first weights of a dense product, ahead of every wait: they are older than the kernel before this
  /// one, unless the caller says otherwise. The number of stages.
  CUTLASS_DEVICE static int fetch_ahead(Params const& p, Shared const& shared, Schedule schedule, int rank) {
    Schedule::Item item;
    if (p.weights_are_fresh || !schedule.take(item)) {
      return 0;
    }
    Task const task = task_of(Groups::only_place_of(p.groups, p.row_tiles, item.tile), schedule, item);
    tell(shared, 0, task);
    typename Mainloop::Loader const load(p.operands, &p.tokens, shared, work_of(p, task, rank), rank);
    int const ahead = cute::min(int{Config::kAheadStages}, item.end - item.begin);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < ahead; ++i) {
      load.weights(i, item.begin + i);
    }
    return ahead;
  }

  /// ahead: of the first tile's stages the weights are under way, and the consumers have been told of it.
  CUTLASS_DEVICE static void produce(Params const& p, Shared const& shared, Schedule schedule, int rank,
                                     int ahead) {
    Position at;
    TaskPosition told;
    Schedule::Item item;
    if (blockIdx.x == 0) {
      schedule.open();
    }
    bool more = schedule.take(item);
    if (p.groups.offs == nullptr) {  // with groups everyone has waited
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;");
    }
    for (; more; more = schedule.take(item)) {
      Task const task = ahead > 0 ? *shared.task(0) : task_of(place_of(p, shared, item), schedule, item);
      if (ahead == 0) {
        tell(shared, told.stage, task);
      }
      told.advance();
      TileWork const work = work_of(p, task, rank);
      typename Mainloop::Loader const load(p.operands, &p.tokens, shared, work, rank);
      int step = work.begin;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; ahead > 0; --ahead) {
        load.tokens(at.stage, step);
        at.advance();
        ++step;
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (; step < work.end; ++step) {
        Mainloop::wait_empty(shared, at);
        load.weights(at.stage, step);
        load.tokens(at.stage, step);
        at.advance();
      }
    }
    tell(shared, told.stage, {});
  }

  // A raised flag holds the nonce, and any other value means that it is lowered. The thread that waits for a
  // flag lowers it, so no launch leaves one raised and the workspace needs no initialisation.

  CUTLASS_DEVICE static void raise(uint64_t* flag, uint64_t nonce) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(nonce) : "memory");
  }

  CUTLASS_DEVICE static void wait_and_lower(uint64_t* flag, uint64_t nonce) {
    uint64_t value;
    do {
      asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    } while (value != nonce);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(uint64_t{0}) : "memory");
  }

  // Partial sums of a CTA lie in the workspace as its threads hold them, four registers at a time.

  CUTLASS_DEVICE static float4* partial_of(Params const& p, int cta) {
    return reinterpret_cast<float4*>(p.partials + cta * kPartialFloats) + threadIdx.x;
  }

  CUTLASS_DEVICE static void store_partial(Params const& p, int cta, Accumulators& accumulators) {
    float4* const to = partial_of(p, cta);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kSize; i += 4) {
      __stcg(to + i / 4 * Config::kConsumerThreads,
             make_float4(accumulators[i], accumulators[i + 1], accumulators[i + 2], accumulators[i + 3]));
    }
  }

  CUTLASS_DEVICE static void add_partial(Params const& p, int cta, Accumulators& accumulators) {
    float4 const* const from = partial_of(p, cta);
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < Accumulators::kSize; i += 4) {
      float4 const part = __ldcg(from + i / 4 * Config::kConsumerThreads);
      accumulators[i] += part.x;
      accumulators[i + 1] += part.y;
      accumulators[i + 2] += part.z;
      accumulators[i + 3] += part.w;
    }
  }

  /// A tile, or a part of it along k.
  CUTLASS_DEVICE static void consume(Params const& p, Shared const& shared, Task const& task, int rank,
                                     Position& at) {
    Place const& place = task.place;
    TileWork const work = work_of(p, task, rank);
    float const alpha = Epilogue::alpha(p.epilogue, place.group);
    bool const uses_terms = Config::kSharesRows || p.epilogue.is_direct();
    if (uses_terms && task.begin == 0) {
      Terms::fetch(p.epilogue, shared, place, work.first_chunk, p.n);
    }
    Accumulators accumulators;
    Multiply::multiply(p.operands, shared, at, work, accumulators);

    if (task.begin > 0) {
      int const cta = task.worker * Config::kCluster + rank;
      store_partial(p, cta, accumulators);
      __threadfence();
      consumer_barrier<Config>();
      if (threadIdx.x == 0) {
        raise(p.flags + cta, p.nonce);
      }
      return;
    }
    // The workers after this one that have the rest of the tile.
    for (int other = 1; other <= task.others; ++other) {
      int const cta = (task.worker + other) * Config::kCluster + rank;
      if (threadIdx.x == 0) {
        wait_and_lower(p.flags + cta, p.nonce);
      }
      consumer_barrier<Config>();
      add_partial(p, cta, accumulators);
    }
    if constexpr (!Config::kSharesRows) {
      if (p.epilogue.is_direct()) {
        Direct::store(p.epilogue, shared, place, first_chunk(place, rank), p.n, accumulators);
        return;
      }
    }
    typename Slices::Slot const s = Slices::slot();
    int const first_column = first_chunk(place, rank) * 64 + s.column;
    float const* const terms = shared.terms(0);
    typename Epilogue::Columns columns;
    if constexpr (Config::kSharesRows) {
      Terms::wait();  // and a barrier among all consumers follows
    } else {
      columns.load(p.epilogue, place.group, first_column, p.n);
    }
    auto const fetch_row = [&](int token) {
      if constexpr (Config::kSharesRows) {
        return terms[token];
      } else {
        int const row = place.token + token;
        return row < place.rows.size ? Epilogue::row_factor(p.epilogue, int64_t{place.rows.begin} + row)
                                     : 0.0f;
      }
    };
    auto const finish = [&](int token, float (&sums)[kRounds][kColumns], float const(&by_row)[kRounds]) {
      if constexpr (Config::kSharesRows) {
        columns.load(terms + Terms::kByColumn + s.column, terms + Terms::kBias + s.column, alpha,
                     first_column, p.n);
      }
      int64_t rows[kRounds];
      bool present[kRounds];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRounds; ++r) {
        int const row = place.token + token + r * 16;
        rows[r] = int64_t{place.rows.begin} + row;
        present[r] = row < place.rows.size && columns.any();
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          sums[r][j] *= static_cast<float>(1 << Nvfp4Packing::kExponent);
        }
      }
      columns.store(p.epilogue, rows, present, by_row, sums);
    };
    Slices::for_each_slot(shared, accumulators, s, fetch_row, finish);
  }

  CUTLASS_DEVICE static void consume(Params const& p, Shared const& shared, int rank) {
    Position at;
    TaskPosition told;
    Mainloop::wait(shared.told_at(0), 0);
    while (!shared.task(told.stage)->is_none()) {
      consume(p, shared, *shared.task(told.stage), rank, at);  // left there: registers are scarce
      told.advance();
      Mainloop::wait(shared.told_at(told.stage), told.phase);
    }
  }

  CUTLASS_DEVICE static Sm90Nvfp4Plan plan_of_groups(Params const& p, Shared const& shared) {
    int const per_entry = Groups::groups_per_entry(p.groups);
    int const tiles_of_tokens = shared.table()[(p.groups.num_groups + per_entry - 1) / per_entry];
    return plan(tiles_of_tokens * p.row_tiles.divisor, p.steps.divisor, static_cast<int>(gridDim.x),
                p.splits);
  }

  CUTLASS_DEVICE static void run(Params const& p, char* dynamic) {
    Shared const shared(dynamic);
    int const warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    bool const is_producer = warp >= Config::kConsumerWarps;
    int const rank = static_cast<int>(blockIdx.x) % Config::kCluster;
    int const cta = static_cast<int>(blockIdx.x) / Config::kCluster;
    bool const is_dense = p.groups.offs == nullptr;

    int ahead = 0;
    if (warp == Config::kConsumerWarps) {
      if (cute::elect_one_sync()) {
        for (int i = 0; i < Config::kStages; ++i) {
          cutlass::arch::ClusterBarrier::init(shared.full(i), 1);
          cutlass::arch::ClusterBarrier::init(shared.empty(i), Config::kConsumerWarps * Config::kCluster);
        }
        for (int i = 0; i < Config::kTasks; ++i) {
          cutlass::arch::ClusterBarrier::init(shared.told(i), 1);
        }
        cutlass::arch::fence_barrier_init();
        if (is_dense) {
          ahead = fetch_ahead(p, shared, Schedule(p.plan, p.steps, cta, {}), rank);
        }
        cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.tokens));
      }
      __syncwarp();
    }
    if (!is_dense) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;");
      Groups::fill_table(p.groups, shared.table());
    }
    if constexpr (Config::kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }

    if (is_producer) {
      if constexpr (Config::kMovesRegisters) {
        cutlass::arch::warpgroup_reg_dealloc<56>();
      }
      if (warp == Config::kConsumerWarps && cute::elect_one_sync()) {
        Sm90Nvfp4Plan const plan = is_dense ? p.plan : plan_of_groups(p, shared);
        produce(p, shared, Schedule(plan, p.steps, cta, p.tickets), rank, ahead);
      }
      __syncwarp();
    } else {
      if constexpr (Config::kMovesRegisters) {
        cutlass::arch::warpgroup_reg_alloc<224>();
      }
      if (is_dense) {
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
      consume(p, shared, rank);
    }
    if constexpr (Config::kCluster > 1) {  // nobody leaves while the other may write to its shared memory
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    }
  }
};

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sm90_nvfp4_gemm(__grid_constant__ Sm90Nvfp4Params<Epilogue> const params) {
  extern __shared__ char sm90_nvfp4_shared[];
  Sm90Nvfp4Kernel<Config, Epilogue>::run(params, sm90_nvfp4_shared);
}

}  // namespace cutlass_evt
