// tcgen05.ld, tcgen05.st and tcgen05.wait: copies between the registers of a warp and TMEM (PTX ISA, "Tensor
// Memory and Register Load/Store Instructions").
#include <algorithm>

#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

namespace {

enum Shape { k32x32b, k16x64b, k16x128b, k16x256b };

/// The TMEM lane and column, relative to the instruction's address, of register `r` of thread `t` (PTX ISA,
/// "Matrix fragments for tcgen05.{ld,st}").
struct Cell {
  u32 lane, column;
};
Cell cell_of(int shape, u32 t, u32 r) {
  switch (shape) {
    case k32x32b: return {t, r};
    case k16x64b: return {t / 4 + 8 * (t % 2), t / 2 % 2 + 2 * r};
    case k16x128b: return {t / 4 + 8 * (r % 2), t % 4 + 4 * (r / 2)};
    default: return {t / 4 + 8 * (r / 2 % 2), 2 * (t % 4) + r % 2 + 8 * (r / 4)};
  }
}

/// The registers of an instruction with a shape and a repetition count .xN.
u32 registers_of(int shape, u32 repeat) {
  return repeat * (shape == k16x256b ? 4 : shape == k16x128b ? 2 : 1);
}

}  // namespace

/// tcgen05.ld: a warp accesses the 32 lanes of its index modulo 4. The load reads TMEM, and defines its
/// registers, at tcgen05.wait::ld or at the first instruction that names one of the registers, whichever
/// comes first. Until it is complete its range of TMEM is a pending access, and no synchronization of the
/// warp orders another warp's access after it. The PTX ISA respects the dependency through a register, but
/// demands a wait for the order of accesses to memory ("Register dependencies, same thread"). CUTLASS's
/// epilogues without shared memory rely on the dependency, so that the option loads_need_wait decides whether
/// a use completes the load.
Outcome Machine::exec_tcgen05_ld(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  u32 const address = static_cast<u32>(uniform(warp, in.operands[1], mask));
  u32 const column = address & 0xFFFF, lane = address >> 16, own = kWarpSize * (warp.index % 4);
  bool const half = in.mode[1] != k32x32b;  // shapes 16x* access 16 lanes, in the lower or upper half
  if (lane != own && !(half && lane == own + 16)) {
    fatal("tcgen05.ld of lane %u by warp %u, which reaches lanes %u to %u", lane, warp.index, own, own + 31);
  }
  Operand const& to = in.operands[0];
  PendingLoad load;
  if (to.kind == Operand::kVector) {
    for (Operand const& part : to.parts) {
      load.registers.push_back(part.reg);
    }
  } else {
    load.registers.push_back(to.reg);
  }
  u32 const count = registers_of(in.mode[1], static_cast<u32>(in.mode[2]));
  if (load.registers.size() != count) {
    fatal("tcgen05.ld of %zu registers, its shape has %u", load.registers.size(), count);
  }
  u32 last = 0;
  for (u32 r = 0; r < count; ++r) {
    load.lanes.emplace_back();
    load.columns.emplace_back();
    for (u32 t = 0; t < kWarpSize; ++t) {
      Cell const cell = cell_of(in.mode[1], t, r);
      load.lanes[r][t] = static_cast<u16>(lane + cell.lane);
      load.columns[r][t] = static_cast<u16>(column + cell.column);
      last = std::max(last, cell.column);
    }
  }
  check_tmem(warp.cta, column, last + 1);
  load.access = {column, column + last + 1, lane,         lane + (half ? 16 : 32),
                 false,  next_operation_++, "tcgen05.ld", nullptr};
  check_conflicts(warp.cta, true, load.access, "tcgen05.ld of", nullptr);
  check_tmem_order(warp, warp.cta, load.access, "tcgen05.ld of");
  warp.cta->pending[1].push_back(load.access);
  warp.is_pending.resize(kernel_.registers.size());
  for (int reg : load.registers) {
    warp.is_pending[static_cast<size_t>(reg)] = 1;
    std::fill_n(warp.row(reg), kWarpSize, 0x7FC0DEAD);  // a NaN, until the load is finished
  }
  warp.pending_loads.push_back(std::move(load));
  return Outcome::kNext;
}

