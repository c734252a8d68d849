// cp.async.bulk.tensor, the copies between global and shared memory that TMA executes, and bulk async-groups
// (PTX ISA, "Data Movement and Conversion Instructions: Tensor copy", "cp.async.bulk.commit_group",
// "cp.async.bulk.wait_group").
//
// A copy reads its source and writes its destination at one moment, when its asynchronous operation executes.
// A bulk async-group is complete when its stores have executed, with and without .read.
#include <algorithm>

#include "families.hpp"
#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

/// mode: the number of dimensions, whether the load is multicast, and the size of the CTA group.
bool decode_bulk(Instruction& in) {
  if (!in.has("bulk")) {
    return decode_async_copy(in);
  }
  if (in.has("commit_group")) {
    in.handler = &Machine::exec_bulk_commit;
    return true;
  }
  if (in.has("wait_group")) {
    in.handler = &Machine::exec_bulk_wait;
    return true;
  }
  if (in.has("prefetch")) {
    in.handler = &Machine::exec_nothing;
    return true;
  }
  if (!in.has("tensor")) {
    return decode_bulk_copy(in);
  }
  if (in.has("reduce") || in.opcode.find("im2col") != std::string::npos ||
      in.opcode.find("gather4") != std::string::npos || in.opcode.find("scatter4") != std::string::npos) {
    return false;
  }
  // The order of the two spaces in the opcode is the direction of the copy: destination first.
  size_t global = 0, shared = 0;
  for (size_t i = 0; i < in.parts.size(); ++i) {
    std::string const& part = in.parts[i];
    if (part == "global") {
      global = i;
    } else if (part == "shared::cluster" || part == "shared::cta") {
      shared = i;
    } else if (part.size() == 2 && part[1] == 'd') {
      in.mode[0] = part[0] - '0';
    }
  }
  in.mode[1] = in.has("multicast::cluster");
  in.mode[2] = in.has("cta_group::2") ? 2 : 1;
  in.handler = shared < global ? &Machine::exec_tma_load : &Machine::exec_tma_store;
  return in.mode[0] >= 1 && in.mode[0] <= 5 && global != 0 && shared != 0;
}

namespace {

/// One row of a box, along the first dimension: bytes [valid_low, valid_high) of it lie inside of the tensor.
struct BoxRow {
  u32 shared;  // offset in the box
  u64 global;  // address of the row's first byte, even if that lies outside of the tensor
  u32 valid_low, valid_high, bytes;
};

/// Calls `visit` with each row of the box at the coordinates.
template <class Visit>
void for_each_row(TensorMap const& map, i32 const* coordinates, Visit const& visit) {
  u32 rows = 1;
  for (u32 d = 1; d < map.rank; ++d) {
    rows *= map.box[d];
  }
  // Elements of less than a byte make a row start and end at any bit; only whole bytes are modelled.
  i64 const bits = element_bits(map.dtype);
  i64 const first = coordinates[0];
  for (u32 r = 0; r < rows; ++r) {
    u64 address = map.address;
    bool outside = false;
    // A coordinate may be negative or beyond the tensor; the whole row then lies outside.
    for (u32 d = 1, rest = r; d < map.rank; ++d) {
      i64 const index =
          static_cast<i64>(coordinates[d]) + static_cast<i64>(rest % map.box[d]) * map.element_stride[d];
      rest /= map.box[d];
      outside = outside || index < 0 || index >= static_cast<i64>(map.dim[d]);
      address += static_cast<u64>(index) * map.stride[d];
    }
    // Elements [low, high) of the row are those of the box that the tensor has along the first dimension.
    i64 low = std::max<i64>(0, -first);
    i64 high = std::max(low, std::min<i64>(map.box[0], static_cast<i64>(map.dim[0]) - first));
    if (outside) {
      low = high = 0;
    }
    if (low * bits % 8 != 0 || high * bits % 8 != 0 || first * bits % 8 != 0) {
      fatal("TMA: a row of the box starts or ends inside of a byte");
    }
    visit(BoxRow{r * map.row_bytes(), address + static_cast<u64>(first * bits / 8),
                 static_cast<u32>(low * bits / 8), static_cast<u32>(high * bits / 8), map.row_bytes()});
  }
}

void read_coordinates(Instruction const& in, TensorMap const& map, size_t count, i32* coordinates,
                      std::vector<u64> const& values) {
  if (map.rank != static_cast<u32>(in.mode[0]) || count != map.rank) {
    fatal("TMA: the instruction has rank %d, its tensor map rank %u", in.mode[0], map.rank);
  }
  for (size_t i = 0; i < count; ++i) {
    coordinates[i] = static_cast<i32>(values[i]);
  }
}

struct Coordinates {
  i32 value[5];
};

}  // namespace

