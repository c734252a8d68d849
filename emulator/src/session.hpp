// What lasts between launches: options, loaded PTX, findings, and what has been executed.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ptx.hpp"
#include "ptxemu.h"

namespace ptxemu {

/// Names of what was executed, each with a count.
class Statistics {
 public:
  void add(char const* category, std::string const& name, u64 count = 1) { sets_[category][name] += count; }
  /// Of one instruction of a kernel that ran, so that tests and mutations know what is reached.
  void cover(Kernel const& kernel, std::vector<u64> const& counts);
  std::string json() const;
  void reset();

  u64 launches = 0, ctas = 0, warp_instructions = 0, stolen_clusters = 0, unread_stores_at_exit = 0;
  double seconds = 0;

 private:
  std::map<std::string, std::map<std::string, u64>> sets_;
  std::map<std::string, std::map<int, u64>> lines_;  // kernel -> PTX line -> times
};

struct Session {
  static Session& instance();

  ptxemu_options options;
  PtxLibrary library;
  Statistics statistics;
  std::string last_error;            // report of the last fatal finding
  std::vector<std::string> hazards;  // one text for each place
  u64 num_hazards = 0;
  bool standalone = false;  // configured by environment variables: findings go to stderr as well

  void report_fatal(std::string const& text);
  void report_hazard(std::string const& text, bool fresh);

 private:
  Session();
};

}  // namespace ptxemu
