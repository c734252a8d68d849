// Exchange between the lanes of a warp (PTX ISA, "shfl.sync", "vote.sync", "match.sync", "redux.sync",
// "elect.sync", "activemask").
#include <algorithm>

#include "families.hpp"
#include "machine.hpp"

namespace ptxemu {

namespace {

enum Shuffle { kIndex, kUp, kDown, kButterfly };
enum Vote { kBallot, kAny, kAll, kUniform };
enum Reduction { kAdd, kMin, kMax, kAnd, kOr, kXor };

/// The index of the first name that is a part of the opcode; -1 if none is.
int find(Instruction const& in, std::initializer_list<char const*> names) {
  int index = 0;
  for (char const* name : names) {
    if (in.has(name)) {
      return index;
    }
    ++index;
  }
  return -1;
}

}  // namespace

/// mode: the variant of shfl, vote or redux. All but activemask wait until the members have converged.
bool decode_warp(Instruction& in) {
  std::string const& name = in.parts[0];
  in.type = parse_type(in.parts.back());
  if (name == "shfl") {
    in.mode[0] = find(in, {"idx", "up", "down", "bfly"});
    in.handler = &Machine::exec_shuffle;
    return in.has("sync") && in.mode[0] >= 0 && in.operands.size() == 5;
  } else if (name == "vote") {
    in.mode[0] = find(in, {"ballot", "any", "all", "uni"});
    in.handler = &Machine::exec_vote;
    return in.has("sync") && in.mode[0] >= 0;
  } else if (name == "match") {
    in.handler = &Machine::exec_match;
    return in.has("sync") && in.has("any");
  } else if (name == "redux") {
    in.mode[0] = find(in, {"add", "min", "max", "and", "or", "xor"});
    in.handler = &Machine::exec_redux;
    return in.mode[0] >= 0 && bytes_of(in.type) == 4 && !in.has("f32");
  } else if (name == "elect") {
    in.handler = &Machine::exec_elect;
    return true;
  }
  in.handler = &Machine::exec_active_mask;
  return true;
}

/// shfl.sync d|valid, a, offset, clamp and segment mask, members
Outcome Machine::exec_shuffle(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  u32 const members = static_cast<u32>(uniform(warp, in.operands[4], group.mask));
  if (!converged(warp, group, members)) {
    return Outcome::kBlocked;
  }
  Row* const rows = read_all(warp, in);
  u64 source[kWarpSize];  // a copy, since the destination may be the source register
  std::copy_n(rows[0].values, kWarpSize, source);
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    int const amount = static_cast<int>(rows[1][l] & 31);
    u32 const control = static_cast<u32>(rows[2][l]);
    int const segment = static_cast<int>(control >> 8 & 31), clamp = static_cast<int>(control & 31);
    // [low, high] is the lane's segment of the warp; `high` is the lowest valid source with .up.
    int const low = l & segment, high = low | (clamp & ~segment);
    int from = 0;
    bool valid = false;
    switch (in.mode[0]) {
      case kIndex: from = low | (amount & ~segment); break;
      case kUp: from = l - amount; break;
      case kDown: from = l + amount; break;
      default: from = l ^ amount; break;
    }
    valid = in.mode[0] == kUp ? from >= high : from <= high;
    from = valid ? from : l;  // a lane without a valid source keeps its own value
    if (!(group.mask >> from & 1)) {
      fatal("shfl reads lane %d, which does not take part", from);
    }
    write(warp, in.operands[0], l, source[from]);
    if (in.operands[0].reg2 >= 0) {
      warp.row(in.operands[0].reg2)[l] = valid;
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_vote(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  u32 const members = static_cast<u32>(uniform(warp, in.operands[2], group.mask));
  if (!converged(warp, group, members)) {
    return Outcome::kBlocked;
  }
  Row votes;
  read(warp, in.operands[1], votes);
  u32 const voters = members & warp.alive;
  u32 ballot = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    ballot |= (voters >> l & 1 & static_cast<u32>(votes[l])) << l;
  }
  u64 const result = in.mode[0] == kBallot ? ballot
                     : in.mode[0] == kAny  ? ballot != 0
                     : in.mode[0] == kAll  ? ballot == voters
                                           : ballot == voters || ballot == 0;
  write_all(warp, in.operands[0], mask, result);
  return Outcome::kNext;
}

/// match.any.sync d, a, members: the members whose a is that of the lane.
Outcome Machine::exec_match(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  u32 const members = static_cast<u32>(uniform(warp, in.operands[2], group.mask));
  if (!converged(warp, group, members)) {
    return Outcome::kBlocked;
  }
  Row values;
  read(warp, in.operands[1], values);
  u32 const present = members & warp.alive;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 same = 0;
    for (int other = 0; other < kWarpSize; ++other) {
      same |= (present >> other & 1 & static_cast<u32>(values[other] == values[l])) << other;
    }
    write(warp, in.operands[0], l, same);
  }
  return Outcome::kNext;
}

Outcome Machine::exec_redux(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  u32 const members = static_cast<u32>(uniform(warp, in.operands[2], group.mask));
  if (!converged(warp, group, members)) {
    return Outcome::kBlocked;
  }
  Row values;
  read(warp, in.operands[1], values);
  bool first = true;
  u64 result = 0;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(members & warp.alive & (1u << l))) {
      continue;
    }
    u64 const value = values[l];
    auto const less = [&](u64 a, u64 b) {
      return is_signed(in.type) ? sign_extend(a, in.type) < sign_extend(b, in.type) : a < b;
    };
    switch (in.mode[0]) {
      case kAdd: result += value; break;
      case kMin: result = first || less(value, result) ? value : result; break;
      case kMax: result = first || less(result, value) ? value : result; break;
      case kAnd: result = first ? value : result & value; break;
      case kOr: result |= value; break;
      default: result ^= value; break;
    }
    first = false;
  }
  write_all(warp, in.operands[0], mask, result);
  return Outcome::kNext;
}

/// elect.sync: the hardware may elect any member; the emulator elects the lowest.
Outcome Machine::exec_elect(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  u32 const members = static_cast<u32>(uniform(warp, in.operands[1], group.mask));
  if (!converged(warp, group, members)) {
    return Outcome::kBlocked;
  }
  int const leader = __builtin_ctz(members & group.mask);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      write(warp, in.operands[0], l, static_cast<u64>(leader));
      if (in.operands[0].reg2 >= 0) {
        warp.row(in.operands[0].reg2)[l] = l == leader;
      }
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_active_mask(Warp& warp, Group&, Instruction const& in, u32 mask) {
  write_all(warp, in.operands[0], mask, mask);
  return Outcome::kNext;
}

}  // namespace ptxemu
