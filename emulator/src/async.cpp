// Operations that complete later: issued by an instruction, run when the scheduler says.
#include <algorithm>

#include "machine.hpp"

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

/// From here until it has run, whoever touches what the operation touches is told so.
void Machine::issue(std::shared_ptr<AsyncOperation> const& operation, bool in_fifo) {
  ++progress_;
  Cta const* const fifo = in_fifo ? operation->owner : nullptr;
  std::vector<Access> accesses;
  for (AsyncOperation::Place const& p : operation->places) {
    accesses.push_back(
        {p.low, p.high, p.lane_low, p.lane_high, p.write, operation->id, operation->what, fifo});
    check_conflicts(p.cta, p.tmem, accesses.back(), operation->what, fifo);
  }
  for (size_t i = 0; i < accesses.size(); ++i) {
    AsyncOperation::Place const& p = operation->places[i];
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
  for (AsyncOperation::Place const& place : operation.places) {
    auto& pending = place.cta->pending[place.tmem];
    pending.erase(std::remove_if(pending.begin(), pending.end(),
                                 [&](Access const& access) { return access.operation == operation.id; }),
                  pending.end());
  }
}

/// Completes one operation: any independent one, or the oldest of a CTA's tcgen05 operations. False: none
/// pending.
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
  current_warp_ = operation->warp;  // findings are the operation's, not of whoever happens to execute
  current_ = operation->instruction;
  forget_accesses(*operation);
  operation->run();
  current_warp_ = warp;
  current_ = instruction;
  return true;
}

}  // namespace ptxemu
