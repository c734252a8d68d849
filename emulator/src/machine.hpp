// Executes one launch: the handlers of instructions, the scheduler, and what they share.
#pragma once

#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "memory.hpp"
#include "session.hpp"
#include "state.hpp"
#include "tensormap.hpp"

namespace ptxemu {

class RaceDetector;

/// One launch, from its first cluster to its last. All randomness comes from the session's seed, so that a
/// launch with the same options executes in the same order.
class Machine {
 public:
  /// `run_predecessor` executes the launch before this one; griddepcontrol.wait calls it, at most once.
  Machine(Launch const& launch, Session& session, std::function<void()> run_predecessor);
  ~Machine();
  /// Executes the launch to its end. A Fatal that leaves this function names the kernel and the instruction.
  void run_reporting();

  // Handlers. Each is defined, and documented, in the file of its family; see families.hpp.
#define PTXEMU_HANDLER(name) Outcome name(Warp&, Group&, Instruction const&, u32 mask)
  PTXEMU_HANDLER(exec_unmodelled);
  PTXEMU_HANDLER(exec_absent);
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
  PTXEMU_HANDLER(exec_mma_sync);
  PTXEMU_HANDLER(exec_shuffle);
  PTXEMU_HANDLER(exec_vote);
  PTXEMU_HANDLER(exec_match);
  PTXEMU_HANDLER(exec_redux);
  PTXEMU_HANDLER(exec_elect);
  PTXEMU_HANDLER(exec_active_mask);
  PTXEMU_HANDLER(exec_warp_sync);
  PTXEMU_HANDLER(exec_barrier);
  PTXEMU_HANDLER(exec_cluster_arrive);
  PTXEMU_HANDLER(exec_cluster_wait);
  PTXEMU_HANDLER(exec_fence);
  PTXEMU_HANDLER(exec_launch_dependents);
  PTXEMU_HANDLER(exec_mapa);
  PTXEMU_HANDLER(exec_mbarrier_init);
  PTXEMU_HANDLER(exec_mbarrier_inval);
  PTXEMU_HANDLER(exec_mbarrier_arrive);
  PTXEMU_HANDLER(exec_mbarrier_expect_tx);
  PTXEMU_HANDLER(exec_mbarrier_wait);
  PTXEMU_HANDLER(exec_tma_load);
  PTXEMU_HANDLER(exec_tma_store);
  PTXEMU_HANDLER(exec_bulk_copy);
  PTXEMU_HANDLER(exec_async_copy);
  PTXEMU_HANDLER(exec_async_copy_wait);
  PTXEMU_HANDLER(exec_bulk_commit);
  PTXEMU_HANDLER(exec_bulk_wait);
  void note_bulk_wait(Warp& warp, Instruction const& in, u32 mask);
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
  PTXEMU_HANDLER(exec_tcgen05_fence);
#undef PTXEMU_HANDLER

 private:
  // Scheduling (scheduler.cpp), creation of clusters and reports (clusters.cpp).
  void run();
  void launch_cluster(u64 index);
  std::unique_ptr<Cta> make_cta(Cluster& cluster, u32 rank);
  bool runnable(Warp& warp);
  bool is_over(Warp& warp, Group const& group);  // whether the group's wait has ended
  Warp* pick_warp();
  bool run_warp(Warp& warp, u64 quantum);
  Outcome step(Warp& warp, Group& group);
  void schedule_once();
  void time_out_waits();
  void retire_clusters();
  void retire_cta(Cta& cta);
  void merge(Warp& warp);
  std::string deadlock_report();
  std::string location() const;  // kernel, CTA, warp, line and text of the current instruction
  /// Reports a finding that does not end the launch, once for each line of PTX and kind of finding.
  void hazard(char const* format, ...) __attribute__((format(printf, 2, 3)));
  void first_cta_of(u64 cluster_index, u32 coordinates[3]) const;

  // Operands (operands.cpp).
  struct Row {  // the values of an operand in the 32 lanes: a register in place, or computed in `scratch`
    u64 scratch[kWarpSize];
    u64 const* values;
    u64 operator[](int lane) const { return values[lane]; }
  };
  void read(Warp& warp, Operand const& operand, Row& row);
  Row* read_all(Warp& warp, Instruction const& in);
  void write(Warp& warp, Operand const& operand, int lane, u64 value);
  void write_all(Warp& warp, Operand const& operand, u32 mask, u64 value);
  u64 special(Warp const& warp, int id, int lane) const;
  u32 active_mask(Warp& warp, Instruction const& in, u32 mask);  // lanes whose guard predicate is true
  u64 uniform(Warp& warp, Operand const& operand, u32 mask);     // the value in the lowest lane of the mask
  bool converged(Warp& warp, Group& group, u32 lanes);
  void finish_loads_of(Warp& warp, Operand const& operand);
  void define_registers(Warp& warp, PendingLoad& load);
  void finish_load(Warp& warp, size_t index);

