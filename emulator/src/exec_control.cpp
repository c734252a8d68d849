// Control flow, setp, griddepcontrol, and instructions that have no effect on the emulator (PTX ISA, "Control
// Flow Instructions", "Comparison and Selection Instructions", "griddepcontrol").
#include <algorithm>
#include "families.hpp"

#include "machine.hpp"
#include "numeric.hpp"

namespace ptxemu {

namespace {

/// Comparisons of setp. kUnordered is added to those that are true if an operand is NaN.
enum Comparison { kEq, kNe, kLt, kLe, kGt, kGe, kNum, kNan, kUnordered = 8 };
/// How setp combines the comparison with a predicate.
enum Combine { kAlone, kAnd, kOr, kXor };

std::map<std::string, int> const kComparisons = {{"eq", kEq},
                                                 {"ne", kNe},
                                                 {"lt", kLt},
                                                 {"le", kLe},
                                                 {"gt", kGt},
                                                 {"ge", kGe},
                                                 {"lo", kLt},
                                                 {"ls", kLe},
                                                 {"hi", kGt},
                                                 {"hs", kGe},
                                                 {"num", kNum},
                                                 {"nan", kNan},
                                                 {"equ", kEq | kUnordered},
                                                 {"neu", kNe | kUnordered},
                                                 {"ltu", kLt | kUnordered},
                                                 {"leu", kLe | kUnordered},
                                                 {"gtu", kGt | kUnordered},
                                                 {"geu", kGe | kUnordered}};

template <class T>
bool compare(int comparison, T a, T b) {
  switch (comparison) {
    case kEq: return a == b;
    case kNe: return a != b;
    case kLt: return a < b;
    case kLe: return a <= b;
    case kGt: return a > b;
    default: return a >= b;
  }
}

double float_value(u64 bits, Type type) {
  switch (type) {
    case Type::kF32: return as_float(bits);
    case Type::kF16: return decode_f16(static_cast<u32>(bits));
    case Type::kBf16: return decode_bf16(static_cast<u32>(bits) & 0xFFFF);
    default: return bit_cast<double>(bits);
  }
}

bool compare_bits(int comparison, Type type, u64 a, u64 b) {
  if (is_float(type)) {
    double const x = float_value(a, type), y = float_value(b, type);
    bool const unordered = x != x || y != y;
    if (comparison == kNum || comparison == kNan) {
      return unordered == (comparison == kNan);
    }
    return unordered ? (comparison & kUnordered) != 0 : compare(comparison & 7, x, y);
  }
  if (is_signed(type)) {
    return compare(comparison, sign_extend(a, type), sign_extend(b, type));
  }
  return compare(comparison, truncate_to(a, type), truncate_to(b, type));
}

}  // namespace

/// mode of setp: the comparison, and how it is combined with a predicate.
bool decode_control(Instruction& in) {
  std::string const& name = in.parts[0];
  if (name == "bra") {
    in.handler = &Machine::exec_branch;
  } else if (name == "brx") {
    in.handler = &Machine::exec_branch_indexed;
  } else if (name == "ret" || name == "exit") {
    in.handler = &Machine::exec_exit;
  } else if (name == "trap") {
    in.handler = &Machine::exec_trap;
  } else if (name == "nanosleep") {
    in.handler = &Machine::exec_sleep;
  } else if (name == "griddepcontrol") {
    in.handler = in.has("wait") ? &Machine::exec_grid_wait : &Machine::exec_launch_dependents;
  } else if (name == "setmaxnreg" || name == "pmevent") {
    in.handler = &Machine::exec_nothing;
  } else if (name == "setp") {
    auto const found = kComparisons.find(in.parts[1]);
    in.type = parse_type(in.parts.back());
    if (found == kComparisons.end() || in.type == Type::kNone || in.has("ftz") || in.operands.size() < 3) {
      return false;
    }
    in.mode[0] = found->second;
    in.mode[1] = in.has("and") ? kAnd : in.has("or") ? kOr : in.has("xor") ? kXor : kAlone;
    in.handler = &Machine::exec_set_predicate;
  }
  return in.handler != nullptr;
}

/// Stands for every instruction that the emulator does not model.
Outcome Machine::exec_unmodelled(Warp&, Group&, Instruction const& in, u32 mask) {
  if (mask == 0) {
    return Outcome::kNext;
  }
  fatal("not modelled: %s", in.text.c_str());
}

/// An instruction that devices of the kernel's target do not have.
Outcome Machine::exec_absent(Warp&, Group&, Instruction const& in, u32 mask) {
  if (mask == 0) {
    return Outcome::kNext;
  }
  fatal("%s does not have: %s", kernel_.target.name().c_str(), in.text.c_str());
}

Outcome Machine::exec_nothing(Warp&, Group&, Instruction const&, u32) { return Outcome::kNext; }

Outcome Machine::exec_trap(Warp&, Group&, Instruction const&, u32 mask) {
  if (mask != 0) {
    fatal("trap");
  }
  return Outcome::kNext;
}

/// nanosleep lets an asynchronous operation execute: in lazy mode a warp that polls would otherwise prevent
/// that for ever.
Outcome Machine::exec_sleep(Warp&, Group&, Instruction const&, u32) {
  run_async();
  return Outcome::kYield;
}

/// griddepcontrol.launch_dependents: dependents start at once in any case (queue.hpp).
Outcome Machine::exec_launch_dependents(Warp& warp, Group&, Instruction const&, u32 mask) {
  warp.cta->launched_dependents = warp.cta->launched_dependents || mask != 0;
  return Outcome::kNext;
}

/// griddepcontrol.wait. The CTAs of this launch keep their tensor memory while the predecessor executes.
Outcome Machine::exec_grid_wait(Warp&, Group&, Instruction const&, u32 mask) {
  if (mask != 0 && run_predecessor_) {
    // Cleared before the call: a predecessor executes once, whichever thread reaches its wait first.
    std::function<void()> const run = std::move(run_predecessor_);
    run_predecessor_ = nullptr;
    u32 const columns = session_.held_columns, shared_bytes = session_.held_shared_bytes;
    session_.held_columns = 0;
    session_.held_shared_bytes = launch_.dynamic_shared_bytes + kernel_.static_shared_bytes;
    for (auto const& cluster : live_) {
      for (auto const& cta : cluster->ctas) {
        session_.held_columns = std::max(session_.held_columns, allocated_columns(*cta));
      }
    }
    run();
    session_.held_columns = columns;
    session_.held_shared_bytes = shared_bytes;
  }
  return Outcome::kNext;
}

Outcome Machine::exec_branch(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (mask == 0) {
    return Outcome::kNext;
  }
  if (mask == group.mask) {
    group.pc = in.target;
    return Outcome::kJumped;
  }
  // The group diverges: its other lanes go on, and the lanes that branch become a new group.
  group.mask &= ~mask;
  group.pc++;
  warp.groups.push_back({in.target, mask});  // invalidates `group`
  return Outcome::kJumped;
}

Outcome Machine::exec_branch_indexed(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  Row index;
  read(warp, in.operands[0], index);
  u32 const rest = group.mask & ~mask;
  std::vector<Group> taken;
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      if (index[l] >= in.targets.size()) {
        fatal("brx.idx %llu of %zu", static_cast<unsigned long long>(index[l]), in.targets.size());
      }
      taken.push_back({in.targets[index[l]], 1u << l});
    }
  }
  group.mask = rest;
  group.pc++;
  warp.groups.insert(warp.groups.end(), taken.begin(), taken.end());  // merge() joins lanes of equal targets
  return Outcome::kJumped;
}

