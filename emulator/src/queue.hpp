// The queue of launches, which lets a programmatic dependent launch start before its predecessor has
// executed.
#pragma once

#include <deque>

#include "machine.hpp"

namespace ptxemu {

/// A launch stays in the queue until something needs its result. The launch that is executed first is the
/// last one; it executes its predecessor when it reaches griddepcontrol.wait, or when it ends.
class LaunchQueue {
 public:
  static LaunchQueue& instance();

  /// Adds a launch. Launches that it cannot overlap execute first. Returns 0, or with the option pdl = 0 the
  /// launch's own cudaError_t.
  int submit(Launch launch);
  /// Executes all launches. Returns 0, or the first error since the last call.
  int flush();
  /// The first error of the launches that have executed, without executing others; `clear` forgets it.
  int error(bool clear);

 private:
  void run(size_t index);
  void run_all();

  std::deque<Launch> waiting_;
  int error_ = 0;
  bool running_ = false;  // run_all() is active: calls of the runtime from within it do not start it again
};

}  // namespace ptxemu
