// tcgen05.ld, tcgen05.st and tcgen05.wait: copies between the registers of a warp and TMEM (PTX ISA, "Tensor
// Memory and Register Load/Store Instructions").
#include <algorithm>

#include "machine.hpp"

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
/// comes first. Until then its range of TMEM is a pending access.
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
  load.operation = next_operation_++;
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
  Access const access = {column, column + last + 1, lane,         lane + (half ? 16 : 32),
                         false,  load.operation,    "tcgen05.ld", nullptr};
  check_conflicts(warp.cta, true, access, "tcgen05.ld of", nullptr);
  warp.cta->pending[1].push_back(access);
  warp.is_pending.resize(kernel_.registers.size());
  for (int reg : load.registers) {
    warp.is_pending[static_cast<size_t>(reg)] = 1;
    std::fill_n(warp.row(reg), kWarpSize, 0x7FC0DEAD);  // a NaN, until the load is finished
  }
  warp.pending_loads.push_back(std::move(load));
  return Outcome::kNext;
}

/// Reads TMEM into the registers of a pending load.
void Machine::finish_load(Warp& warp, size_t index) {
  PendingLoad const load = std::move(warp.pending_loads[index]);
  warp.pending_loads.erase(warp.pending_loads.begin() + static_cast<long>(index));
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
  auto& pending = cta->pending[1];
  pending.erase(std::remove_if(pending.begin(), pending.end(),
                               [&](Access const& access) { return access.operation == load.operation; }),
                pending.end());
}

/// Finishes the pending load that defines a register of the operand.
void Machine::finish_loads_of(Warp& warp, Operand const& operand) {
  for (Operand const& part : operand.parts) {
    finish_loads_of(warp, part);
  }
  if (operand.reg < 0 || warp.is_pending.empty() || warp.is_pending[static_cast<size_t>(operand.reg)] == 0) {
    return;
  }
  for (size_t i = 0; i < warp.pending_loads.size(); ++i) {
    auto const& registers = warp.pending_loads[i].registers;
    if (std::find(registers.begin(), registers.end(), operand.reg) != registers.end()) {
      finish_load(warp, i);
      return;
    }
  }
}

/// tcgen05.st: writes TMEM at once, so tcgen05.wait::st has nothing to wait for.
Outcome Machine::exec_tcgen05_st(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  u32 const address = static_cast<u32>(uniform(warp, in.operands[0], mask));
  u32 const column = address & 0xFFFF, lane = address >> 16, own = kWarpSize * (warp.index % 4);
  if (lane != own && !(in.mode[1] != k32x32b && lane == own + 16)) {
    fatal("tcgen05.st to lane %u by warp %u, which reaches lanes %u to %u", lane, warp.index, own, own + 31);
  }
  Operand const& from = in.operands[1];
  u32 const count = registers_of(in.mode[1], static_cast<u32>(in.mode[2]));
  for (u32 r = 0; r < count; ++r) {
    Row value;
    read(warp, from.kind == Operand::kVector ? from.parts.at(r) : from, value);
    for (u32 t = 0; t < kWarpSize; ++t) {
      Cell const cell = cell_of(in.mode[1], t, r);
      check_tmem(warp.cta, column + cell.column, 1);
      check_conflicts(warp.cta, true,
                      {column + cell.column, column + cell.column + 1, lane + cell.lane, lane + cell.lane + 1,
                       true, 0, "", nullptr},
                      "tcgen05.st to", nullptr);
      warp.cta->tmem_word(lane + cell.lane, column + cell.column) =
          static_cast<u32>(value[static_cast<int>(t)]);
      warp.cta->tmem_is_written(lane + cell.lane, column + cell.column) = 1;
    }
  }
  return Outcome::kNext;
}

/// tcgen05.wait::ld and ::st
Outcome Machine::exec_tcgen05_wait(Warp& warp, Group& group, Instruction const&, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  while (mask != 0 && !warp.pending_loads.empty()) {
    finish_load(warp, 0);
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
