// Barriers of warps, CTAs and clusters, and fences (PTX ISA, "Parallel Synchronization and Communication
// Instructions": bar.warp.sync; bar, barrier; barrier.cluster; membar, fence).
//
// The emulator executes one instruction at a time, so that memory is sequentially consistent. Fences and the
// order of arrivals matter to the RaceDetector alone, which reports what they do not order.
#include "families.hpp"
#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

namespace {

enum Kind { kSync, kArrive, kPopc, kAnd, kOr };
enum Fence { kThread, kProxyShared, kProxyOther, kInits, kAcquireMap };

}  // namespace

/// mode of bar: the kind, and the index of the operand that holds the barrier's number; of barrier.cluster:
/// its Order; of fence: its kind.
bool decode_barrier(Instruction& in) {
  std::string const& name = in.parts[0];
  if (name == "fence" || name == "membar") {
    if (in.has("mbarrier_init")) {
      in.mode[0] = kInits;
    } else if (!in.has("proxy")) {
      in.mode[0] = kThread;
    } else if (in.has("tensormap::generic") && in.has("acquire")) {
      in.mode[0] = kAcquireMap;
    } else {
      bool const async = in.has("async") || in.has("async::generic");
      in.mode[0] = async && !in.has("global") ? kProxyShared : kProxyOther;
    }
    in.handler = &Machine::exec_fence;
  } else if (in.has("warp")) {
    in.handler = &Machine::exec_warp_sync;
  } else if (in.has("cluster")) {
    in.handler = in.has("arrive") ? &Machine::exec_cluster_arrive : &Machine::exec_cluster_wait;
    in.mode[0] = static_cast<int>(in.has("relaxed") ? Order::kRelaxed : Order::kFull);
    return in.has("arrive") || in.has("wait");
  } else {
    bool const reduce = in.has("red");
    in.mode[0] = in.has("arrive") ? kArrive
                 : !reduce        ? kSync
                 : in.has("popc") ? kPopc
                 : in.has("and")  ? kAnd
                                  : kOr;
    in.mode[1] = reduce ? 1 : 0;
    in.handler = &Machine::exec_barrier;
  }
  return true;
}

/// bar.warp.sync mask
Outcome Machine::exec_warp_sync(Warp& warp, Group& group, Instruction const& in, u32) {
  return converged(warp, group, static_cast<u32>(uniform(warp, in.operands[0], group.mask)))
             ? Outcome::kNext
             : Outcome::kBlocked;
}