/// The tensor map at an address in the kernel's parameters or in global memory; fatal if there is none.
TensorMap Machine::read_tensormap(u64 address) {
  EncodedTensorMap encoded;
  if (address % 64 != 0) {
    fatal("tensor map at 0x%llx, must be a multiple of 64", static_cast<unsigned long long>(address));
  }
  if (address >= kParamWindow && address < kParamWindow + launch_.params.size()) {
    u64 const offset = address - kParamWindow;
    if (offset + kTensorMapBytes > launch_.params.size()) {
      fatal("tensor map beyond the parameters");
    }
    std::memcpy(&encoded, &launch_.params[offset], sizeof encoded);
  } else {
    DeviceMemory::instance().check(address, kTensorMapBytes, "read of a tensor map");
    std::memcpy(&encoded, reinterpret_cast<void const*>(address), sizeof encoded);
  }
  if (!encoded.is_valid()) {
    fatal("there is no tensor map at 0x%llx", static_cast<unsigned long long>(address));
  }
  TensorMap const map = encoded.decoded();
  if (std::string const broken = map.broken_rule(); !broken.empty()) {  // by tensormap.replace
    fatal("tensor map at 0x%llx: %s", static_cast<unsigned long long>(address), broken.c_str());
  }
  if (char const* const wrong = races_ == nullptr ? nullptr : races_->use_map(*current_warp_, address)) {
    hazard("use of the tensor map at 0x%llx, %s", static_cast<unsigned long long>(address), wrong);
  }
  if (map.has_faulty_bit && map.span_bytes() < kSmallTensorBytes && !map.is_dense()) {
    fatal(
        "tensor map at 0x%llx: its tensor spans %llu bytes and has gaps, and bit 85 of the map, which the "
        "driver "
        "set by mistake, was not cleared",
        static_cast<unsigned long long>(address), static_cast<unsigned long long>(map.span_bytes()));
  }
  return map;
}

/// Copies a box to shared memory. Elements outside of the tensor become zero. Of .b4x16_p64, each unit of 16
/// bytes gets 16 elements, in its first 8 bytes; the others are padding, which is not written.
void Machine::load_box(Cta* cta, TensorMap const& map, i32 const* coordinates, u32 offset) {
  bool const padded = map.dtype == kPacked16U4Align16;
  if (padded && coordinates[0] % static_cast<i32>(kPaddedElements) != 0) {
    fatal("TMA: the first coordinate is %d, must be a multiple of %u with .b4x16_p64", coordinates[0],
          kPaddedElements);
  }
  u32 const unit = padded ? 8 : 16;  // bytes of global memory that become 16 of shared memory
  for_each_row(map, coordinates, [&](BoxRow const& row) {
    if (row.valid_high > row.valid_low) {
      DeviceMemory::instance().check(row.global + row.valid_low, row.valid_high - row.valid_low, "TMA load");
    }
    auto const* const from = reinterpret_cast<u8 const*>(row.global);
    for (u32 i = 0; i < row.bytes; i += 16) {  // swizzles permute units of 16 bytes
      u32 const at = swizzled(offset + row.shared + i, map.swizzle);
      u32 const first = i / 16 * unit, count = std::min(unit, row.bytes - i);
      for (u32 j = first; j < first + count; ++j) {
        cta->shared[at + j - first] = j >= row.valid_low && j < row.valid_high ? from[j] : 0;
      }
      std::memset(&cta->written[at], 1, count);
      if (padded) {
        std::memset(&cta->shared[at + unit], 0xFF, 16 - unit);
        std::memset(&cta->written[at + unit], 0, 16 - unit);
      }
    }
  });
}

