// mov, ld, st, atom, red, cvta and mapa (PTX ISA, "Data Movement and Conversion Instructions"; "atom",
// "red").
#include <algorithm>

#include "families.hpp"
#include "machine.hpp"

namespace ptxemu {

namespace {

enum Atomic { kAdd, kMin, kMax, kAnd, kOr, kXor, kExchange, kCompare, kIncrement, kDecrement };

/// The state space that the opcode names; kGeneric if it names none.
Space space_in(Instruction const& in) {
  for (std::string const& part : in.parts) {
    if (part.rfind("param", 0) == 0) {
      return Space::kParam;
    } else if (part == "shared" || part == "shared::cta") {
      return Space::kShared;
    } else if (part == "shared::cluster") {
      return Space::kSharedCluster;
    } else if (part == "global") {
      return Space::kGlobal;
    } else if (part == "local") {
      return Space::kLocal;
    } else if (part == "const") {
      return Space::kConst;
    }
  }
  return Space::kGeneric;
}

void move_lanes(Instruction const& in, u64* d, u64 const* const* s, u32 mask) {
  Type const type = in.operands[0].type;
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      d[l] = truncate_to(s[0][l], type);
    }
  }
}

/// mode: the operation, and the index of the operand that holds the address.
bool decode_atomic(Instruction& in) {
  static char const* const names[] = {"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"};
  for (int i = 0; i < 10; ++i) {
    if (in.parts[1] == names[i] || in.has(names[i])) {
      in.mode[0] = i;
      in.mode[1] = in.parts[0] == "atom" ? 1 : 0;
      in.handler = &Machine::exec_atomic;
      bool const floating = is_float(in.type);
      return bytes_of(in.type) >= 4 && in.type != Type::kF16x2 && in.type != Type::kBf16x2 &&
             in.type != Type::kB128 && !in.has("async") && !in.has("v2") && !in.has("v4") &&
             (!floating || i == kAdd || i == kExchange);
    }
  }
  return false;
}

/// The new value of an atomic operation. `third` is the value that cas stores.
u64 combine(Atomic operation, Type type, u64 old, u64 value, u64 third) {
  auto const less = [&](u64 a, u64 b) {
    return is_signed(type) ? sign_extend(a, type) < sign_extend(b, type) : a < b;
  };
  switch (operation) {
    case kAdd:
      return type == Type::kF32   ? as_bits(as_float(old) + as_float(value))
             : type == Type::kF64 ? bit_cast<u64>(bit_cast<double>(old) + bit_cast<double>(value))
                                  : old + value;
    case kMin: return less(value, old) ? value : old;
    case kMax: return less(old, value) ? value : old;
    case kAnd: return old & value;
    case kOr: return old | value;
    case kXor: return old ^ value;
    case kExchange: return value;
    case kCompare: return old == value ? third : old;
    case kIncrement: return old >= value ? 0 : old + 1;
    default: return old == 0 || old > value ? value : old - 1;
  }
}

}  // namespace

/// mode: of ld and st, the number of elements; of cvta, whether it has .to.
bool decode_memory(Instruction& in) {
  std::string const& name = in.parts[0];
  in.type = parse_type(in.parts.back());
  in.space = space_in(in);
  if (name == "mov" && in.operands.size() == 2) {
    bool const plain = in.operands[0].kind != Operand::kVector && in.operands[1].kind != Operand::kVector;
    if (plain && in.type != Type::kB128) {
      in.lanes = move_lanes;
    } else {
      in.handler = &Machine::exec_move;
    }
    return true;
  } else if (name == "cvta") {
    in.mode[0] = in.has("to");
    in.handler = &Machine::exec_cvta;
    return true;
  } else if (name == "mapa") {
    in.handler = &Machine::exec_mapa;
    return in.type == Type::kU32 && in.space == Space::kSharedCluster;
  } else if (name == "ld" || name == "ldu" || name == "st") {
    in.mode[0] = in.has("v2") ? 2 : in.has("v4") ? 4 : in.has("v8") ? 8 : 1;
    in.handler = name == "st" ? &Machine::exec_store : &Machine::exec_load;
    return in.type != Type::kNone && !in.has("async") && !in.has("bulk");
  } else if (name == "atom" || name == "red") {
    return decode_atomic(in);
  }
  in.handler = &Machine::exec_nothing;  // prefetches and cache policies have no effect
  return true;
}

/// mov that packs a vector into a register or unpacks one, and mov.b128.
Outcome Machine::exec_move(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Operand const &to = in.operands[0], &from = in.operands[1];
  int const count = static_cast<int>(std::max(to.parts.size(), from.parts.size()));
  bool const wide = in.type == Type::kB128;
  int const bits = count == 0 ? 0 : 8 * bytes_of(in.type) / count;
  u64 const part_mask = bits >= 64 ? ~0ull : (1ull << bits) - 1;
  Row row;
  if (to.kind != Operand::kVector && from.kind != Operand::kVector) {  // .b128, two registers each
    for (int half = 0; half < 2; ++half) {
      for (int l = 0; l < kWarpSize; ++l) {
        if (mask >> l & 1) {
          warp.row(to.reg + half)[l] = warp.row(from.reg + half)[l];
        }
      }
    }
    return Outcome::kNext;
  }
  u64 packed[kWarpSize] = {};
  if (from.kind == Operand::kVector) {
    for (int i = 0; i < count; ++i) {
      read(warp, from.parts[static_cast<size_t>(i)], row);
      u64* const out = wide ? warp.row(to.reg) + i * kWarpSize : packed;
      for (int l = 0; l < kWarpSize; ++l) {
        if (mask >> l & 1) {
          out[l] = wide ? row[l] : out[l] | (row[l] & part_mask) << (bits * i);
        }
      }
    }
    for (int l = 0; l < kWarpSize && !wide; ++l) {
      if (mask >> l & 1) {
        write(warp, to, l, packed[l]);
      }
    }
    return Outcome::kNext;
  }
  read(warp, from, row);
  std::copy_n(row.values, kWarpSize, packed);
  for (int i = 0; i < count; ++i) {
    for (int l = 0; l < kWarpSize; ++l) {
      if (mask >> l & 1) {
        u64 const value = wide ? warp.row(from.reg)[i * kWarpSize + l] : packed[l] >> (bits * i) & part_mask;
        write(warp, to.parts[static_cast<size_t>(i)], l, value);
      }
    }
  }
  return Outcome::kNext;
}

