// The order of accesses to shared memory and tensor memory (TMEM), by vector clocks: what the chain of
// barriers, mbarriers, fences and completed asynchronous operations before an access orders, it must order as
// the PTX ISA's "Memory Consistency Model" and "tcgen05 Memory Consistency Model" demand.
#pragma once

#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "types.hpp"

namespace ptxemu {

struct AsyncOperation;
struct Cluster;
struct Cta;
struct Warp;

/// How an arrival or a wait orders memory (PTX ISA, "Release and Acquire Patterns"): kFull releases or
/// acquires; kRelaxed does so only together with a fence of the thread, and orders tcgen05 operations and
/// fenced mbarrier.inits alone.
enum class Order { kFull, kRelaxed };

/// Each warp has a clock. A vector of the clocks of all warps of its cluster says up to where their accesses
/// are ordered before the warp's next one. There is one such vector for each of several kinds of order:
///
///   execution any synchronization, relaxed or not
///   base      base causality order: barriers, and release and acquire
///   proxy     as base, with a fence.proxy.async on the way: accesses of the generic proxy that operations of
///   the
///             async proxy may follow (PTX ISA, "Proxies")
///   tcgen05   tcgen05 operations that a tcgen05.fence::before_thread_sync orders before later
///   synchronization inits     mbarrier.inits behind a fence.mbarrier_init
///
/// Arriving at a synchronization object releases the warp's vectors to it; leaving the object acquires what
/// was released. Every report is a race of the schedule that ran. Some are missed: lanes of one warp count as
/// ordered, and a word remembers only a few of its readers and writers.
class RaceDetector {
 public:
  /// trace: useful() is wanted, which takes time.
  explicit RaceDetector(bool trace = false) : trace_(trace) {}

  void add_warp(Warp& warp);
  void remove_cluster(Cluster const& cluster);

  void arrive_barrier(Warp const& warp, u32 id);
  void complete_barrier(Cta const& cta, u32 id);
  void leave_barrier(Warp const& warp, u32 id);
  void arrive_cluster(Warp const& warp, Order order);
  void complete_cluster(Cluster const& cluster);
  void leave_cluster(Warp const& warp, Order order);
  void init_mbarrier(Warp const& warp, Cta const& cta, u32 offset);
  void arrive_mbarrier(Warp const& warp, Cta const& cta, u32 offset, Order order);
  void complete_phase(Cta const& cta, u32 offset);
  void observe_mbarrier(Warp const& warp, Cta const& cta, u32 offset, Order order);
  /// Whether the mbarrier's init is ordered before an operation of the warp, or, with `async`, before the
  /// signal of an asynchronous operation that the warp issues.
  bool init_is_ordered(Warp const& warp, Cta const& cta, u32 offset, bool async);

  // Fences.
  void fence(Warp const& warp);                  // fence.acq_rel, .sc, .release, .acquire; membar
  void fence_proxy(Warp const& warp, int line);  // fence.proxy.async of shared memory, at a line of the PTX
  void fence_inits(Warp const& warp);            // fence.mbarrier_init
  void fence_tcgen05_before(Warp const& warp);
  void fence_tcgen05_after(Warp const& warp);

  /// An asynchronous operation is issued, and when it completes it arrives at an mbarrier: a warp that
  /// observes the completed phase is ordered after the issue, and after what the operation has written to
  /// shared memory.
  void start(Warp const& warp, AsyncOperation const& operation, bool is_commit = false);
  void finish(AsyncOperation const& operation, Cta const& cta, u32 offset);

  /// The wait_group.read at a line is the first to complete a store's reads of these bytes.
  void note_wait(Cta const& cta, u32 low, u32 high, int line);

  /// In how many clusters that ended a fence or wait is useful, by its line: a fence.proxy.async that is the
  /// first to order an access of threads to a word before an operation of the async proxy on that word, and a
  /// wait_group.read of note_wait whose bytes are written afterwards.
  std::map<int, u64> const& useful() const { return useful_; }

  /// Records an access of a thread. Returns what it races with, or null. Two `atomic` accesses do not race.
  char const* access(Warp const& warp, Cta const& cta, u32 offset, u32 bytes, bool is_write, bool atomic);
  /// Checks an access of the async proxy to bytes [low, high), which the warp issues now. Returns what is
  /// wrong with its order, or null. `fenced_reads`: threads that have read the bytes must have executed a
  /// proxy fence too, before they are overwritten.
  char const* async_access(Warp const& warp, Cta const& cta, u32 low, u32 high, bool is_write,
                           bool fenced_reads);

  /// An access to TMEM, of columns [low, high) and quarters [first, last) of the lanes. Returns whether it is
  /// ordered after the accesses of other warps that it conflicts with.
  bool tmem_is_ordered(Warp const& warp, Cta const& cta, u32 low, u32 high, u32 first, u32 last,
                       bool is_write);
  void record_tmem(Warp const& warp, Cta const& cta, u32 low, u32 high, u32 first, u32 last, bool is_write);

