// The scheduler: chooses the warp or asynchronous operation that executes next, by the mode and the seed.
//
//   eager   asynchronous operations execute before any warp; warps in random order
//   lazy    asynchronous operations execute only when no warp can
//   random  either, at random
//   pct     the warp or operation of the highest priority, where priorities are random and change at random
//   points
//           (probabilistic concurrency testing)
#include <algorithm>

#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

Machine::Machine(Launch const& launch, Session& session, std::function<void()> run_predecessor)
    : launch_(launch),
      kernel_(*launch.kernel),
      session_(session),
      run_predecessor_(std::move(run_predecessor)),
      random_(session.options.seed),
      executed_(kernel_.code.size()) {
  if (session.options.detect_races != 0) {
    races_ = std::make_unique<RaceDetector>(session.options.trace_fences != 0);
  }
}

Machine::~Machine() {
  session_.statistics.ctas += ctas_;
  session_.statistics.warp_instructions += instructions_;
  session_.statistics.stolen_clusters += stolen_;
  session_.statistics.unread_stores_at_exit += unread_stores_;
  session_.statistics.cover(kernel_, executed_);
  if (races_ != nullptr) {
    for (auto const& [line, count] : races_->useful()) {
      session_.statistics.add_useful(kernel_, line, count);
    }
  }
}

void Machine::run() {
  // The checks of cudaLaunchKernelExC.
  u64 num_clusters = 1, cluster_size = 1;
  for (int i = 0; i < 3; ++i) {
    if (launch_.cluster[i] == 0 || launch_.grid[i] == 0 || launch_.grid[i] % launch_.cluster[i] != 0) {
      fatal("launch: grid dimension %d is %u, must be a multiple of the cluster's, %u", i, launch_.grid[i],
            launch_.cluster[i]);
    }
    num_clusters *= launch_.grid[i] / launch_.cluster[i];
    cluster_size *= launch_.cluster[i];
  }
  u32 const threads = launch_.num_threads();
  if (threads == 0 || threads > 1024 || (kernel_.max_threads != 0 && threads > kernel_.max_threads)) {
    fatal("launch: %u threads a CTA, must be 1 to %u", threads,
          kernel_.max_threads ? kernel_.max_threads : 1024);
  }
  int const capability = session_.options.compute_capability;
  Device const& device = device_of(capability);
  if (launch_.dynamic_shared_bytes + kernel_.static_shared_bytes > device.block_shared_bytes) {
    fatal("launch: %u bytes of shared memory, at most %u",
          launch_.dynamic_shared_bytes + kernel_.static_shared_bytes, device.block_shared_bytes);
  }
  if (cluster_size > device.cluster_ctas) {
    fatal("launch: a cluster of %llu CTAs, at most %u are modelled for compute capability %d.%d",
          static_cast<unsigned long long>(cluster_size), device.cluster_ctas, capability / 10,
          capability % 10);
  }
  for (u64 i = 0; i < num_clusters; ++i) {
    waiting_clusters_.push_back(i);
  }
  // Clusters are resident up to the capacity; the others wait, where try_cancel can take them.
  auto const sms = static_cast<u64>(session_.options.num_sms);
  u64 const capacity = session_.options.resident_clusters > 0
                           ? static_cast<u64>(session_.options.resident_clusters)
                           : std::max<u64>(1, sms / cluster_size);
  for (;;) {
    while (live_.size() < capacity && !waiting_clusters_.empty()) {
      u64 const index = waiting_clusters_.front();
      waiting_clusters_.pop_front();
      launch_cluster(index);
    }
    if (live_.empty()) {
      return;
    }
    schedule_once();
    retire_clusters();
  }
}

/// Executes one asynchronous operation or some instructions of one warp.
void Machine::schedule_once() {
  int const mode = session_.options.mode;
  if (mode == PTXEMU_EAGER) {
    while (run_async()) {
    }
  } else if (mode == PTXEMU_RANDOM && random_() % 4 == 0) {
    run_async();
  }
  if (Warp* const warp = pick_warp()) {
    if (mode == PTXEMU_PCT) {
      if (async_pending() && best_async_priority() > warp->priority) {
        run_async(true);
        return;
      }
      if (random_() % 32 == 0) {
        warp->priority = random_();
      }
    }
    // A quantum of random length: the warp may be preempted after any instruction.
    run_warp(*warp, 1 + random_() % (mode == PTXEMU_PCT ? 64 : 256));
    current_warp_ = nullptr;
    current_ = nullptr;
  } else if (!run_async()) {
    time_out_waits();
  }
}

