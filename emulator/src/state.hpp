// The state of one launch: clusters, CTAs, warps, and the asynchronous operations that are pending.
//
// The emulator executes in one host thread: warps and asynchronous operations take turns (scheduler.cpp), so
// none of this state is locked. Calls of the replacement runtime must come from one thread at a time.
#pragma once

#include <array>
#include <cstdlib>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "ptx.hpp"

namespace ptxemu {

struct Cta;
struct Cluster;

/// A kernel with its launch configuration and its arguments.
struct Launch {
  std::shared_ptr<Kernel> kernel;
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_shared_bytes;
  std::vector<u8> params;
  bool
      programmatic;  // programmatic stream serialization: the launch may start before its predecessor has run
  u32 num_threads() const { return block[0] * block[1] * block[2]; }
};

// Windows of the generic address space. Bits 24 and up of a shared address are the CTA's rank in its cluster,
// as on the hardware; CUTLASS relies on that when it clears bit 24 to address the leader of a CTA pair.
constexpr u64 kParamWindow = 0x5A0000000000ull;
constexpr u64 kSharedWindow = 0x5B0000000000ull;
constexpr u64 kLocalWindow = 0x5C0000000000ull;
constexpr u64 kWindowBytes = 1ull << 32;
constexpr u32 kSharedBase = 1024;  // bytes that the system reserves at the start of shared memory
constexpr u32 kRankShift = 24;
constexpr u32 kOffsetMask = (1u << kRankShift) - 1;
constexpr u32 kTmemColumns = 512, kTmemLanes = 128;
constexpr u32 kTmemQuarters = 4;  // of the lanes: a warp accesses those of its index modulo 4

/// A range of shared memory or TMEM that a pending asynchronous operation will access: bytes [low, high) of
/// shared memory, or columns [low, high) and lanes [lane_low, lane_high) of TMEM.
struct Access {
  u32 low, high;
  u32 lane_low, lane_high;
  bool write;
  u64 operation;     // AsyncOperation::id, 0 for an access of a thread
  char const* what;  // the operation's name, for reports
  Cta const* fifo;   // the CTA whose tcgen05 queue holds the operation, null for others; a queue executes in
                     // order, so its operations do not conflict with each other
};

/// An operation that completes later than the instruction that issued it: a TMA load or store, an operation
/// of tcgen05, or clusterlaunchcontrol.try_cancel.
struct AsyncOperation {
  struct Region {
    Cta* cta;
    bool tmem;  // else shared memory
    u32 low, high, lane_low, lane_high;
    bool write;
  };
  u64 id, priority;  // priority: of the pct schedule
  char const* what;
  Cta* owner;
  Warp* warp;  // the issuer, which reports name
  Instruction const* instruction;
  std::vector<Region> regions;
  std::function<void()> run;   // the effect of the operation
  bool generic_proxy = false;  // else its accesses belong to the async proxy
  bool fenced_reads = false;   // threads' reads of what it overwrites need a proxy fence

