// The SM90 GEMM D = epilogue(A B^T) of two operands that the tensor cores read as they are, dense and of
// groups that are ragged in m or in k.
//
// It does not use CUTLASS's kernels, for three reasons. All groups are parts of the same three tensors, so
// that two tensor maps of A, one of B and one of D serve all groups, and the kernel needs no tables:
// CUTLASS's grouped kernel reads tables that another kernel has to write, and rewrites three maps whenever a
// CTA proceeds to another group. A tile is stored while the next one is multiplied; stores bound the products
// of experts with few tokens. And the type of D and the terms of the epilogue are chosen at run time, so that
// few kernels are compiled.
//
// Roles of the warpgroups of a CTA:
//   consumers  the first Config::kConsumerGroups warpgroups; each multiplies and stores 64 rows of a tile
//   producer   the first warp of the last warpgroup; one thread of it fills the ring of stages
//   publisher  the second warp of that warpgroup; it writes the work item of each tile: where the tile lies,
//              how many steps of k it has, and the vectors of its rows and columns
#pragma once

#include "cute/arch/cluster_sm90.hpp"
#include "cute/arch/copy_sm90_desc.hpp"
#include "cute/arch/copy_sm90_tma.hpp"
#include "cute/atom/mma_atom.hpp"
#include "cute/atom/mma_traits_sm90_gmma.hpp"
#include "cute/tensor.hpp"
#include "cutlass/arch/reg_reconfig.h"
#include "cutlass_evt/kernel/sm90_gemm_epilogue.hpp"
#include "cutlass_evt/kernel/sm90_gemm_schedule.hpp"
#include "cutlass_evt/ring.hpp"