/// bar.sync, bar.arrive and bar.red, for whole warps: a warp counts as 32 threads. A waiting warp executes
/// the instruction again when the barrier's generation has changed, and then finishes with group.resumed set.
Outcome Machine::exec_barrier(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  size_t const first = static_cast<size_t>(in.mode[1]);
  bool const reduce = first == 1;
  if (!group.resumed) {
    if (!converged(warp, group, kFullMask)) {
      return Outcome::kBlocked;
    }
    if (mask == 0) {
      return Outcome::kNext;
    }
    // Operands: the barrier, and the number of threads unless all of the CTA take part.
    size_t const numbers = in.operands.size() - first - (reduce ? 1 : 0);
    u32 const id = static_cast<u32>(uniform(warp, in.operands[first], mask)) & 15;
    NamedBarrier& barrier = warp.cta->barriers[id];
    bool const all = numbers < 2;
    u32 count = 0;
    if (all) {
      for (Warp const& other : warp.cta->warps) {
        count += other.alive != 0 ? kWarpSize : 0;
      }
    } else {
      count = static_cast<u32>(uniform(warp, in.operands[first + 1], mask));
      count = (count + kWarpSize - 1) / kWarpSize * kWarpSize;
    }
    // The first arrival fixes how many threads this generation expects; later ones must agree.
    if (barrier.arrived == 0) {
      barrier.expected = count;
      barrier.all_threads = all;
      barrier.votes = barrier.voters = 0;
    } else if (barrier.expected != count) {
      fatal("barrier %u: %u threads expected, %u by earlier arrivals", id, count, barrier.expected);
    }
    if (reduce) {
      Row vote;
      read(warp, in.operands.back(), vote);
      for (int l = 0; l < kWarpSize; ++l) {
        barrier.voters += mask >> l & 1;
        barrier.votes += mask >> l & 1 & static_cast<u32>(vote[l]);
      }
    }
    if (races_ != nullptr) {
      races_->arrive_barrier(warp, id);
    }
    // A waiter remembers the generation and resumes when it has changed, so it cannot mistake a later use of
    // the barrier for its own.
    u64 const generation = barrier.generation;
    barrier.arrived += kWarpSize;
    if (barrier.arrived > barrier.expected) {
      fatal("barrier %u: more than %u threads arrive", id, barrier.expected);
    }
    if (barrier.arrived == barrier.expected) {
      barrier.arrived = 0;
      barrier.generation++;
      // Waiters read the results after the next generation may have begun to count.
      barrier.result_votes = barrier.votes;
      barrier.result_voters = barrier.voters;
      if (races_ != nullptr) {
        races_->complete_barrier(*warp.cta, id);
      }
    } else if (in.mode[0] != kArrive) {
      group.wait = Wait::kBarrier;
      group.wait_address = id;
      group.wait_generation = generation;
      return Outcome::kBlocked;
    } else {
      return Outcome::kNext;
    }
    group.wait_address = id;
  }
  group.resumed = false;
  u32 const id = group.wait_address;
  if (races_ != nullptr && in.mode[0] != kArrive) {
    races_->leave_barrier(warp, id);
  }
  if (reduce) {
    NamedBarrier const& barrier = warp.cta->barriers[id];
    u64 const result = in.mode[0] == kPopc  ? barrier.result_votes
                       : in.mode[0] == kAnd ? barrier.result_votes == barrier.result_voters
                                            : barrier.result_votes != 0;
    write_all(warp, in.operands[0], mask, result);
  }
  return Outcome::kNext;
}

/// barrier.cluster.arrive
Outcome Machine::exec_cluster_arrive(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  Cluster& cluster = *warp.cta->cluster;
  if (warp.cluster_arrived) {
    fatal("barrier.cluster.arrive twice without a wait");
  }
  warp.cluster_arrived = true;
  warp.cluster_generation = cluster.generation;  // the wait ends when this generation is complete
  cluster.arrived += kWarpSize;
  if (races_ != nullptr) {
    races_->arrive_cluster(warp, static_cast<Order>(in.mode[0]));
  }
  if (cluster.arrived == cluster.num_threads) {
    cluster.arrived = 0;
    cluster.generation++;
    if (races_ != nullptr) {
      races_->complete_cluster(cluster);
    }
  }
  return Outcome::kNext;
}

/// barrier.cluster.wait
Outcome Machine::exec_cluster_wait(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!group.resumed) {
    if (!converged(warp, group, kFullMask)) {
      return Outcome::kBlocked;
    }
    if (mask == 0) {
      return Outcome::kNext;
    }
    if (!warp.cluster_arrived) {
      fatal("barrier.cluster.wait without an arrive");
    }
    warp.cluster_arrived = false;
    if (warp.cta->cluster->generation == warp.cluster_generation) {
      group.wait = Wait::kCluster;
      group.wait_generation = warp.cluster_generation;
      return Outcome::kBlocked;
    }
  }
  group.resumed = false;
  if (races_ != nullptr) {
    races_->leave_cluster(warp, static_cast<Order>(in.mode[0]));
  }
  return Outcome::kNext;
}

/// fence and membar. A fence that some lanes execute counts for the whole warp. fence.proxy.async of global
/// memory alone and the release fence of tensor maps have no effect: accesses to global memory are not
/// tracked.
Outcome Machine::exec_fence(Warp& warp, Group&, Instruction const& in, u32 mask) {
  if (mask == 0 || races_ == nullptr) {
    return Outcome::kNext;
  }
  switch (in.mode[0]) {
    case kThread: races_->fence(warp); break;
    case kProxyShared: races_->fence_proxy(warp, in.line); break;
    case kInits: races_->fence_inits(warp); break;
    case kAcquireMap: {
      Row address;
      read(warp, in.operands[0], address);
      for (int l = 0; l < kWarpSize; ++l) {
        if (mask >> l & 1) {
          races_->acquire_map(warp, address[l]);
        }
      }
      break;
    }
    default: break;
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