/// Reads TMEM into the registers of a load.
void Machine::define_registers(Warp& warp, PendingLoad& load) {
  if (load.defined) {
    return;
  }
  load.defined = true;
  Cta* const cta = warp.cta;
  for (size_t r = 0; r < load.registers.size(); ++r) {
    u64* const row = warp.row(load.registers[r]);
    for (int t = 0; t < kWarpSize; ++t) {
      u32 const lane = load.lanes[r][static_cast<size_t>(t)],
                column = load.columns[r][static_cast<size_t>(t)];
      if (cta->tmem_is_written(lane, column) == 0) {
        hazard("tcgen05.ld of uninitialised TMEM, lane %u, column %u", lane, column);
      }
      row[t] = cta->tmem_word(lane, column);
    }
    warp.is_pending[static_cast<size_t>(load.registers[r])] = 0;
  }
}

/// Completes a load.
void Machine::finish_load(Warp& warp, size_t index) {
  define_registers(warp, warp.pending_loads[index]);
  Access const access = warp.pending_loads[index].access;
  warp.pending_loads.erase(warp.pending_loads.begin() + static_cast<long>(index));
  forget_access(warp.cta, access);
  if (races_ != nullptr) {
    u32 const quarter = access.lane_low / kWarpSize;
    races_->record_tmem(warp, *warp.cta, access.low, access.high, quarter, quarter + 1, false);
  }
}

/// Defines the registers of the pending load that has one of the operand's among them.
void Machine::finish_loads_of(Warp& warp, Operand const& operand) {
  for (Operand const& part : operand.parts) {
    finish_loads_of(warp, part);
  }
  if (operand.reg < 0 || warp.is_pending.empty() || warp.is_pending[static_cast<size_t>(operand.reg)] == 0) {
    return;
  }
  for (size_t i = 0; i < warp.pending_loads.size(); ++i) {
    PendingLoad& load = warp.pending_loads[i];
    auto const& registers = load.registers;
    if (!load.defined && std::find(registers.begin(), registers.end(), operand.reg) != registers.end()) {
      define_registers(warp, load);
      if (session_.options.loads_need_wait == 0) {
        finish_load(warp, i);
      }
      return;
    }
  }
}

/// tcgen05.st: writes TMEM at once, but its range is a pending access until tcgen05.wait::st.
Outcome Machine::exec_tcgen05_st(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  u32 const address = static_cast<u32>(uniform(warp, in.operands[0], mask));
  u32 const column = address & 0xFFFF, lane = address >> 16, own = kWarpSize * (warp.index % 4);
  bool const half = in.mode[1] != k32x32b;
  if (lane != own && !(half && lane == own + 16)) {
    fatal("tcgen05.st to lane %u by warp %u, which reaches lanes %u to %u", lane, warp.index, own, own + 31);
  }
  Operand const& from = in.operands[1];
  u32 const count = registers_of(in.mode[1], static_cast<u32>(in.mode[2]));
  u32 const columns = cell_of(in.mode[1], kWarpSize - 1, count - 1).column + 1;
  check_tmem(warp.cta, column, columns);
  Access const access = {column, column + columns,  lane,         lane + (half ? 16 : 32),
                         true,   next_operation_++, "tcgen05.st", nullptr};
  check_conflicts(warp.cta, true, access, "tcgen05.st to", nullptr);
  check_tmem_order(warp, warp.cta, access, "tcgen05.st to");
  for (u32 r = 0; r < count; ++r) {
    Row value;
    read(warp, from.kind == Operand::kVector ? from.parts.at(r) : from, value);
    for (u32 t = 0; t < kWarpSize; ++t) {
      Cell const cell = cell_of(in.mode[1], t, r);
      warp.cta->tmem_word(lane + cell.lane, column + cell.column) =
          static_cast<u32>(value[static_cast<int>(t)]);
      warp.cta->tmem_is_written(lane + cell.lane, column + cell.column) = 1;
    }
  }
  warp.cta->pending[1].push_back(access);
  warp.pending_stores.push_back(access);
  return Outcome::kNext;
}

/// tcgen05.wait::ld and ::st
Outcome Machine::exec_tcgen05_wait(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  if (in.mode[1] == 0) {
    while (!warp.pending_loads.empty()) {
      finish_load(warp, 0);
    }
    return Outcome::kNext;
  }
  for (Access const& access : warp.pending_stores) {
    forget_access(warp.cta, access);
  }
  warp.pending_stores.clear();
  return Outcome::kNext;
}

}  // namespace ptxemu