namespace cutlass_evt {

/// The kernel's device code. Config is a Sm90GemmConfig, Schedule one of the schedules for it, and Epilogue
/// Sm90GemmEpilogue<Config> or a type with its interface.
template <class Config, class Schedule, class Epilogue_ = Sm90GemmEpilogue<Config>>
struct Sm90GemmKernel {
  using Element = typename Config::Element;
  using WorkItem = typename Config::WorkItem;
  using Epilogue = Epilogue_;
  using Shared = typename Config::Shared;
  using Params = typename Epilogue::Params;
  using Mma = decltype(cute::make_tiled_mma(
      cute::GMMA::ss_op_selector<
          Element, Element, float,
          cute::Shape<cute::_64, cute::Int<Config::kColumns>, cute::Int<Config::kDepth>>>()));
  template <int kExtent>
  using OperandLayout =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_K_SW128_Atom<Element>{},
                                   cute::Shape<cute::Int<kExtent>, cute::Int<Config::kDepth>>{}));
  using Accumulators =
      decltype(cute::partition_fragment_C(Mma{}, cute::Shape<cute::_64, cute::Int<Config::kColumns>>{}));
  using StagePosition = RingPosition<Config::kStages>;
  using ItemPosition = RingPosition<Config::kWorkItems>;

  /// Calls take(tile) for every tile of this CTA. All lanes of a warp call this together.
  template <class Take>
  CUTLASS_DEVICE static void for_each_tile(Params const& p, int rank, Take const& take) {
    Schedule schedule(p, rank);
    Sm90GemmTile tile;
    int64_t const stride = gridDim.x / Config::kCluster;
    for (int64_t index = blockIdx.x / Config::kCluster; schedule.find(index, &tile); index += stride) {
      take(tile);
      __syncwarp();  // the lanes of the producer diverge where one of them loads
    }
  }

  /// The producer's loop. A CTA loads its rows of A, and its part of the columns of B for the whole cluster.
  CUTLASS_DEVICE static void produce(Params const& p, Shared& shared, int rank) {
    // Not elect.sync: the compiler moves it into the loop, where it elects a thread of those that arrive
    // first.
    bool const is_first = threadIdx.x % 32 == 0;
    StagePosition at;
    for_each_tile(p, rank, [&](Sm90GemmTile const& tile) {
      if (!is_first) {
        return;
      }
      bool const has_few_rows = tile.end - tile.row <= Config::kFewRows;
      CUtensorMap const* const map_of_a = has_few_rows ? &p.few_a : &p.a;
      int const rows = has_few_rows ? Config::kFewRows : Config::kRows;
      auto const bytes = static_cast<uint32_t>((rows + Config::kColumns) * Config::kRowBytes);
      int const column = tile.column + rank * Config::kLoadColumns;
      CUTLASS_PRAGMA_NO_UNROLL
      for (int step = tile.first_step; step < tile.first_step + tile.steps; ++step) {
        shared.empty[at.stage].wait(at.phase ^ 1);
        shared.full[at.stage].arrive_and_expect_tx(bytes);
        auto* const full = reinterpret_cast<uint64_t*>(&shared.full[at.stage]);
        constexpr auto kEvictNormal = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
        int const depth = step * Config::kDepth;
        cute::SM90_TMA_LOAD_2D::copy(map_of_a, full, kEvictNormal, shared.a[at.stage], depth, tile.row);
        Element* const b = shared.b[at.stage] + rank * Config::kLoadColumns * Config::kDepth;
        if constexpr (Config::kCluster > 1) {
          cute::SM90_TMA_LOAD_MULTICAST_3D::copy(&p.b, full,
                                                 static_cast<uint16_t>((1 << Config::kCluster) - 1),
                                                 kEvictNormal, b, depth, column, tile.matrix);
        } else {
          cute::SM90_TMA_LOAD_3D::copy(&p.b, full, kEvictNormal, b, depth, column, tile.matrix);
        }
        at.advance();
      }
    });
  }

  /// The publisher's loop. It works one tile ahead of the consumers, so that they need not find the group of
  /// a tile or wait for its vectors from global memory.
  CUTLASS_DEVICE static void publish(Params const& p, Shared& shared, int rank) {
    if (threadIdx.x % 32 == 0) {
      cute::prefetch_tma_descriptor(reinterpret_cast<cute::TmaDescriptor const*>(&p.d));
    }
    ItemPosition at;
    for_each_tile(p, rank, [&](Sm90GemmTile const& tile) {
      shared.consumed[at.stage].wait(at.phase ^ 1);
      Epilogue::write_item(p, tile, shared.items[at.stage]);
      shared.published[at.stage].arrive();  // by every lane, for what it has written
      at.advance();
    });
    shared.consumed[at.stage].wait(at.phase ^ 1);
    if (threadIdx.x % 32 == 0) {
      shared.items[at.stage].tile.steps = -1;
    }
    shared.published[at.stage].arrive();
  }

  /// This warp has read a stage: one lane for each CTA of the cluster arrives there.
  CUTLASS_DEVICE static void release(Shared& shared, int stage) {
    uint32_t const lane = threadIdx.x % 32;
    shared.empty[stage].arrive(lane, lane < Config::kCluster);
  }

  /// Issues the wgmma of a stage. Those of the first stage of a tile write the accumulators, which need not
  /// be cleared before; those of the others add to them.
  template <bool kIsFirst>
  CUTLASS_DEVICE static void multiply_stage(Shared& shared, StagePosition const& at, int warpgroup,
                                            Accumulators& accumulators) {
    Mma mma;
    auto const thread = mma.get_slice(static_cast<int>(threadIdx.x % 128));
    shared.full[at.stage].wait(at.phase);
    auto const a = cute::make_tensor(
        cute::make_smem_ptr(shared.a[at.stage] + warpgroup * 64 * Config::kDepth), OperandLayout<64>{});
    auto const b =
        cute::make_tensor(cute::make_smem_ptr(shared.b[at.stage]), OperandLayout<Config::kColumns>{});
    auto const of_a = thread.partition_fragment_A(a);
    auto const of_b = thread.partition_fragment_B(b);
    mma.accumulate_ = kIsFirst ? cute::GMMA::ScaleOut::Zero : cute::GMMA::ScaleOut::One;
    cute::warpgroup_fence_operand(accumulators);
    cute::warpgroup_arrive();
    CUTLASS_PRAGMA_UNROLL
    for (int k = 0; k < cute::size<2>(of_a); ++k) {
      cute::gemm(mma, of_a(cute::_, cute::_, k), of_b(cute::_, cute::_, k), accumulators);
      mma.accumulate_ = cute::GMMA::ScaleOut::One;
    }
    cute::warpgroup_commit_batch();
    cute::warpgroup_fence_operand(accumulators);
  }

  /// accumulators = the product of the warpgroup's 64 rows with the columns of the tile, over `steps` stages.
  CUTLASS_DEVICE static void multiply(Shared& shared, StagePosition& at, int steps, int warpgroup,
                                      Accumulators& accumulators) {
    if (steps == 0) {
      cute::clear(accumulators);
      cute::warpgroup_fence_operand(accumulators);  // otherwise the compiler clears them for every tile
      return;
    }
    multiply_stage<true>(shared, at, warpgroup, accumulators);
    int previous = at.stage;
    at.advance();
    CUTLASS_PRAGMA_NO_UNROLL
    for (int step = 1; step < steps; ++step) {
      multiply_stage<false>(shared, at, warpgroup, accumulators);
      cute::warpgroup_wait<1>();
      release(shared, previous);
      previous = at.stage;
      at.advance();
    }
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(accumulators);
    release(shared, previous);
  }

  /// The consumers' loop.
  CUTLASS_DEVICE static void consume(Params const& p, Shared& shared, int warpgroup) {
    StagePosition at;
    ItemPosition current;
    Epilogue epilogue(p, shared);
    for (;;) {
      shared.published[current.stage].wait(current.phase);
      WorkItem const& item = shared.items[current.stage];
      int const steps = item.tile.steps;
      if (steps < 0) {
        break;
      }
      Accumulators accumulators;
      multiply(shared, at, steps, warpgroup, accumulators);
      epilogue.store(item, accumulators);
      __syncwarp();  // every lane has read the item
      if (threadIdx.x % 32 == 0) {
        shared.consumed[current.stage].arrive();
      }
      current.advance();
    }
    epilogue.wait();
  }

  CUTLASS_DEVICE static void run(Params const& p, char* dynamic) {
    // The 128-byte swizzle needs stages at multiples of 1024 bytes. Multicast writes to the same offset in
    // each CTA of the cluster, and the offsets agree, since all CTAs run this code.
    uint32_t const at = cute::cast_smem_ptr_to_uint(dynamic);
    Shared& shared = *reinterpret_cast<Shared*>(dynamic + ((at + 1023) / 1024 * 1024 - at));
    int const warpgroup = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 128), 0);
    int const warp = __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0);
    int const rank = static_cast<int>(blockIdx.x) % Config::kCluster;
    if (threadIdx.x == 0) {
      for (int i = 0; i < Config::kStages; ++i) {
        // full: the producer arrives once, with the number of bytes that the stage will receive. empty: every
        // consumer warp of the cluster arrives once when it has read the stage.
        shared.full[i].init(1);
        shared.empty[i].init(Config::kConsumerGroups * 4 * Config::kCluster);
      }
      for (int i = 0; i < Config::kWorkItems; ++i) {
        // published: every lane of the publisher arrives once, when it has written its part of the item.
        // consumed: every consumer warp of this CTA arrives once, when it has read the item.
        shared.published[i].init(32);
        shared.consumed[i].init(Config::kConsumerGroups * 4);
      }
      cutlass::arch::fence_barrier_init();
    }
    // No thread uses an mbarrier, its own CTA's or another's of the cluster, before all are initialised.
    if constexpr (Config::kCluster > 1) {
      cute::cluster_arrive_relaxed();
      cute::cluster_wait();
    } else {
      __syncthreads();
    }
    // The previous kernel may have written the group ends, the operands and the vectors, and may read D.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    if (warpgroup == Config::kConsumerGroups) {
      if constexpr (Config::kConsumerGroups > 1) {
        cutlass::arch::warpgroup_reg_dealloc<40>();
      }
      if (warp == Config::kConsumerGroups * 4) {
        produce(p, shared, rank);
      } else if (warp == Config::kConsumerGroups * 4 + 1) {
        publish(p, shared, rank);
      }
    } else {
      if constexpr (Config::kConsumerGroups > 1) {
        cutlass::arch::warpgroup_reg_alloc<232>();
      }
      consume(p, shared, warpgroup);
    }
    // A CTA must not exit while another of its cluster may multicast into its shared memory or arrive on its
    // mbarriers.
    if constexpr (Config::kCluster > 1) {
      __syncwarp();
      cute::cluster_arrive();  // releases the arrivals on the mbarriers of the other CTA
      cute::cluster_wait();
    }
  }
};

/// The entry point. The grid is one-dimensional, a multiple of the cluster.
template <class Config, class Schedule>
__global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)
    sm90_gemm(__grid_constant__ Sm90GemmParams const params) {
  extern __shared__ char sm90_gemm_shared[];
  Sm90GemmKernel<Config, Schedule>::run(params, sm90_gemm_shared);
}

}  // namespace cutlass_evt
