// The state of one launch: clusters, CTAs, warps, asynchronous operations, and what executes them.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "memory.hpp"
#include "session.hpp"
#include "tensormap.hpp"

namespace ptxemu {

struct Cta;
struct Cluster;

struct Launch {
  std::shared_ptr<Kernel> kernel;
  u32 grid[3], block[3], cluster[3];
  u32 dynamic_shared_bytes;
  std::vector<u8> params;
  bool programmatic;  // may start before its predecessor has run
  u32 num_threads() const { return block[0] * block[1] * block[2]; }
};

// Windows of the generic address space. Of a shared address, bits 24 and up are the CTA's rank in its
// cluster, as on the hardware (CUTLASS clears bit 24 to reach the leader of a CTA pair).
constexpr u64 kParamWindow = 0x5A0000000000ull;
constexpr u64 kSharedWindow = 0x5B0000000000ull;
constexpr u64 kLocalWindow = 0x5C0000000000ull;
constexpr u64 kWindowBytes = 1ull << 32;
constexpr u32 kSharedBase = 1024;  // what the system reserves at the start of shared memory
constexpr u32 kMaxSharedBytes = 232448;
constexpr u32 kRankShift = 24;
constexpr u32 kOffsetMask = (1u << kRankShift) - 1;
constexpr u32 kTmemColumns = 512, kTmemLanes = 128;

/// Bytes of shared memory, or columns and lanes of TMEM, that an asynchronous operation will touch.
struct Access {
  u32 low, high;
  u32 lane_low, lane_high;
  bool write;
  u64 operation;
  char const* what;
  Cta const* fifo;  // of tcgen05 operations that execute in order: whose
};

/// Something that happens later than the instruction that issued it.
struct AsyncOperation {
  struct Place {
    Cta* cta;
    bool tmem;
    u32 low, high, lane_low, lane_high;
    bool write;
  };
  u64 id, priority;
  char const* what;
  Cta* owner;
  Warp* warp;  // that issued it
  Instruction const* instruction;
  std::vector<Place> places;
  std::function<void()> run;

  void reads(Cta* cta, u32 low, u32 high) { places.push_back({cta, false, low, high, 0, 0, false}); }
  void writes(Cta* cta, u32 low, u32 high) { places.push_back({cta, false, low, high, 0, 0, true}); }
  void reads_tmem(Cta* cta, u32 low, u32 high) {
    places.push_back({cta, true, low, high, 0, kTmemLanes, false});
  }
  void writes_tmem(Cta* cta, u32 low, u32 high) {
    places.push_back({cta, true, low, high, 0, kTmemLanes, true});
  }
};

enum class Wait : u8 { kNone, kMbarrier, kBarrier, kCluster, kConvergence, kBulk, kTmemAlloc };

/// Lanes of a warp at one instruction.
struct Group {
  int pc = 0;
  u32 mask = 0;
  Wait wait = Wait::kNone;
  bool resumed = false;    // the wait is over: the instruction finishes what it began
  bool timed_out = false;  // mbarrier.try_wait must answer now
  int failed_pc = -1;      // of the try_wait that answered "not yet" last
  Cta* wait_cta = nullptr;
  u32 wait_address = 0, wait_parity = 0;
  u64 wait_generation = 0;
};

/// Bulk groups of one lane; each operation is a flag that it has finished reading.
struct BulkGroups {
  using Flag = std::shared_ptr<bool>;
  std::vector<std::vector<Flag>> committed;
  std::vector<Flag> open;
};

/// A tcgen05.ld whose registers are not defined yet.
struct PendingLoad {
  u64 operation;
  std::vector<int> registers;
  std::vector<std::array<u16, kWarpSize>> lanes, columns;  // of each register
};

struct Warp {
  Cta* cta;
  u32 index;
  u32 alive;
  std::vector<Group> groups;
  std::unique_ptr<u64[], void (*)(void*)> registers{nullptr, std::free};  // rows of 32 lanes
  std::vector<u8> local;                                                  // local_bytes of each lane
  std::map<int, BulkGroups> bulk;                                         // by lane
  std::vector<PendingLoad> pending_loads;
  std::vector<u8> is_pending;                 // by register
  std::vector<std::pair<u32, u32>> unfenced;  // shared bytes written through the generic proxy
  bool done = false;
  u64 priority = 0;
  bool alloc_arrived = false;
  bool cluster_arrived = false;
  u64 cluster_generation = 0;
  u32 race_id = 0;  // number in the cluster