/// A warp that can run, by priority in pct mode and at random otherwise; null if there is none.
Warp* Machine::pick_warp() {
  size_t const count = warps_.size();
  size_t const start = count == 0 ? 0 : random_() % count;
  Warp* best = nullptr;
  for (size_t i = 0; i < count; ++i) {
    Warp* const warp = warps_[start + i < count ? start + i : start + i - count];
    if (!warp->done && (best == nullptr || warp->priority > best->priority) && runnable(*warp)) {
      best = warp;
      if (session_.options.mode != PTXEMU_PCT) {
        break;
      }
    }
  }
  return best;
}

bool Machine::runnable(Warp& warp) {
  for (Group const& group : warp.groups) {
    if (group.wait == Wait::kNone || is_over(warp, group)) {
      return true;
    }
  }
  return false;
}

bool Machine::is_over(Warp& warp, Group const& group) {
  switch (group.wait) {
    case Wait::kNone: return true;
    case Wait::kMbarrier: return mbarrier(group.wait_cta, group.wait_address).phase != group.wait_parity;
    case Wait::kBarrier: return warp.cta->barriers[group.wait_address].generation != group.wait_generation;
    case Wait::kCluster: return warp.cta->cluster->generation != group.wait_generation;
    case Wait::kConvergence: return false;  // merge() ends this wait
    case Wait::kBulk:
      for (auto const& [lane, bulk] : warp.bulk) {
        if (group.mask >> lane & 1) {
          for (size_t i = 0; i + group.wait_address < bulk.committed.size(); ++i) {
            for (BulkGroups::Store const& store : bulk.committed[i]) {
              if (!*store.finished) {
                return false;
              }
            }
          }
        }
      }
      return true;
    case Wait::kCopies:
      for (auto const& [lane, copies] : warp.copies) {
        if ((group.mask >> lane & 1) != 0 &&
            !std::all_of(copies.begin(), copies.end(),
                         [](std::shared_ptr<bool> const& flag) { return *flag; })) {
          return false;
        }
      }
      return true;
    case Wait::kTmemAlloc:
      return warp.cta->cluster->ctas[warp.cta->rank ^ 1]->pair_arrivals >= group.wait_generation;
  }
  return true;
}

/// Merges groups at the same instruction, which ends a wait for convergence: the merged group tries again. A
/// group that is in the middle of an instruction, waiting or resumed, is not merged.
void Machine::merge(Warp& warp) {
  auto& groups = warp.groups;
  groups.erase(std::remove_if(groups.begin(), groups.end(), [](Group const& g) { return g.mask == 0; }),
               groups.end());
  auto const movable = [](Group const& g) {
    return !g.resumed && (g.wait == Wait::kNone || g.wait == Wait::kConvergence);
  };
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = i + 1; j < groups.size();) {
      if (groups[i].pc == groups[j].pc && movable(groups[i]) && movable(groups[j])) {
        groups[i].mask |= groups[j].mask;
        groups[i].wait = Wait::kNone;
        groups.erase(groups.begin() + static_cast<long>(j));
      } else {
        ++j;
      }
    }
  }
}

/// Executes up to `quantum` instructions of a warp, always of the group with the lowest program counter that
/// can run, so that diverged lanes meet again as soon as possible. Returns false if no group can run.
bool Machine::run_warp(Warp& warp, u64 quantum) {
  for (u64 n = 0; n < quantum; ++n) {
    Group* best = nullptr;
    for (Group& group : warp.groups) {
      if ((best == nullptr || group.pc < best->pc) && is_over(warp, group)) {
        best = &group;
      }
    }
    if (best == nullptr) {
      return n > 0;
    }
    if (best->wait != Wait::kNone) {
      best->resumed = true;
      best->wait = Wait::kNone;
    }
    u32 const alive = warp.alive;
    Outcome const outcome = step(warp, *best);
    if (outcome == Outcome::kNext || outcome == Outcome::kYield) {
      best->pc++;
    }
    // Lanes have exited, so groups that waited for them to converge try again.
    if (warp.alive != alive) {
      for (Group& group : warp.groups) {
        if (group.wait == Wait::kConvergence) {
          group.wait = Wait::kNone;
        }
      }
    }
    if (outcome != Outcome::kNext || warp.groups.size() > 1) {
      merge(warp);
    }
    if (warp.groups.empty() || warp.alive == 0) {
      warp.done = true;
      warps_ended_ = true;
      warp.groups.clear();
      if (!warp.pending_loads.empty() || !warp.pending_stores.empty()) {
        hazard("warp exits with a tcgen05.%s that no tcgen05.wait has completed",
               warp.pending_loads.empty() ? "st" : "ld");
      }
      return true;
    }
    if (outcome == Outcome::kBlocked || outcome == Outcome::kYield) {
      return true;
    }
    if (instructions_ > session_.options.instruction_budget) {
      fatal("instruction budget of %llu exceeded: livelock?",
            static_cast<unsigned long long>(session_.options.instruction_budget));
    }
  }
  return true;
}