Outcome Machine::exec_exit(Warp& warp, Group& group, Instruction const&, u32 mask) {
  warp.alive &= ~mask;
  group.mask &= ~mask;
  if (warp.alive == 0) {
    for (u32 i = 0; i < 16; ++i) {  // barriers that expect all threads no longer expect this warp
      NamedBarrier& barrier = warp.cta->barriers[i];
      if (barrier.arrived != 0 && barrier.all_threads) {
        barrier.expected -= kWarpSize;
        if (barrier.arrived == barrier.expected) {
          barrier.arrived = 0;
          barrier.generation++;
        }
      }
    }
  }
  return group.mask != 0 ? Outcome::kNext : Outcome::kJumped;
}

Outcome Machine::exec_set_predicate(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row* const rows = read_all(warp, in);
  Operand const& out = in.operands[0];
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      bool result = compare_bits(in.mode[0], in.type, rows[0][l], rows[1][l]);
      bool opposite = !result;  // the second predicate combines the negated comparison
      if (in.mode[1] != kAlone) {
        bool const other = rows[2][l] & 1;
        result = in.mode[1] == kAnd ? result && other : in.mode[1] == kOr ? result || other : result != other;
        opposite = in.mode[1] == kAnd  ? opposite && other
                   : in.mode[1] == kOr ? opposite || other
                                       : opposite != other;
      }
      if (out.kind == Operand::kRegister) {
        warp.row(out.reg)[l] = result;
      }
      if (out.reg2 >= 0) {
        warp.row(out.reg2)[l] = opposite;
      }
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
