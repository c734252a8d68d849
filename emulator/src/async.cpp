// Asynchronous operations: an instruction issues them, and the scheduler decides when they execute.
//
// Two kinds differ in their order. An independent operation (TMA, try_cancel) may execute at any time after
// its issue. The tcgen05 operations of a CTA execute in the order of their issue, through the CTA's queue.
#include <algorithm>

#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

std::shared_ptr<AsyncOperation> Machine::make_operation(Cta* owner, char const* what) {
  auto operation = std::make_shared<AsyncOperation>();
  operation->id = next_operation_++;
  operation->priority = random_();
  operation->what = what;
  operation->owner = owner;
  operation->warp = current_warp_;
  operation->instruction = current_;
  return operation;
}

/// Queues an operation. Until it has executed, its regions are pending accesses, and a conflicting access to
/// them is a hazard: the result would depend on when the operation executes.
void Machine::issue(std::shared_ptr<AsyncOperation> const& operation, bool in_fifo) {
  ++progress_;
  Cta const* const fifo = in_fifo ? operation->owner : nullptr;
  std::vector<Access> accesses;
  for (AsyncOperation::Region const& p : operation->regions) {
    accesses.push_back(
        {p.low, p.high, p.lane_low, p.lane_high, p.write, operation->id, operation->what, fifo});
    check_conflicts(p.cta, p.tmem, accesses.back(), operation->what, fifo);
    if (p.tmem) {
      check_tmem_order(*current_warp_, p.cta, accesses.back(), operation->what);
    } else {
      check_order(*operation, p);
    }
  }
  for (size_t i = 0; i < accesses.size(); ++i) {
    AsyncOperation::Region const& p = operation->regions[i];
    p.cta->pending[p.tmem].push_back(accesses[i]);
  }
  if (!in_fifo) {
    independent_.push_back(operation);
    return;
  }
  if (operation->owner->fifo.empty()) {
    fifos_.push_back(operation->owner);
  }
  operation->owner->fifo.push_back(operation);
}

/// The order of an operation of the async proxy after the accesses of threads to the bytes that it reads or
/// writes, at its issue (PTX ISA, "Async proxy"; CUDA Programming Guide, "Cluster Launch Control", for the
/// fence between a read of a response and the next try_cancel). cp.async belongs to the generic proxy. Before
/// a TMA load overwrites bytes that threads have read, NVIDIA's kernels have no proxy fence, and none is
/// demanded.
void Machine::check_order(AsyncOperation const& operation, AsyncOperation::Region const& region) {
  if (races_ == nullptr || operation.generic_proxy) {
    return;
  }
  if (char const* const wrong = races_->async_access(*current_warp_, *region.cta, region.low, region.high,
                                                     region.write, operation.fenced_reads)) {
    hazard("%s %s shared memory [%u, %u), %s", operation.what, region.write ? "writes" : "reads", region.low,
           region.high, wrong);
  }
}

void Machine::forget_access(Cta* cta, Access const& access) {
  auto& pending = cta->pending[1];
  pending.erase(std::remove_if(pending.begin(), pending.end(),
                               [&](Access const& other) { return other.operation == access.operation; }),
                pending.end());
}

u64 Machine::best_async_priority() const {
  u64 best = 0;
  for (auto const& operation : independent_) {
    best = std::max(best, operation->priority);
  }
  for (Cta const* cta : fifos_) {
    best = std::max(best, cta->fifo.front()->priority);
  }
  return best;
}

void Machine::forget_accesses(AsyncOperation const& operation) {
  for (AsyncOperation::Region const& region : operation.regions) {
    auto& pending = region.cta->pending[region.tmem];
    pending.erase(std::remove_if(pending.begin(), pending.end(),
                                 [&](Access const& access) { return access.operation == operation.id; }),
                  pending.end());
  }
}

/// Executes one operation: an independent one, or the oldest in the queue of a CTA. Chooses at random, or by
/// the priority of the pct schedule. Returns false if none is pending.
bool Machine::run_async(bool highest_priority) {
  size_t const count = independent_.size() + fifos_.size();
  if (count == 0) {
    return false;
  }
  auto const candidate = [&](size_t i) {
    return i < independent_.size() ? independent_[i] : fifos_[i - independent_.size()]->fifo.front();
  };
  size_t chosen = random_() % count;
  for (size_t i = 0; highest_priority && i < count; ++i) {
    chosen = candidate(i)->priority > candidate(chosen)->priority ? i : chosen;
  }
  std::shared_ptr<AsyncOperation> const operation = candidate(chosen);
  if (chosen < independent_.size()) {
    independent_.erase(independent_.begin() + static_cast<long>(chosen));
  } else {
    operation->owner->fifo.pop_front();
    if (operation->owner->fifo.empty()) {
      fifos_.erase(fifos_.begin() + static_cast<long>(chosen - independent_.size()));
    }
  }
  Warp* const warp = current_warp_;
  Instruction const* const instruction = current_;
  current_warp_ = operation->warp;  // reports name the issuer, not the instruction that happens to be current
  current_ = operation->instruction;
  forget_accesses(*operation);
  operation->run();
  current_warp_ = warp;
  current_ = instruction;
  return true;
}

}  // namespace ptxemu