  u64* row(int reg) { return registers.get() + static_cast<size_t>(reg) * kWarpSize; }
};

struct NamedBarrier {
  u32 arrived = 0, expected = 0;
  bool all_threads = false;  // expects whoever has not exited
  u64 generation = 0;
  u32 votes = 0, voters = 0;                // bar.red
  u32 result_votes = 0, result_voters = 0;  // of the generation that completed last
};

struct Mbarrier {
  u32 pending, expected;
  i32 tx_count;
  u32 phase;
};

struct Cta {
  u32 id[3];
  u32 rank;
  Cluster* cluster;
  u32 shared_end;
  std::vector<u8> shared, written, dirty;  // dirty: by the generic proxy, not fenced since
  std::vector<u32> tmem;                   // [lane][column]
  std::vector<u8> tmem_written;
  std::map<u32, u32> tmem_allocations;  // column -> columns
  bool relinquished = false;
  u64 pair_arrivals = 0;  // alloc.cta_group::2 is a rendezvous with the peer
  u32 pair_columns = 0, pair_base = 0;
  NamedBarrier barriers[16];
  std::vector<Warp> warps;
  std::deque<std::shared_ptr<AsyncOperation>> fifo;  // tcgen05 operations, in order
  std::set<u32> mbarriers;                           // offsets of live ones
  std::vector<Access> pending[2];                    // of shared memory, of TMEM
  bool done = false;

  u32& tmem_word(u32 lane, u32 column) { return tmem[lane * kTmemColumns + column]; }
  u8& tmem_is_written(u32 lane, u32 column) { return tmem_written[lane * kTmemColumns + column]; }
};

struct Cluster {
  u64 index;
  u32 base[3];
  std::vector<std::unique_ptr<Cta>> ctas;
  u32 num_threads = 0, arrived = 0;
  u64 generation = 0;
};

class RaceDetector;

class Machine {
 public:
  /// `run_predecessor` runs what the launch programmatically depends on; it does so once.
  Machine(Launch const& launch, Session& session, std::function<void()> run_predecessor);
  ~Machine();
  /// Runs to the end. A Fatal that leaves it says where execution stood.
  void run_reporting();

  // Handlers, by family; see families.hpp.
#define PTXEMU_HANDLER(name) Outcome name(Warp&, Group&, Instruction const&, u32 mask)
  PTXEMU_HANDLER(exec_unmodelled);
  PTXEMU_HANDLER(exec_nothing);
  PTXEMU_HANDLER(exec_sleep);
  PTXEMU_HANDLER(exec_branch);
  PTXEMU_HANDLER(exec_branch_indexed);
  PTXEMU_HANDLER(exec_exit);
  PTXEMU_HANDLER(exec_trap);
  PTXEMU_HANDLER(exec_grid_wait);
  PTXEMU_HANDLER(exec_move);
  PTXEMU_HANDLER(exec_set_predicate);
  PTXEMU_HANDLER(exec_cvta);
  PTXEMU_HANDLER(exec_load);
  PTXEMU_HANDLER(exec_store);
  PTXEMU_HANDLER(exec_atomic);
  PTXEMU_HANDLER(exec_ldmatrix);
  PTXEMU_HANDLER(exec_stmatrix);
  PTXEMU_HANDLER(exec_shuffle);
  PTXEMU_HANDLER(exec_vote);
  PTXEMU_HANDLER(exec_redux);
  PTXEMU_HANDLER(exec_elect);
  PTXEMU_HANDLER(exec_active_mask);
  PTXEMU_HANDLER(exec_warp_sync);
  PTXEMU_HANDLER(exec_barrier);
  PTXEMU_HANDLER(exec_cluster_arrive);
  PTXEMU_HANDLER(exec_cluster_wait);
  PTXEMU_HANDLER(exec_proxy_fence);
  PTXEMU_HANDLER(exec_mapa);
  PTXEMU_HANDLER(exec_mbarrier_init);
  PTXEMU_HANDLER(exec_mbarrier_inval);
  PTXEMU_HANDLER(exec_mbarrier_arrive);
  PTXEMU_HANDLER(exec_mbarrier_expect_tx);
  PTXEMU_HANDLER(exec_mbarrier_wait);
  PTXEMU_HANDLER(exec_tma_load);
  PTXEMU_HANDLER(exec_tma_store);
  PTXEMU_HANDLER(exec_bulk_commit);
  PTXEMU_HANDLER(exec_bulk_wait);
  PTXEMU_HANDLER(exec_tensormap_replace);
  PTXEMU_HANDLER(exec_tensormap_copy);
  PTXEMU_HANDLER(exec_clc_try_cancel);
  PTXEMU_HANDLER(exec_clc_is_canceled);
  PTXEMU_HANDLER(exec_clc_first_ctaid);
  PTXEMU_HANDLER(exec_tcgen05_alloc);
  PTXEMU_HANDLER(exec_tcgen05_dealloc);
  PTXEMU_HANDLER(exec_tcgen05_relinquish);
  PTXEMU_HANDLER(exec_tcgen05_cp);
  PTXEMU_HANDLER(exec_tcgen05_mma);
  PTXEMU_HANDLER(exec_tcgen05_commit);
  PTXEMU_HANDLER(exec_tcgen05_ld);
  PTXEMU_HANDLER(exec_tcgen05_st);
  PTXEMU_HANDLER(exec_tcgen05_wait);
#undef PTXEMU_HANDLER