  // Shared memory and its mbarriers (shared.cpp, exec_mbarrier.cpp).
  /// The CTA and the offset that a shared address names; `cluster` allows CTAs other than `self`.
  Cta* shared_cta(Cta* self, u32 address, bool cluster, u32* offset);
  u8* shared_bytes(Cta* cta, u32 offset, u32 bytes);
  void shared_read(Warp& warp, Cta* cta, u32 offset, u32 bytes, void* out);
  bool is_atomic() const;
  void shared_write(Warp& warp, Cta* cta, u32 offset, u32 bytes, void const* in);
  void check_conflicts(Cta const* cta, bool tmem, Access const& access, char const* what, Cta const* fifo);
  u8* local_bytes(Warp& warp, int lane, u64 offset, u32 bytes);
  void memory_read(Warp& warp, Space space, u64 address, u32 bytes, int lane, void* out);
  void memory_write(Warp& warp, Space space, u64 address, u32 bytes, int lane, void const* in);
  static Space space_of(Space space, u64* address);
  Mbarrier mbarrier(Cta* cta, u32 offset);
  void set_mbarrier(Cta* cta, u32 offset, Mbarrier barrier);
  void arrive(Cta* cta, u32 offset, u32 count, i32 expect_bytes = 0);
  void complete_bytes(Cta* cta, u32 offset, u32 bytes);
  void check_init(Warp& warp, Cta* cta, u32 offset);
  void check_signal(Warp& warp, Cta* cta, u32 offset);

  // Asynchronous operations (async.cpp). `in_fifo`: through the owner's queue of tcgen05 operations.
  std::shared_ptr<AsyncOperation> make_operation(Cta* owner, char const* what);
  void issue(std::shared_ptr<AsyncOperation> const& operation, bool in_fifo);
  bool async_pending() const { return !independent_.empty() || !fifos_.empty(); }
  u64 best_async_priority() const;
  bool run_async(bool highest_priority = false);
  void forget_accesses(AsyncOperation const& operation);
  void forget_access(Cta* cta, Access const& access);
  void check_order(AsyncOperation const& operation, AsyncOperation::Region const& region);

  // TMA, cluster launch control and tcgen05.
  TensorMap read_tensormap(u64 address);
  void load_box(Cta* cta, TensorMap const& map, i32 const* coordinates, u32 offset);
  void store_box(Cta* cta, TensorMap const& map, i32 const* coordinates, u32 offset);
  void answer_try_cancel(Cta* cta, u32 response, u32 barrier, bool multicast);
  std::vector<Cta*> cta_group(Cta* cta, int size);
  static u32 allocated_columns(Cta const& cta);
  u32 allocate_tmem(Cta* cta, u32 columns);
  void check_tmem(Cta* cta, u32 column, u32 columns);
  void check_tmem_order(Warp& warp, Cta* cta, Access const& access, char const* what);
  void copy_to_tmem(Cta* cta, u32 column, u64 descriptor);
  struct Mma;
  void multiply(Mma const& mma);
  void read_operand_rows(Cta* cta, u64 descriptor, u32 rows, int element, float* out);
  void read_scales(Cta* cta, u32 column, u32 rows, bool e8m0, u32 id, u32 count, float* out);
  void add_truncated(Cta* cta, Mma const& mma, float const* a, float const* b, float const* scale_a,
                     float const* scale_b);

  Launch const& launch_;
  Kernel const& kernel_;
  Session& session_;
  std::function<void()> run_predecessor_;
  std::mt19937_64 random_;
  std::deque<u64> waiting_clusters_;  // not launched yet; try_cancel takes clusters from it
  std::vector<std::unique_ptr<Cluster>> live_;
  std::vector<Warp*> warps_;                                  // of live clusters
  std::vector<std::shared_ptr<AsyncOperation>> independent_;  // may complete in any order
  std::vector<Cta*> fifos_;                                   // CTAs whose tcgen05 queue is not empty
  u64 next_operation_ = 1;
  u64 instructions_ = 0, ctas_ = 0, stolen_ = 0, unread_stores_ = 0;  // for Statistics
  // Deadlock detection: events so far, their number at the last timeout, and timeouts without an event
  // between them.
  u64 progress_ = 0, quiet_since_ = ~0ull;
  int quiet_rounds_ = 0;
  std::vector<u64> executed_;       // times that each instruction executed
  std::set<std::string> reported_;  // hazards, by line and kind
  Warp* current_warp_ = nullptr;
  Instruction const* current_ = nullptr;
  bool warps_ended_ = false;  // a warp has exited since clusters were retired last
  u64 zero_row_[kWarpSize] = {};
  u64 sink_row_[kWarpSize] = {};         // destination of operations whose result is discarded
  Row rows_[8];                          // sources of the current instruction
  std::unique_ptr<RaceDetector> races_;  // null without the option detect_races
};

}  // namespace ptxemu
