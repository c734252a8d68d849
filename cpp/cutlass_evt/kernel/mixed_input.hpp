// The mixed-input kernel, of fp16, bf16 or e4m3 tokens and prepacked NVFP4 weights: one persistent,
// warp-specialised kernel for dense and grouped products, from one token to thousands. It serves SM90 and
// SM120, whose entry points are in sm90_nvfp4.hpp and sm120_nvfp4.hpp.
//
// It does not use CUTLASS's kernel layer. A decode step lasts a few microseconds, and what that layer does
// around the mainloop costs as much time again: it waits for the previous kernel before anything else, sums
// the parts of split-K in a serial fix-up, and rewrites the descriptor of D for every group. This kernel
// requests the first weights before it waits for the previous kernel, stores D without descriptors, and reads
// the group ends itself instead of tables of pointers.
//
// Roles of the warps of a CTA:
//   producer   one thread of the warp after the consumers; it walks through the CTA's work items, publishes
//              each of them to the consumers, and fills the ring of stages with weights and tokens
//   consumers  Config::kConsumerGroups warpgroups, which multiply the stages and store D
#pragma once

#include "cutlass_evt/epilogue/columns.hpp"
#include "cutlass_evt/kernel/mixed_input_direct_epilogue.hpp"
#include "cutlass_evt/kernel/mixed_input_params.hpp"
#include "cutlass_evt/kernel/mixed_input_partials.hpp"
#include "cutlass_evt/kernel/mixed_input_schedule.hpp"
#include "cutlass_evt/kernel/mixed_input_staged_epilogue.hpp"

namespace cutlass_evt {

/// The kernel's device code. Config is a MixedInputConfig, which fixes the tile, the cluster and the ring;
/// Epilogue is ColumnsEpilogue or a type with its interface.
///
/// Where Config is a MixedInputQuantizingConfig, Quantizer quantizes the tokens. All consumers call its
/// prepare() and its load(), which requests the tokens, then after a barrier its quantize(), which writes the
/// decoded tokens to the memory of the tokens and their factors to shared.vectors(0).
template <class Config, class Epilogue_, class Quantizer = MixedInputNoQuantizer>
struct MixedInputKernel {
  using Epilogue = Epilogue_;
  using Params = MixedInputParams<Epilogue, Quantizer>;
  using Mainloop = MixedInputMainloop<Config>;
  using Shared = typename Mainloop::Shared;
  using Position = typename Mainloop::Position;
  using Multiply =
      cute::conditional_t<Config::kUsesWgmma, MixedInputWgmmaMultiply<Config>, MixedInputMmaMultiply<Config>>;
  using Accumulators = typename Multiply::Accumulators;
  using Schedule = MixedInputSchedule;

  using Staged = MixedInputStagedEpilogue<Config, Accumulators>;
  using Direct = MixedInputDirectEpilogue<Config, Epilogue>;
  using Vectors = MixedInputEpilogueVectors<Config>;
  using Inputs = MixedInputEpilogueInputs<Config, Epilogue>;
  using Partials = MixedInputPartials<Config, Accumulators>;
  static constexpr int kColumns = Staged::kColumns;
  static constexpr int kRounds = Staged::kRounds;

  static constexpr int64_t kPartialBytes = Partials::kBytes;

  CUTLASS_DEVICE static Partials partials(Params const& p) { return {p.sums, p.flags, p.nonce}; }

  static CUTLASS_HOST_DEVICE MixedInputPlan plan(int tiles, int steps, int num_ctas, bool splits) {
    return {tiles,
            steps,
            num_ctas / Config::kCluster,
            least_split_steps(Config::kDepth),
            least_saved_steps(Config::kTokens, Config::kRows, Config::kDepth),
            Config::kLeadSteps,
            splits};
  }

  /// Bytes of the partial sums, the flags, and the counter of the dynamic scheduler.
  static size_t workspace_bytes(int num_ctas) {
    return static_cast<size_t>(num_ctas) * (kPartialBytes + sizeof(uint64_t)) + sizeof(uint64_t);
  }

  using Groups = MixedInputGroups<Config>;
  using TileCoord = typename Groups::TileCoord;

  using WorkItem = MixedInputWorkItem;
  using ItemPosition = RingPosition<Config::kWorkItems>;

  CUTLASS_DEVICE static bool is_dense(Params const& p) { return Groups::is_dense(p.groups); }

  CUTLASS_DEVICE static TileCoord tile_coord(Params const& p, Shared const& shared,
                                             Schedule::Span const& span) {
    return Groups::tile_coord(p.groups, shared.table(), p.row_tiles, span.tile);
  }

