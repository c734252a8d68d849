// Races between warps on shared memory, found with vector clocks: an access must be ordered after the
// conflicting accesses of other warps by barriers, mbarriers or the completion of asynchronous operations.
#pragma once

#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "types.hpp"

namespace ptxemu {

struct AsyncOperation;
struct Cluster;
struct Cta;
struct Warp;

/// Asynchronous operations themselves are not tracked here: Machine::check_conflicts covers them while they
/// are pending. Lanes of one warp are taken for ordered. What is reported is a race; not every race is found,
/// since a word keeps only a few of its readers and writers.
class RaceDetector {
 public:
  void add_warp(Warp& warp);
  void remove_cluster(Cluster const& cluster);

  void arrive_barrier(Warp const& warp, u32 id);
  void complete_barrier(Cta const& cta, u32 id);
  void leave_barrier(Warp const& warp, u32 id);
  void arrive_cluster(Warp const& warp);
  void complete_cluster(Cluster const& cluster);
  void leave_cluster(Warp const& warp);
  void arrive_mbarrier(Warp const& warp, Cta const& cta, u32 offset);
  void complete_phase(Cta const& cta, u32 offset);
  void observe_mbarrier(Warp const& warp, Cta const& cta, u32 offset);
  /// An operation is issued, and later arrives at an mbarrier: who sees that phase is ordered after the
  /// issue.
  void start(Warp const& warp, AsyncOperation const& operation);
  void finish(AsyncOperation const& operation, Cta const& cta, u32 offset);

  /// The conflicting access that this one races with, or null. `atomic` accesses do not race with each other.
  char const* access(Warp const& warp, Cta const& cta, u32 offset, u32 bytes, bool is_write, bool atomic);

 private:
  using Clock = std::vector<u32>;  // by warp of the cluster
  /// What was released so far, and what those who leave or observe acquire.
  struct Point {
    Clock released, acquired;
  };
  struct Entry {
    u32 clock = 0;  // 0: none
    u16 warp = 0;
    u8 bytes = 0;  // of the word, one bit each
    u8 atomic = 0;
  };
  static constexpr int kEntries = 4;
  struct Word {
    Entry readers[kEntries], writers[kEntries];
  };
  struct State {  // of a cluster
    std::vector<Clock> clocks;
    Point barrier;
    std::map<std::pair<Cta const*, u32>, Point> barriers, mbarriers;
    std::unordered_map<Cta const*, std::vector<Word>> words;
  };

  State& state(Cluster const& cluster) { return states_[&cluster]; }
  State& state(Warp const& warp);
  static void join(Clock& into, Clock const& from);
  void release(Warp const& warp, Point& point);
  static bool conflicts(Entry const (&entries)[kEntries], Clock const& clock, u16 self, u8 bytes,
                        bool atomic);
  static void record(Entry (&entries)[kEntries], Clock const& clock, Entry const& entry);

  std::unordered_map<Cluster const*, State> states_;
  std::unordered_map<u64, Clock> operations_;
};

}  // namespace ptxemu