  void reads(Cta* cta, u32 low, u32 high) { regions.push_back({cta, false, low, high, 0, 0, false}); }
  void writes(Cta* cta, u32 low, u32 high) { regions.push_back({cta, false, low, high, 0, 0, true}); }
  void reads_tmem(Cta* cta, u32 low, u32 high) {
    regions.push_back({cta, true, low, high, 0, kTmemLanes, false});
  }
  void writes_tmem(Cta* cta, u32 low, u32 high) {
    regions.push_back({cta, true, low, high, 0, kTmemLanes, true});
  }
};

/// What a group of lanes waits for.
enum class Wait : u8 {
  kNone,
  kMbarrier,     // mbarrier.try_wait
  kBarrier,      // bar.sync, bar.red
  kCluster,      // barrier.cluster.wait
  kConvergence,  // the other lanes of a .sync or .aligned instruction
  kBulk,         // cp.async.bulk.wait_group
  kCopies,       // cp.async.wait_all
  kTmemAlloc,    // tcgen05.alloc of the other CTA of a pair
};

/// Lanes of a warp that share a program counter. The groups of a warp are disjoint and hold all lanes that
/// have not exited; lanes that arrive at the same instruction are merged into one group.
struct Group {
  int pc = 0;  // index in Kernel::code
  u32 mask = 0;
  Wait wait = Wait::kNone;
  bool resumed = false;    // the wait is over, and the handler is called again to finish the instruction
  bool timed_out = false;  // mbarrier.try_wait must return now, with false if need be
  int failed_pc = -1;      // of the try_wait that returned false last
  // What the group waits for: kMbarrier has all but the generation; kBarrier has its number in wait_address;
  // kBulk has the number of groups that may stay pending there.
  Cta* wait_cta = nullptr;
  u32 wait_address = 0, wait_parity = 0;
  u64 wait_generation = 0;  // the wait ends when the barrier has another generation
};

/// The bulk async-groups of one lane.
struct BulkGroups {
  struct Store {  // by TMA, of bytes [low, high) of a CTA's shared memory
    std::shared_ptr<bool> finished;
    Cta* cta;
    u32 low, high;
  };
  std::vector<std::vector<Store>> committed;  // oldest first
  std::vector<Store> open;                    // since the last commit_group
  size_t waited_read = 0, waited = 0;         // groups that a wait has completed, with and without .read
};

/// A tcgen05.ld that has been issued and is not complete yet.
struct PendingLoad {
  Access access;         // the TMEM that it reads
  bool defined = false;  // whether its registers have their values
  std::vector<int> registers;
  std::vector<std::array<u16, kWarpSize>> lanes, columns;  // the TMEM cell of each register and thread
};

struct Warp {
  Cta* cta;
  u32 index;  // in the CTA
  u32 alive;  // lanes that have not exited
  std::vector<Group> groups;
  // A row of 32 lanes for each register.
  std::unique_ptr<u64[], void (*)(void*)> registers{nullptr, std::free};
  std::vector<u8> local;                                     // local memory, lane by lane
  std::map<int, BulkGroups> bulk;                            // by lane
  std::map<int, std::vector<std::shared_ptr<bool>>> copies;  // by lane: those of cp.async, true once executed
  std::vector<PendingLoad> pending_loads;
  std::vector<Access> pending_stores;  // tcgen05.st that no tcgen05.wait::st has completed yet
  std::vector<u8> is_pending;          // by register: 1 while a pending load will define it
  bool done = false;
  u64 priority = 0;              // of the pct schedule
  bool alloc_arrived = false;    // in tcgen05.alloc.cta_group::2, until both CTAs have arrived
  bool cluster_arrived = false;  // between barrier.cluster.arrive and .wait
  u64 cluster_generation = 0;    // of the cluster barrier when the warp arrived
  u32 race_id = 0;               // index in the clocks of RaceDetector
  bool cancel_failed = false;    // a query_cancel of this warp has returned that a try_cancel failed

  u64* row(int reg) { return registers.get() + static_cast<size_t>(reg) * kWarpSize; }
};

/// One of the 16 barriers of a CTA (PTX ISA, "bar, barrier"). It completes, and its generation grows by one,
/// when `arrived` reaches `expected`.
struct NamedBarrier {
  u32 arrived = 0, expected = 0;  // threads
  bool all_threads = false;       // the barrier expects every thread that has not exited
  u64 generation = 0;
  u32 votes = 0, voters = 0;                // bar.red: lanes whose predicate is true, and all lanes
  u32 result_votes = 0, result_voters = 0;  // the same of the generation that completed last
};

/// An mbarrier object (PTX ISA, "mbarrier"). The phase completes when no arrivals and no bytes are pending.
struct Mbarrier {
  u32 pending, expected;  // arrivals
  i32 tx_count;           // bytes that are expected and have not been written, negative if they came first
  u32 phase;              // its parity, 0 or 1
};

struct Cta {
  u32 id[3];
  u32 rank;  // in the cluster
  Cluster* cluster;
  u32 shared_end;                   // the first byte after its shared memory
  std::vector<u8> shared, written;  // each byte of shared memory, and whether it has been written
  std::vector<u32> tmem;            // [lane][column], empty until the first allocation
  std::vector<u8> tmem_written;
  std::map<u32, u32> tmem_allocations;  // first column -> columns
  bool relinquished = false;            // tcgen05.relinquish_alloc_permit has executed
  bool launched_dependents = false;     // griddepcontrol.launch_dependents has executed
  u64 pair_arrivals = 0;  // at tcgen05.alloc.cta_group::2, which waits for the other CTA of the pair
  u32 pair_columns = 0, pair_base = 0;  // of that allocation
  NamedBarrier barriers[16];
  std::vector<Warp> warps;
  std::deque<std::shared_ptr<AsyncOperation>> fifo;  // tcgen05 operations, which execute in order
  std::set<u32> mbarriers;                           // offsets of mbarriers between init and inval
  std::vector<Access> pending[2];                    // of asynchronous operations: to shared memory, to TMEM
  bool done = false;                                 // all warps have exited

  u32& tmem_word(u32 lane, u32 column) { return tmem[lane * kTmemColumns + column]; }
  u8& tmem_is_written(u32 lane, u32 column) { return tmem_written[lane * kTmemColumns + column]; }
};

struct Cluster {
  u64 index;    // in the grid of clusters
  u32 base[3];  // coordinates of its first CTA
  std::vector<std::unique_ptr<Cta>> ctas;
  // The cluster barrier: threads that it expects, threads that have arrived, and completions.
  u32 num_threads = 0, arrived = 0;
  u64 generation = 0;
};

}  // namespace ptxemu
