// Detection of races between warps on shared memory with vector clocks: a chain of barriers, mbarriers or
// completed asynchronous operations must order an access after the conflicting accesses of other warps.
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

/// Each warp has a clock, and a vector of the clocks of all warps of its cluster up to which it is ordered
/// after them. Arriving at a synchronization object releases the warp's vector to it; leaving the object
/// acquires what was released. Every report is a race of the schedule that ran. Some races are missed: lanes
/// of one warp count as ordered, and a word remembers only a few of its readers and writers. Accesses of
/// asynchronous operations are not tracked here: Machine::check_conflicts covers them while the operations
/// are pending.
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
  /// An asynchronous operation is issued, and when it completes it arrives at an mbarrier: a warp that
  /// observes the completed phase is ordered after the issue.
  void start(Warp const& warp, AsyncOperation const& operation);
  void finish(AsyncOperation const& operation, Cta const& cta, u32 offset);

  /// Records an access. Returns the kind of access that it races with, or null. Two `atomic` accesses do not
  /// race.
  char const* access(Warp const& warp, Cta const& cta, u32 offset, u32 bytes, bool is_write, bool atomic);

 private:
  using Clock = std::vector<u32>;  // by warp of the cluster
  /// A synchronization object: what arrivals have released, and what was released by the last completion,
  /// which is what a warp acquires when it leaves the object or observes it.
  struct Point {
    Clock released, acquired;
  };
  struct Entry {    // an access to a word
    u32 clock = 0;  // of the warp at the access; 0: no entry
    u16 warp = 0;
    u8 bytes = 0;  // one bit for each byte of the word
    u8 atomic = 0;
  };
  static constexpr int kEntries = 4;
  struct Word {  // 4 bytes of shared memory
    Entry readers[kEntries], writers[kEntries];
  };
  struct State {  // of a cluster
    std::vector<Clock> clocks;
    Point barrier;  // barrier.cluster
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
  std::unordered_map<u64, Clock> operations_;  // what each operation's issue released, by AsyncOperation::id
};

}  // namespace ptxemu
