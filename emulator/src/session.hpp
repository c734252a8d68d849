// The state that outlives a launch: options, loaded PTX, findings and statistics.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "ptx.hpp"
#include "ptxemu.h"

namespace ptxemu {

/// Counts of what launches have executed: totals, and by category the names of opcodes, descriptors and TMA
/// modes.
class Statistics {
 public:
  void add(char const* category, std::string const& name, u64 count = 1) { sets_[category][name] += count; }
  /// Adds the instructions of a launch; `counts` holds how often each instruction of the kernel executed.
  /// Tests of coverage and the mutation tool read which lines were reached.
  void cover(Kernel const& kernel, std::vector<u64> const& counts);
  /// A fence or a wait of the kernel has ordered an access; README.md says what that means.
  void add_useful(Kernel const& kernel, int line, u64 count = 1) { useful_[kernel.name][line] += count; }
  std::string json() const;  // one line
  void reset();

  u64 launches = 0, ctas = 0, warp_instructions = 0;
  u64 stolen_clusters = 0;        // clusters whose work a try_cancel took over
  u64 unread_stores_at_exit = 0;  // TMA stores that had not read their source when their CTA exited
  double seconds = 0;

 private:
  std::map<std::string, std::map<std::string, u64>> sets_;  // category -> name -> times
  std::map<std::string, std::map<int, u64>> lines_;         // kernel -> PTX line -> times
  std::map<std::string, std::map<int, u64>> useful_;        // likewise
};

/// The emulator of the process.
struct Session {
  static Session& instance();

  ptxemu_options options;
  PtxLibrary library;
  Statistics statistics;
  std::string last_error;                       // report of the last fatal finding
  std::vector<std::string> hazards;             // a report for each kind of hazard and line of PTX
  u64 num_hazards = 0;                          // all of them, repetitions included
  bool standalone = false;                      // PTXEMU_PTX is set: findings go to stderr too
  u32 held_columns = 0, held_shared_bytes = 0;  // of TMEM and of shared memory, by a CTA of the launch that
                                                // waits in griddepcontrol.wait for the one that executes

  void report_fatal(std::string const& text);
  void report_hazard(std::string const& text, bool fresh);  // fresh: not a repetition

 private:
  Session();
};

}  // namespace ptxemu