/// Copies a box from shared memory. Elements outside of the tensor are not written.
void Machine::store_box(Cta* cta, TensorMap const& map, i32 const* coordinates, u32 offset) {
  for_each_row(map, coordinates, [&](BoxRow const& row) {
    if (row.valid_high > row.valid_low) {
      DeviceMemory::instance().check(row.global + row.valid_low, row.valid_high - row.valid_low, "TMA store");
      DeviceMemory::instance().mark(row.global + row.valid_low, row.valid_high - row.valid_low, true);
    }
    auto* const to = reinterpret_cast<u8*>(row.global);
    for (u32 j = row.valid_low; j < row.valid_high; ++j) {
      to[j] = cta->shared[swizzled(offset + row.shared + j, map.swizzle)];
    }
  });
}

/// cp.async.bulk.tensor [destination], [map, {coordinates}], [mbarrier], CTA mask, cache policy
Outcome Machine::exec_tma_load(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Cta* const self = warp.cta;
  auto const& ctas = self->cluster->ctas;
  bool const multicast = in.mode[1] != 0, pair = in.mode[2] == 2;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 const lane = 1u << l;
    u32 offset;
    Cta* const first = shared_cta(self, static_cast<u32>(uniform(warp, in.operands[0], lane)), true, &offset);
    TensorMap const map = read_tensormap(uniform(warp, in.operands[1], lane));
    std::vector<u64> values;
    for (Operand const& part : in.operands[1].parts.at(0).parts) {
      values.push_back(uniform(warp, part, lane));
    }
    Coordinates at{};
    read_coordinates(in, map, values.size(), at.value, values);
    // The mbarrier's address names a CTA by its rank, which may differ from the destination with
    // cta_group::2.
    u32 const barrier = static_cast<u32>(uniform(warp, in.operands[2], lane));
    u32 const barrier_offset = barrier & kOffsetMask, barrier_rank = barrier >> kRankShift;
    u32 const ranks =
        multicast ? static_cast<u32>(uniform(warp, in.operands[3], lane)) & 0xFFFF : 1u << first->rank;
    u32 const span = swizzle_span(map.swizzle);
    if (offset % 128 != 0) {
      fatal("TMA load to %u, must be a multiple of 128", offset);
    }
    if (ranks >> ctas.size() != 0 || barrier_rank >= ctas.size()) {
      fatal("TMA load: ranks 0x%x, mbarrier of rank %u, but the cluster has %zu CTAs", ranks, barrier_rank,
            ctas.size());
    }
    if (!pair && !multicast && barrier_rank != first->rank) {
      fatal("TMA load: the mbarrier of another CTA needs cta_group::2");
    }
    if (span != 0 && map.row_bytes() != span) {
      fatal("TMA load: rows of %u bytes in a box that is swizzled over %u", map.row_bytes(), span);
    }
    session_.statistics.add("tma", format_text("load %s cta_group::%d%s", map.describe().c_str(), in.mode[2],
                                               multicast ? " multicast" : ""));
    // The operation captures a copy of the tensor map, so it uses the map of the time of its issue.
    auto operation = make_operation(self, "TMA load");
    // A multicast signals the mbarrier at the same offset in each destination CTA. With cta_group::2 that is
    // the CTA of the destination's pair whose rank has the parity of the mbarrier's address.
    auto const barrier_cta = [=](u32 rank) {
      return !multicast ? barrier_rank : pair ? (rank & ~1u) | (barrier_rank & 1) : rank;
    };
    for (u32 rank = 0; rank < ctas.size(); ++rank) {
      if (ranks >> rank & 1) {
        Cta* const to = ctas[rank].get();
        if (to->done) {
          fatal("TMA load to rank %u, which has exited", rank);
        }
        shared_bytes(to, offset, map.box_bytes());  // checks the range
        operation->writes(to, offset, offset + map.box_bytes());
        Cta* const signalled = ctas[barrier_cta(rank)].get();
        mbarrier(signalled, barrier_offset);
        check_signal(warp, signalled, barrier_offset);
      }
    }
    if (races_ != nullptr) {
      races_->start(warp, *operation);
    }
    Cluster* const cluster = self->cluster;
    operation->run = [this, cluster, ranks, map, at, offset, barrier_offset, barrier_cta,
                      raw = operation.get()] {
      for (u32 rank = 0; rank < cluster->ctas.size(); ++rank) {
        if (ranks >> rank & 1) {
          Cta* const to = cluster->ctas[rank].get();
          load_box(to, map, at.value, offset);
          Cta* const signalled = cluster->ctas[barrier_cta(rank)].get();
          if (races_ != nullptr) {
            races_->finish(*raw, *signalled, barrier_offset);
          }
          complete_bytes(signalled, barrier_offset, map.counted_bytes());
        }
      }
    };
    issue(operation, false);
  }
  return Outcome::kNext;
}