  /// The first chunk of 64 weight rows of the CTA with this rank in its cluster.
  CUTLASS_DEVICE static int first_chunk(TileCoord const& coord, int rank) {
    return (coord.row_tile * Config::kCluster + rank) * Config::kRowGroups;
  }

  /// The part of a work item that the mainloop needs.
  CUTLASS_DEVICE static TileWork tile_work(Params const& p, WorkItem const& item, int rank) {
    TileCoord const& coord = item.coord;
    return {p.weights + coord.group * p.weight_bytes,
            first_chunk(coord, rank),
            coord.rows.begin + coord.token,
            Config::tokens_for(coord.rows.size - coord.token),
            item.begin,
            item.end};
  }

  CUTLASS_DEVICE static WorkItem make_work_item(TileCoord const& coord, Schedule const& schedule,
                                                Schedule::Span const& span) {
    return {coord, span.begin, span.end, schedule.worker,
            span.begin == 0 ? schedule.num_other_parts(span) : 0};
  }

  /// Publishes a work item to the consumers, which spares them the search for its group.
  ///
  /// Invariant of the mbarrier published(slot): the producer's one arrival completes the phase, and releases
  /// the write of the work item to the consumers that wait for that phase. The slot is free for the write:
  /// the ring of items is longer than the ring of stages by what can be in flight, see Config::kWorkItems.
  CUTLASS_DEVICE static void publish(Shared const& shared, int slot, WorkItem const& item) {
    *shared.work_item(slot) = item;
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared.published_at(slot)) : "memory");
  }

  /// Requests the weights of the first stages of a dense product before any wait for the previous kernel, and
  /// returns the number of stages. The caller of the library promises that the weights are older than that
  /// kernel; params.weights_are_fresh says that there is no such promise.
  CUTLASS_DEVICE static int prefetch_weights(Params const& p, Shared const& shared, Schedule schedule,
                                             int rank) {
    Schedule::Span span;
    if (p.weights_are_fresh || !schedule.get_next(span)) {
      return 0;
    }
    WorkItem const item =
        make_work_item(Groups::dense_tile_coord(p.groups, p.row_tiles, span.tile), schedule, span);
    publish(shared, 0, item);
    typename Mainloop::Loader const load(p.operands, &p.tokens, shared, tile_work(p, item, rank), rank);
    int const ahead = cute::min(int{Config::kPrefetchStages}, span.end - span.begin);
    CUTLASS_PRAGMA_NO_UNROLL
    for (int i = 0; i < ahead; ++i) {
      load.weights(i, span.begin + i);
    }
    return ahead;
  }

  /// The producer's loop. ahead is what prefetch_weights returned: where it is positive, that many stages of
  /// the first work item have their weights requested, and the item has been published.
  CUTLASS_DEVICE static void produce(Params const& p, Shared const& shared, Schedule schedule, int rank,
                                     int ahead) {
    Position at;
    ItemPosition slot;
    Schedule::Span span;
    if (blockIdx.x == 0) {
      schedule.open();
    }
    bool more = schedule.get_next(span);
    // Tokens may be written by the previous kernel: no load of them comes before this wait. In a grouped
    // product every thread has waited already, because the group ends may be new too.
    if (is_dense(p)) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;");
    }
    for (; more; more = schedule.get_next(span)) {
      WorkItem const item =
          ahead > 0 ? *shared.work_item(0) : make_work_item(tile_coord(p, shared, span), schedule, span);
      if (ahead == 0) {
        publish(shared, slot.stage, item);
      }
      slot.advance();
      TileWork const work = tile_work(p, item, rank);
      typename Mainloop::Loader const load(p.operands, &p.tokens, shared, work, rank);
      int step = work.begin;
      CUTLASS_PRAGMA_NO_UNROLL
      for (; ahead > 0; --ahead) {
        if constexpr (!Config::kQuantizes) {
          load.tokens(at.stage, step);
        }
        at.advance();
        ++step;
      }
      CUTLASS_PRAGMA_NO_UNROLL
      for (; step < work.end; ++step) {
        // The consumers of every CTA of the cluster have read what the stage held.
        Mainloop::wait_empty(shared, at);
        load.weights(at.stage, step);
        if constexpr (!Config::kQuantizes) {
          load.tokens(at.stage, step);
        }
        at.advance();
      }
    }
    publish(shared, slot.stage, {});  // no further item
  }

  /// The consumers' part of one work item: multiplies it, then hands its sums on or completes its tile.
  /// CTAs that share a tile along k (stream-K) sum their parts in a fixed order, so that the bits of D do not
  /// depend on timing.
  CUTLASS_DEVICE static void consume(Params const& p, Shared const& shared, WorkItem const& item, int rank,
                                     Position& at) {
    TileCoord const& coord = item.coord;
    TileWork const work = tile_work(p, item, rank);
    float const alpha = Epilogue::alpha(p.epilogue, coord.group);
    bool const is_direct = Direct::serves(p.epilogue);
    bool const uses_vectors = Config::kSharesRows || is_direct;
    if (uses_vectors && item.begin == 0) {
      Vectors::fetch(p.epilogue, shared, coord, work.first_chunk, p.n);
      Inputs::fetch(p.epilogue, shared, coord, work.first_chunk, p.n);
    }
    Accumulators accumulators;
    Multiply::multiply(p.operands, shared, at, work, accumulators);

    // A part that is not the first of its tile goes to the workspace.
    if (item.begin > 0) {
      partials(p).send(item.worker * Config::kCluster + rank, accumulators);
      return;
    }
    // The first part adds the parts of the workers after this one. They run on CTAs with lower indices, see
    // MixedInputSchedule, so that waiting for them cannot deadlock as long as CTAs start in order.
    for (int other = 1; other <= item.num_other_parts; ++other) {
      partials(p).add((item.worker + other) * Config::kCluster + rank, accumulators);
    }
    if constexpr (!Config::kSharesRows) {
      if (is_direct) {
        Direct::store_tile(p.epilogue, shared, coord, first_chunk(coord, rank), p.n, accumulators);
        return;
      }
    }
    typename Staged::Slot const s = Staged::slot();
    int const first_column = first_chunk(coord, rank) * 64 + s.column;
    float const* const vectors = shared.vectors(0);
    typename Epilogue::Columns columns;
    if constexpr (Config::kSharesRows) {
      // This thread's copies have arrived; the barrier in for_each_slot makes those of the others visible.
      Vectors::wait();
      Inputs::begin(p.epilogue, coord.group, first_column, p.n, columns);
    } else {
      columns.load(p.epilogue, coord.group, first_column, p.n);
    }
    using RowElements = typename Epilogue::RowElements;
    auto const fetch_row = [&](int token) {
      RowElements elements{};
      if constexpr (Config::kSharesRows) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kNumRowVectors; ++v) {
          elements.of[v] = vectors[v * Config::kTokens + token];
        }
        Inputs::of_row(p.epilogue, shared, coord, token, elements);
      } else {
        int const row = coord.token + token;
        if (row < coord.rows.size) {
          elements = Epilogue::row_elements(p.epilogue, int64_t{coord.rows.begin} + row);
        }
      }
      return elements;
    };
    auto const finish = [&](int token, float (&sums)[kRounds][kColumns],
                            RowElements const(&per_row)[kRounds]) {
      if constexpr (Config::kSharesRows) {
        columns.load(vectors + Vectors::kColumnsAt + s.column, Config::kVectorColumns, alpha, first_column,
                     p.n);
        Inputs::of_columns(shared, s.column, columns);
      }
      int64_t rows[kRounds];
      bool present[kRounds];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < kRounds; ++r) {
        int const row = coord.token + token + r * 16;
        rows[r] = int64_t{coord.rows.begin} + row;
        present[r] = row < coord.rows.size && columns.any();
        CUTLASS_PRAGMA_UNROLL
        for (int j = 0; j < kColumns; ++j) {
          sums[r][j] *= static_cast<float>(1 << Config::Packing::kExponent);
        }
      }
      columns.store(p.epilogue, rows, present, per_row, sums);
    };
    Staged::for_each_slot(shared, accumulators, s, fetch_row, finish);
  }

  /// The consumers' loop over the published work items.
  CUTLASS_DEVICE static void consume(Params const& p, Shared const& shared, int rank) {
    Position at;
    ItemPosition slot;
    Mainloop::wait(shared.published_at(0), 0);
    while (!shared.work_item(slot.stage)->is_last()) {
      consume(p, shared, *shared.work_item(slot.stage), rank, at);  // by reference: registers are scarce
      slot.advance();
      Mainloop::wait(shared.published_at(slot.stage), slot.phase);
    }
  }

  /// The plan of a grouped product, from the number of token tiles that fill_table found.
  CUTLASS_DEVICE static MixedInputPlan plan_of_groups(Params const& p, Shared const& shared) {
    int const per_entry = Groups::groups_per_entry(p.groups);
    int const token_tiles = shared.table()[(p.groups.num_groups + per_entry - 1) / per_entry];
    return plan(token_tiles * p.row_tiles.divisor, p.steps.divisor, static_cast<int>(gridDim.x), p.splits);
  }

  CUTLASS_DEVICE static void run(Params const& p, char* dynamic) {
    Shared const shared(dynamic);
    int const warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    bool const is_producer = warp >= Config::kConsumerWarps;
    int const rank = static_cast<int>(blockIdx.x) % Config::kCluster;
    int const cta = static_cast<int>(blockIdx.x) / Config::kCluster;

    int ahead = 0;
    if (warp == Config::kConsumerWarps) {
      if (cute::elect_one_sync()) {
        for (int i = 0; i < Config::kStages; ++i) {
          // full: the producer arrives once, with the number of bytes that the stage will receive; the phase
          // completes when they have arrived. empty: every consumer warp of the cluster arrives once when it
          // has read the stage, since tokens are multicast to all CTAs of the cluster.
          cutlass::arch::ClusterBarrier::init(shared.full(i), 1);
          cutlass::arch::ClusterBarrier::init(shared.empty(i), Config::kConsumerWarps * Config::kCluster);
        }
        for (int i = 0; i < Config::kWorkItems; ++i) {
          cutlass::arch::ClusterBarrier::init(shared.published(i), 1);
        }
        // Makes the initialised mbarriers visible to the asynchronous copies and to the cluster.
        cutlass::arch::fence_barrier_init();
        if (is_dense(p)) {
          ahead = prefetch_weights(p, shared, Schedule(p.plan, p.steps, cta, {}), rank);
        }
        if constexpr (!Config::kQuantizes) {
          cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.tokens));
        }
      }
      __syncwarp();
    }
    if constexpr (Config::Packing::kTableBytes > 0) {
      if (!is_producer) {
        Mainloop::Raw::make_table(shared.decoder_at());
        consumer_barrier<Config>();  // the table is complete for all consumers
      }
    }
    // The previous kernel may have written the group ends: nothing of a grouped product is read before this.
    if (!is_dense(p)) {
      asm volatile("griddepcontrol.wait;" ::: "memory");
      asm volatile("griddepcontrol.launch_dependents;");
      Groups::fill_table(p.groups, shared.table());
    }
    // No thread uses an mbarrier, its own CTA's or another's of the cluster, before all are initialised. The
    // consumers of a kernel that quantizes tokens request the tokens first.
    if constexpr (Config::kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else if constexpr (!Config::kQuantizes) {
      __syncthreads();
    }

    if (is_producer) {
      if constexpr (Config::kQuantizes) {
        __syncthreads();
      }
      if constexpr (Config::kMovesRegisters) {
        cutlass::arch::warpgroup_reg_dealloc<Config::kProducerRegisters>();
      }
      if (warp == Config::kConsumerWarps && cute::elect_one_sync()) {
        MixedInputPlan const plan = is_dense(p) ? p.plan : plan_of_groups(p, shared);
        MixedInputDynamicScheduler dynamic{};
        if constexpr (!Config::kQuantizes) {
          dynamic = p.dynamic;
        }
        produce(p, shared, Schedule(plan, p.steps, cta, dynamic), rank, ahead);
      }
    } else {
      if constexpr (Config::kMovesRegisters) {
        cutlass::arch::warpgroup_reg_alloc<Config::kConsumerRegisters>();
      }
      if constexpr (Config::kQuantizes) {
        bool const has_work = cta < p.plan.active;
        typename Quantizer::Elements elements;
        Quantizer::prepare(shared);
        asm volatile("griddepcontrol.wait;" ::: "memory");  // the previous kernel may have written X
        if (has_work) {
          Quantizer::template load<Config>(p.quantizer, elements);
        }
        __syncthreads();
        if (has_work) {
          Schedule const schedule(p.plan, p.steps, cta, {});
          Quantizer::template quantize<Config>(p.quantizer, shared, elements, [&](int chunk) {
            return schedule.has_step(chunk / Config::kChunks);
          });
        }
      } else if (is_dense(p)) {
        // The epilogue's vectors and C may be new, and D may still be read by the previous kernel.
        asm volatile("griddepcontrol.wait;" ::: "memory");
      }
      consume(p, shared, rank);
    }
    // A CTA must not exit while another of its cluster may multicast into its shared memory or arrive on its
    // mbarriers.
    if constexpr (Config::kCluster > 1) {
      __syncwarp();
      cute::cluster_arrive();  // releases the arrivals on the mbarriers of the other CTAs
      cute::cluster_wait();
    }
  }
};

}  // namespace cutlass_evt