 private:
  // Scheduling (scheduler.cpp).
  void run();
  void launch_cluster(u64 index);
  std::unique_ptr<Cta> make_cta(Cluster& cluster, u32 rank);
  bool runnable(Warp& warp);
  bool is_over(Warp& warp, Group const& group);
  Warp* pick_warp();
  bool run_warp(Warp& warp, u64 quantum);
  Outcome step(Warp& warp, Group& group);
  void schedule_once();
  void time_out_waits();
  void retire_clusters();
  void retire_cta(Cta& cta);
  void merge(Warp& warp);
  std::string deadlock_report();
  std::string place() const;  // of the instruction that executes
  void hazard(char const* format, ...) __attribute__((format(printf, 2, 3)));
  u64 first_cta_of(u64 cluster_index, u32 coordinates[3]) const;

  // Operands (operands.cpp).
  struct Row {  // an operand's value on the 32 lanes
    u64 scratch[kWarpSize];
    u64 const* values;
    u64 operator[](int lane) const { return values[lane]; }
  };
  void read(Warp& warp, Operand const& operand, Row& row);
  Row* read_all(Warp& warp, Instruction const& in);
  void write(Warp& warp, Operand const& operand, int lane, u64 value);
  u64 special(Warp const& warp, int id, int lane) const;
  u32 active_mask(Warp& warp, Instruction const& in, u32 mask);
  u64 uniform(Warp& warp, Operand const& operand, u32 mask);  // value in the lowest lane
  bool converged(Warp& warp, Group& group, u32 lanes);
  void finish_loads_of(Warp& warp, Operand const& operand);
  void finish_load(Warp& warp, size_t index);

  // Shared memory and its mbarriers (shared.cpp, exec_mbarrier.cpp).
  Cta* shared_cta(Cta* self, u32 address, bool cluster, u32* offset);
  u8* shared_bytes(Cta* cta, u32 offset, u32 bytes);
  void shared_read(Warp& warp, Cta* cta, u32 offset, u32 bytes, void* out);
  bool is_atomic() const;
  void shared_write(Warp& warp, Cta* cta, u32 offset, u32 bytes, void const* in);
  void check_conflicts(Cta const* cta, bool tmem, Access const& access, char const* what, Cta const* fifo);
  void memory_read(Warp& warp, Space space, u64 address, u32 bytes, int lane, void* out);
  void memory_write(Warp& warp, Space space, u64 address, u32 bytes, int lane, void const* in);
  static Space space_of(Space space, u64* address);
  Mbarrier mbarrier(Cta* cta, u32 offset);
  void set_mbarrier(Cta* cta, u32 offset, Mbarrier barrier);
  void arrive(Cta* cta, u32 offset, u32 count, i32 expect_bytes = 0);
  void complete_bytes(Cta* cta, u32 offset, u32 bytes);

  // Asynchronous operations (async.cpp).
  std::shared_ptr<AsyncOperation> make_operation(Cta* owner, char const* what);
  void issue(std::shared_ptr<AsyncOperation> const& operation, bool in_fifo);
  bool async_pending() const { return !independent_.empty() || !fifos_.empty(); }
  u64 best_async_priority() const;
  bool run_async(bool highest_priority = false);
  void forget_accesses(AsyncOperation const& operation);

  // TMA, CLC, tcgen05.
  TensorMap read_tensormap(u64 address);
  void load_box(Cta* cta, TensorMap const& map, i32 const* coordinates, u32 offset);
  void store_box(Cta* cta, TensorMap const& map, i32 const* coordinates, u32 offset);
  void answer_try_cancel(Cta* cta, u32 response, u32 barrier, bool multicast);
  std::vector<Cta*> cta_group(Cta* cta, int size);
  u32 allocate_tmem(Cta* cta, u32 columns);
  void check_tmem(Cta* cta, u32 column, u32 columns);
  void copy_to_tmem(Cta* cta, u32 column, u64 descriptor);
  struct Mma;
  void multiply(Mma const& mma);
  void read_operand_rows(Cta* cta, u64 descriptor, u32 rows, float* out);
  void read_scales(Cta* cta, u32 column, u32 rows, bool e8m0, float* out);

  Launch const& launch_;
  Kernel const& kernel_;
  Session& session_;
  std::function<void()> run_predecessor_;
  std::mt19937_64 random_;
  std::deque<u64> waiting_clusters_;
  std::vector<std::unique_ptr<Cluster>> live_;
  std::vector<Warp*> warps_;  // of live clusters, not done
  std::vector<std::shared_ptr<AsyncOperation>> independent_;
  std::vector<Cta*> fifos_;  // that hold operations
  u64 next_operation_ = 1;
  u64 instructions_ = 0, ctas_ = 0, stolen_ = 0, unread_stores_ = 0;
  u64 progress_ = 0, quiet_since_ = ~0ull;  // counts of events, to tell a deadlock from waiting
  int quiet_rounds_ = 0;
  std::vector<u64> executed_;  // by instruction
  std::set<std::string> reported_;
  Warp* current_warp_ = nullptr;
  Instruction const* current_ = nullptr;
  bool warps_ended_ = false;  // since clusters were last retired
  bool track_dirty_ = false;  // the kernel stores by TMA what threads wrote
  u64 zero_row_[kWarpSize] = {};
  u64 sink_row_[kWarpSize] = {};
  Row rows_[8];
  std::unique_ptr<RaceDetector> races_;
};

}  // namespace ptxemu