/// Executes one instruction for the lanes of a group.
Outcome Machine::step(Warp& warp, Group& group) {
  if (static_cast<size_t>(group.pc) >= kernel_.code.size()) {
    fatal("%s: a warp runs off the end of the kernel", kernel_.name.c_str());
  }
  Instruction const& in = kernel_.code[static_cast<size_t>(group.pc)];
  current_warp_ = &warp;
  current_ = &in;
  // A use of a register that a tcgen05.ld defines finishes the load (exec_tmem.cpp).
  if (!warp.pending_loads.empty()) {
    for (Operand const& operand : in.operands) {
      finish_loads_of(warp, operand);
    }
  }
  u32 const mask = active_mask(warp, in, group.mask);
  ++instructions_;
  executed_[static_cast<size_t>(group.pc)] += mask != 0;
  if (in.lanes == nullptr) {
    return (this->*in.handler)(warp, group, in, mask);
  }
  if (mask != 0) {
    u64 const* sources[8] = {zero_row_, zero_row_, zero_row_, zero_row_};
    Row const* const rows = read_all(warp, in);
    for (size_t i = 1; i < in.operands.size(); ++i) {
      sources[i - 1] = rows[i - 1].values;
    }
    Operand const& destination = in.operands[0];
    in.lanes(in, destination.kind == Operand::kSink ? sink_row_ : warp.row(destination.reg), sources, mask);
  }
  return Outcome::kNext;
}

/// No warp can run and no operation is pending. Every try_wait then returns false once, as its time limit
/// allows; after five such rounds without an event in between, this is a deadlock.
void Machine::time_out_waits() {
  quiet_rounds_ = progress_ == quiet_since_ ? quiet_rounds_ + 1 : 0;
  quiet_since_ = progress_;
  bool any = false;
  for (Warp* warp : warps_) {
    for (Group& group : warp->groups) {
      if (group.wait == Wait::kMbarrier && !warp->done) {
        group.wait = Wait::kNone;
        group.timed_out = true;
        any = true;
      }
    }
  }
  if (!any || quiet_rounds_ > 4) {
    fatal("%s", deadlock_report().c_str());
  }
}

/// Removes clusters all of whose warps have exited, after their asynchronous operations have executed.
void Machine::retire_clusters() {
  if (!warps_ended_) {
    return;
  }
  warps_ended_ = false;
  for (size_t i = 0; i < live_.size();) {
    Cluster& cluster = *live_[i];
    bool all_done = true;
    for (auto& cta : cluster.ctas) {
      if (!cta->done) {
        bool const finished =
            std::all_of(cta->warps.begin(), cta->warps.end(), [](Warp const& warp) { return warp.done; });
        if (finished) {
          retire_cta(*cta);
        }
        all_done = all_done && finished;
      }
    }
    if (!all_done) {
      ++i;
      continue;
    }
    // The shared memory of an exited CTA stays valid until all operations of its cluster have executed.
    auto const owned = [&](auto const& operation) { return operation->owner->cluster == &cluster; };
    while (std::any_of(independent_.begin(), independent_.end(), owned) ||
           std::any_of(fifos_.begin(), fifos_.end(), [&](Cta* cta) { return cta->cluster == &cluster; })) {
      run_async();
    }
    warps_.erase(std::remove_if(warps_.begin(), warps_.end(),
                                [&](Warp* warp) { return warp->cta->cluster == &cluster; }),
                 warps_.end());
    if (races_ != nullptr) {
      races_->remove_cluster(cluster);
    }
    live_.erase(live_.begin() + static_cast<long>(i));
  }
}

/// Checks what a CTA leaves behind when it exits.
void Machine::retire_cta(Cta& cta) {
  cta.done = true;
  if (!cta.tmem_allocations.empty()) {
    hazard("CTA (%u,%u,%u) exits without deallocating TMEM", cta.id[0], cta.id[1], cta.id[2]);
  }
  for (int tmem = 0; tmem < 2; ++tmem) {
    for (Access const& access : cta.pending[tmem]) {
      // CUTLASS kernels without C exit before their last TMA stores have read shared memory; the hardware
      // keeps the memory until then. These stores are counted instead.
      if (std::strcmp(access.what, "TMA store") == 0) {
        ++unread_stores_;
      } else {
        hazard("CTA (%u,%u,%u) exits while a %s is outstanding on its %s", cta.id[0], cta.id[1], cta.id[2],
               access.what, tmem ? "TMEM" : "shared memory");
        break;
      }
    }
  }
}

}  // namespace ptxemu