/// cvta: parameters of an inlined call lie in local memory, so their addresses become local ones.
Outcome Machine::exec_cvta(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row from;
  read(warp, in.operands[1], from);
  bool const to = in.mode[0] != 0;
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 address = from[l];
      switch (in.space) {
        case Space::kShared:
        case Space::kSharedCluster:
          address = to ? address - kSharedWindow : kSharedWindow + (address & 0xFFFFFFFF);
          break;
        case Space::kLocal: address = to ? address - kLocalWindow : kLocalWindow + address; break;
        case Space::kParam: address += !to && address < kParamWindow ? kLocalWindow : 0; break;
        default: break;
      }
      write(warp, in.operands[0], l, address);
    }
  }
  return Outcome::kNext;
}

/// mapa.shared::cluster: the address of the same offset in the CTA of another rank.
Outcome Machine::exec_mapa(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row* const rows = read_all(warp, in);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      if (rows[1][l] >= warp.cta->cluster->ctas.size()) {
        fatal("mapa: the cluster has no rank %llu", static_cast<unsigned long long>(rows[1][l]));
      }
      write(warp, in.operands[0], l, (rows[0][l] & kOffsetMask) | rows[1][l] << kRankShift);
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_load(Warp& warp, Group&, Instruction const& in, u32 mask) {
  u32 const width = static_cast<u32>(bytes_of(in.type));
  u32 const bytes = width * static_cast<u32>(in.mode[0]);
  Row address;
  read(warp, in.operands[1], address);
  u64 addresses[kWarpSize];  // a copy, since the destination may be the base register
  std::copy_n(address.values, kWarpSize, addresses);
  Operand const& to = in.operands[0];
  u8 buffer[64];
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    memory_read(warp, in.space, addresses[l], bytes, l, buffer);
    if (in.type == Type::kB128) {
      std::memcpy(&warp.row(to.reg)[l], buffer, 8);
      std::memcpy(&warp.row(to.reg + 1)[l], buffer + 8, 8);
      continue;
    }
    for (int i = 0; i < in.mode[0]; ++i) {
      u64 value = 0;
      std::memcpy(&value, buffer + static_cast<u32>(i) * width, width);
      if (is_signed(in.type)) {
        value = static_cast<u64>(sign_extend(value, in.type));
      }
      write(warp, to.kind == Operand::kVector ? to.parts[static_cast<size_t>(i)] : to, l, value);
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_store(Warp& warp, Group&, Instruction const& in, u32 mask) {
  u32 const width = static_cast<u32>(bytes_of(in.type));
  u32 const bytes = width * static_cast<u32>(in.mode[0]);
  Row address;
  read(warp, in.operands[0], address);
  Operand const& from = in.operands[1];
  bool const vector = from.kind == Operand::kVector;
  for (int i = 0; i < in.mode[0]; ++i) {
    read(warp, vector ? from.parts[static_cast<size_t>(i)] : from, rows_[i]);
  }
  u8 buffer[64];
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    if (in.type == Type::kB128) {
      std::memcpy(buffer, &warp.row(from.reg)[l], 8);
      std::memcpy(buffer + 8, &warp.row(from.reg + 1)[l], 8);
    } else {
      for (int i = 0; i < in.mode[0]; ++i) {
        u64 const value = rows_[i][l];
        std::memcpy(buffer + static_cast<u32>(i) * width, &value, width);
      }
    }
    memory_write(warp, in.space, address[l], bytes, l, buffer);
  }
  return Outcome::kNext;
}

Outcome Machine::exec_atomic(Warp& warp, Group&, Instruction const& in, u32 mask) {
  size_t const first = static_cast<size_t>(in.mode[1]);
  u32 const bytes = static_cast<u32>(bytes_of(in.type));
  Row address, value, third;
  read(warp, in.operands[first], address);
  read(warp, in.operands[first + 1], value);
  if (in.mode[0] == kCompare) {
    read(warp, in.operands[first + 2], third);
  } else {
    third.values = zero_row_;
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 old = 0;
      // Lanes execute one after the other, so the read and the write below are atomic.
      memory_read(warp, in.space, address[l], bytes, l, &old);
      u64 const operand = truncate_to(value[l], in.type);
      u64 const result = combine(static_cast<Atomic>(in.mode[0]), in.type, old, operand, third[l]);
      memory_write(warp, in.space, address[l], bytes, l, &result);
      if (first == 1) {
        write(warp, in.operands[0], l, old);
      }
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