/// cp.async.bulk.tensor [map, {coordinates}], [source]
Outcome Machine::exec_tma_store(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Cta* const self = warp.cta;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 const lane = 1u << l;
    TensorMap const map = read_tensormap(uniform(warp, in.operands[0], lane));
    if (map.dtype == kPacked16U4Align16) {
      fatal("TMA store through a map of 16U4_ALIGN16B (.b4x16_p64) is not modelled");
    }
    std::vector<u64> values;
    for (Operand const& part : in.operands[0].parts.at(0).parts) {
      values.push_back(uniform(warp, part, lane));
    }
    Coordinates at{};
    read_coordinates(in, map, values.size(), at.value, values);
    u32 offset;
    shared_cta(self, static_cast<u32>(uniform(warp, in.operands[1], lane)), false, &offset);
    if (offset % 128 != 0) {
      fatal("TMA store from %u, must be a multiple of 128", offset);
    }
    u32 const bytes = map.box_bytes();
    shared_bytes(self, offset, bytes);  // checks the range
    if (std::memchr(&self->written[offset], 0, bytes) != nullptr) {
      hazard("TMA store of uninitialised shared memory in [%u, %u)", offset, offset + bytes);
    }
    session_.statistics.add("tma", "store " + map.describe());
    auto operation = make_operation(self, "TMA store");
    operation->reads(self, offset, offset + bytes);
    auto const finished = std::make_shared<bool>(false);
    warp.bulk[l].open.push_back({finished, self, offset, offset + bytes});
    if (races_ != nullptr) {
      races_->start(warp, *operation);
    }
    operation->run = [this, self, map, at, offset, finished] {
      store_box(self, map, at.value, offset);
      *finished = true;
    };
    issue(operation, false);
  }
  return Outcome::kNext;
}

/// cp.async.bulk.commit_group
Outcome Machine::exec_bulk_commit(Warp& warp, Group&, Instruction const&, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      BulkGroups& bulk = warp.bulk[l];
      bulk.committed.push_back(std::move(bulk.open));
      bulk.open.clear();
    }
  }
  return Outcome::kNext;
}

/// Finds the groups that this wait is the first of the lane to wait for. The wait is counted as useful if
/// there is one; with .read, if what the group reads is written afterwards.
void Machine::note_bulk_wait(Warp& warp, Instruction const& in, u32 mask) {
  size_t const most = in.operands[0].value;
  bool const read = in.has("read");
  bool useful = false;
  for (auto& [lane, bulk] : warp.bulk) {
    if ((mask >> lane & 1) == 0 || bulk.committed.size() <= most) {
      continue;
    }
    size_t const end = bulk.committed.size() - most;
    size_t const begin = read ? std::max(bulk.waited_read, bulk.waited) : bulk.waited;
    for (size_t i = begin; i < end; ++i) {
      useful = useful || (!read && !bulk.committed[i].empty());
      for (BulkGroups::Store const& store : bulk.committed[i]) {
        if (read && races_ != nullptr) {
          races_->note_wait(*store.cta, store.low, store.high, in.line);
        }
      }
    }
    size_t& waited = read ? bulk.waited_read : bulk.waited;
    waited = std::max(waited, end);
  }
  if (useful) {
    session_.statistics.add_useful(kernel_, in.line);
  }
}

/// cp.async.bulk.wait_group N: waits until at most the N groups that were committed last are pending.
Outcome Machine::exec_bulk_wait(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!group.resumed && mask != 0) {
    if (session_.options.trace_fences != 0) {
      note_bulk_wait(warp, in, mask);
    }
    Group probe = group;
    probe.mask = mask;
    probe.wait = Wait::kBulk;
    probe.wait_address = static_cast<u32>(in.operands[0].value);
    if (!is_over(warp, probe)) {
      group.wait = Wait::kBulk;
      group.wait_address = probe.wait_address;
      return Outcome::kBlocked;
    }
  }
  group.resumed = false;
  return Outcome::kNext;
}

}  // namespace ptxemu
