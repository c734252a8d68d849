// Operands as rows of 32 lanes: registers, constants, special registers and addresses.
#include <algorithm>

#include "machine.hpp"

namespace ptxemu {

namespace {

/// Numbers of special registers (PTX ISA, "Special Registers"). A vector has three: .x, .y and .z.
enum Special {
  kTid,
  kNtid = 3,
  kCtaid = 6,
  kNctaid = 9,
  kClusterCtaid = 12,
  kClusterNctaid = 15,
  kClusterid = 18,
  kNclusterid = 21,
  kClusterCtarank = 24,
  kClusterNctarank,
  kLaneid,
  kWarpid,
  kNwarpid,
  kSmid,
  kNsmid,
  kClock,
  kLanemaskLt,
  kLanemaskLe,
  kLanemaskGt,
  kLanemaskGe,
  kLanemaskEq,
  kDynamicSmemSize,
  kTotalSmemSize,
  kGridid,
};

}  // namespace

int special_register(std::string const& name) {
  static std::map<std::string, int> const vectors = {{"%tid", kTid},
                                                     {"%ntid", kNtid},
                                                     {"%ctaid", kCtaid},
                                                     {"%nctaid", kNctaid},
                                                     {"%cluster_ctaid", kClusterCtaid},
                                                     {"%cluster_nctaid", kClusterNctaid},
                                                     {"%clusterid", kClusterid},
                                                     {"%nclusterid", kNclusterid}};
  static std::map<std::string, int> const scalars = {{"%cluster_ctarank", kClusterCtarank},
                                                     {"%cluster_nctarank", kClusterNctarank},
                                                     {"%laneid", kLaneid},
                                                     {"%warpid", kWarpid},
                                                     {"%nwarpid", kNwarpid},
                                                     {"%smid", kSmid},
                                                     {"%nsmid", kNsmid},
                                                     {"%clock", kClock},
                                                     {"%clock64", kClock},
                                                     {"%globaltimer", kClock},
                                                     {"%lanemask_lt", kLanemaskLt},
                                                     {"%lanemask_le", kLanemaskLe},
                                                     {"%lanemask_gt", kLanemaskGt},
                                                     {"%lanemask_ge", kLanemaskGe},
                                                     {"%lanemask_eq", kLanemaskEq},
                                                     {"%dynamic_smem_size", kDynamicSmemSize},
                                                     {"%total_smem_size", kTotalSmemSize},
                                                     {"%gridid", kGridid}};
  if (auto const found = scalars.find(name); found != scalars.end()) {
    return found->second;
  }
  size_t const dot = name.rfind('.');
  if (dot + 2 == name.size()) {
    if (auto const found = vectors.find(name.substr(0, dot)); found != vectors.end()) {
      int const axis = name[dot + 1] - 'x';
      return axis >= 0 && axis < 3 ? found->second + axis : -1;
    }
  }
  return -1;
}

u64 Machine::special(Warp const& warp, int id, int lane) const {
  Cta const& cta = *warp.cta;
  u32 const thread = warp.index * kWarpSize + static_cast<u32>(lane);
  u32 const axis = static_cast<u32>(id % 3);
  u32 const bit = 1u << lane;
  switch (id < kClusterCtarank ? id - static_cast<int>(axis) : id) {
    case kTid: {
      u32 const t[3] = {thread % launch_.block[0], thread / launch_.block[0] % launch_.block[1],
                        thread / launch_.block[0] / launch_.block[1]};
      return t[axis];
    }
    case kNtid: return launch_.block[axis];
    case kCtaid: return cta.id[axis];
    case kNctaid: return launch_.grid[axis];
    case kClusterCtaid: return cta.id[axis] - cta.cluster->base[axis];
    case kClusterNctaid: return launch_.cluster[axis];
    case kClusterid: return cta.cluster->base[axis] / launch_.cluster[axis];
    case kNclusterid: return launch_.grid[axis] / launch_.cluster[axis];
    case kClusterCtarank: return cta.rank;
    case kClusterNctarank: return cta.cluster->ctas.size();
    case kLaneid: return static_cast<u64>(lane);
    case kWarpid: return warp.index;
    case kNwarpid: return cta.warps.size();
    case kSmid:
      return cta.cluster->index * cta.cluster->ctas.size() % static_cast<u64>(session_.options.num_sms) +
             cta.rank;
    case kNsmid: return static_cast<u64>(session_.options.num_sms);
    case kClock: return instructions_;  // advances, but does not measure time
    case kLanemaskLt: return bit - 1;
    case kLanemaskLe: return bit | (bit - 1);
    case kLanemaskGt: return ~(bit | (bit - 1));
    case kLanemaskGe: return ~(bit - 1);
    case kLanemaskEq: return bit;
    case kDynamicSmemSize: return launch_.dynamic_shared_bytes;
    case kTotalSmemSize: return launch_.dynamic_shared_bytes + kernel_.static_shared_bytes;
    default: return 1;
  }
}

void Machine::read(Warp& warp, Operand const& operand, Row& row) {
  row.values = row.scratch;
  // Symbols hold offsets in their space; the windows make addresses of them.
  u64 base = operand.value;
  switch (operand.symbol_space) {
    case Space::kParam: base += kParamWindow; break;
    case Space::kShared: base += static_cast<u64>(warp.cta->rank) << kRankShift | kSharedBase; break;
    default: break;
  }
  switch (operand.kind) {
    case Operand::kRegister:
      row.values = warp.row(operand.reg);
      if (operand.negated) {
        for (int l = 0; l < kWarpSize; ++l) {
          row.scratch[l] = row.values[l] ^ 1;
        }
        row.values = row.scratch;
      }
      return;
    case Operand::kConstant:
      row.values = kernel_.constants.data() + static_cast<size_t>(operand.constant) * kWarpSize;
      return;
    case Operand::kAddress:
      if (operand.reg >= 0) {
        u64 const* const from = warp.row(operand.reg);
        if (operand.value == 0) {
          row.values = from;
          return;
        }
        for (int l = 0; l < kWarpSize; ++l) {
          row.scratch[l] = from[l] + operand.value;
        }
        return;
      }
      [[fallthrough]];
    case Operand::kSymbol: std::fill_n(row.scratch, kWarpSize, base); return;
    case Operand::kSpecial:
      for (int l = 0; l < kWarpSize; ++l) {
        row.scratch[l] = special(warp, operand.special, l);
      }
      return;
    default: fatal("operand of a kind that this instruction does not accept");
  }
}

/// The values of all operands but the first, which is the destination.
Machine::Row* Machine::read_all(Warp& warp, Instruction const& in) {
  for (size_t i = 1; i < in.operands.size() && i < 8; ++i) {
    read(warp, in.operands[i], rows_[i - 1]);
  }
  return rows_;
}

/// Writes one lane of a destination register.
void Machine::write(Warp& warp, Operand const& operand, int lane, u64 value) {
  if (operand.kind == Operand::kSink) {
    return;
  }
  if (operand.kind != Operand::kRegister) {
    fatal("destination is not a register");
  }
  warp.row(operand.reg)[lane] = truncate_to(value, operand.type);
}

/// Writes the same value to all lanes in the mask.
void Machine::write_all(Warp& warp, Operand const& operand, u32 mask, u64 value) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      write(warp, operand, l, value);
    }
  }
}

u32 Machine::active_mask(Warp& warp, Instruction const& in, u32 mask) {
  if (in.predicate < 0) {
    return mask;
  }
  u64 const* const row = warp.row(in.predicate);
  u32 taken = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    taken |= static_cast<u32>(row[l] & 1) << l;
  }
  return mask & (in.predicate_negated ? ~taken : taken);
}

u64 Machine::uniform(Warp& warp, Operand const& operand, u32 mask) {
  Row row;
  read(warp, operand, row);
  return row[__builtin_ctz(mask)];
}

/// Whether the group holds all lanes of a .sync or .aligned instruction that have not exited. If not, the
/// group waits; merge() lets it try again once other lanes have joined it.
bool Machine::converged(Warp& warp, Group& group, u32 lanes) {
  if ((lanes & warp.alive & ~group.mask) == 0) {
    return true;
  }
  group.wait = Wait::kConvergence;
  return false;
}

}  // namespace ptxemu
