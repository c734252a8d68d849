// Programmatic dependent launch in its most adverse order: a launch that may overlap its predecessor starts
// before it, and the predecessor executes when the first thread reaches griddepcontrol.wait. A read ahead of
// the wait thus sees old memory.
#include "queue.hpp"

#include <driver_types.h>

#include <chrono>

namespace ptxemu {

namespace {

constexpr size_t kMaxChain =
    6;  // launches that may overlap, each of which waits in the call stack of the next

}  // namespace

LaunchQueue& LaunchQueue::instance() {
  static auto* const queue = new LaunchQueue;
  return *queue;
}

int LaunchQueue::submit(Launch launch) {
  // A launch that may not overlap its predecessor, or would make the chain too long, waits for all before it.
  bool const adversarial = Session::instance().options.pdl != 0;
  if (!(adversarial && launch.programmatic) || waiting_.size() >= kMaxChain) {
    run_all();
  }
  waiting_.push_back(std::move(launch));
  if (!adversarial) {
    run_all();
    return error(true);
  }
  return 0;
}

int LaunchQueue::flush() {
  run_all();
  return error(true);
}

int LaunchQueue::error(bool clear) {
  int const result = error_;
  error_ = clear ? 0 : error_;
  return result;
}

void LaunchQueue::run_all() {
  if (running_ || waiting_.empty()) {
    return;
  }
  running_ = true;
  run(waiting_.size() - 1);
  waiting_.clear();
  running_ = false;
}

/// Executes a launch, and by the time it returns all launches before it.
void LaunchQueue::run(size_t index) {
  Session& session = Session::instance();
  bool predecessor_ran = index == 0;
  // A launch executes its predecessor at most once: in griddepcontrol.wait, or below when it has ended.
  auto const run_predecessor = [&] {
    if (!predecessor_ran) {
      predecessor_ran = true;
      run(index - 1);
    }
  };
  auto const start = std::chrono::steady_clock::now();
  try {
    Machine machine(waiting_[index], session, run_predecessor);
    machine.run_reporting();
  } catch (Fatal const& fatal) {
    session.report_fatal(fatal.what());
    error_ = error_ == 0 ? cudaErrorLaunchFailure : error_;
  } catch (std::exception const& other) {  // e.g. std::bad_alloc on the host
    session.report_fatal(std::string("the emulator failed: ") + other.what());
    error_ = error_ == 0 ? cudaErrorLaunchFailure : error_;
  }
  ++session.statistics.launches;
  session.statistics.seconds +=
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  run_predecessor();
}

}  // namespace ptxemu