  /// A tensor map in global memory is changed by threads, and acquired by fence.proxy.tensormap.
  void change_map(Warp const& warp, u64 address);
  void acquire_map(Warp const& warp, u64 address);
  /// What is wrong with a use of the map by an operation that the warp issues, or null.
  char const* use_map(Warp const& warp, u64 address);

 private:
  using Clock = std::vector<u32>;  // by warp of the cluster; [kEngine] is that of asynchronous operations
  static constexpr u16 kEngine = 0;
  struct Known {
    Clock execution, base, proxy, tcgen05, inits;
  };
  /// A synchronization object: what arrivals have released, and what was released by the last completion,
  /// which is what a warp acquires when it leaves the object or observes it.
  struct Point {
    Known released, acquired;
    u16 init_warp = 0;  // of an mbarrier: the warp that initialised it, and that warp's clock
    u32 init_clock = 0;
  };
  struct WarpState {
    Known now;
    Clock tmem;        // tcgen05 operations that the last fence::after_thread_sync orders before later ones
    Known fenced;      // `now` at the last thread fence, which a relaxed arrival releases
    Known unacquired;  // what relaxed waits have observed, which the next thread fence acquires
  };
  struct Entry {    // an access to a word
    u32 clock = 0;  // of the warp at the access; 0: no entry
    u16 warp = 0;
    u8 bytes = 0;  // one bit for each byte of the word
    u8 atomic = 0;
  };
  // The response to a try_cancel has a reader in each of the eight warps of CUTLASS's dense kernels.
  static constexpr int kReaders = 8, kWriters = 4;
  struct Word {  // 4 bytes of shared memory
    Entry readers[kReaders], writers[kWriters];
  };
  struct TmemCell {  // a column of a quarter of the lanes: the last warp that wrote it, and that read it
    u32 write_clock = 0, read_clock = 0;
    u16 writer = 0, reader = 0;
  };
  static constexpr u8 kWritten = 1, kRead = 2;
  static constexpr u32 kUnit = 16;    // asynchronous operations write units of 16 bytes
  static constexpr u32 kChunk = 128;  // bytes for which threads' accesses are noted in one flag
  struct Memory {                     // of a CTA
    std::vector<Word> words;
    std::vector<u32> async_writes;  // by unit: the clock of the engine at its last asynchronous write
    std::vector<u8> touched;        // by chunk: whether threads have accessed it
    std::vector<TmemCell> tmem;     // [column][quarter]
    // With trace_, by word: whether accesses of threads (kWritten, kRead) matter to an operation of the async
    // proxy, and those which the fence.proxy.async of a line was the first to order.
    std::vector<u8> matters;
    std::map<int, std::vector<u8>> fenced;
    // With trace_, by word: the line of note_wait, until a write; 0: none.
    std::vector<int> waited;
  };
  struct MapState {
    Entry changed;
    std::vector<Entry> acquired;  // since the last change
  };
  struct State {  // of a cluster
    std::vector<WarpState> warps;
    Point barrier;  // barrier.cluster
    std::map<std::pair<Cta const*, u32>, Point> barriers, mbarriers;
    std::unordered_map<Cta const*, Memory> memory;
    std::map<u64, MapState> maps;
    u32 engine = 0;              // asynchronous operations that have completed
    std::set<int> needed_waits;  // the lines of waits whose bytes were written
  };
  struct Issued {  // what the issue of an operation released, and the clock of its completion
    Known known;
    u32 completed = 0;
  };

  State& state(Cluster const& cluster) { return states_[&cluster]; }
  State& state(Warp const& warp);
  WarpState& self(Warp const& warp);
  Memory& memory(State& state, Cta const& cta);
  static void join(Clock& into, Clock const& from);
  static void join(Known& into, Known const& from);
  static u32 at(Clock const& clock, u16 warp) { return warp < clock.size() ? clock[warp] : 0; }
  u32 clock_of(Warp const& warp);
  void advance(Warp const& warp);
  void note_fence(Warp const& warp, int line);
  static void note_write(State& state, Memory& memory, u32 low, u32 high);
  void release(Warp const& warp, Known& released, Order order);
  void acquire(Warp const& warp, Known const& acquired, Order order);
  template <int N>
  static bool conflicts(Entry const (&entries)[N], Clock const& clock, u16 self, u8 bytes, bool atomic);
  template <int N>
  static void record(Entry (&entries)[N], Clock const& clock, Entry const& entry);

  bool trace_;
  std::map<int, u64> useful_;
  std::unordered_map<Cluster const*, State> states_;
  std::unordered_map<u64, Issued> operations_;  // by AsyncOperation::id
};

}  // namespace ptxemu
