// Launches wait here, so that one that may start before its predecessor has run does so.
#pragma once

#include <deque>

#include "machine.hpp"

namespace ptxemu {

class LaunchQueue {
 public:
  static LaunchQueue& instance();

  /// Takes the launch. 0, or the error of launches that had to run now.
  int submit(Launch launch);
  /// Runs everything. 0, or the first error since the last call.
  int flush();
  /// The error that flush() would return of what has run already; clears it if told to.
  int error(bool clear);

 private:
  void run(size_t index);
  void run_all();

  std::deque<Launch> waiting_;
  int error_ = 0;
  bool running_ = false;
};

}  // namespace ptxemu
