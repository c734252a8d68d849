// Loads and stores of threads in all state spaces, with the checks of each space.
#include <algorithm>

#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

Cta* Machine::shared_cta(Cta* self, u32 address, bool cluster, u32* offset) {
  u32 const rank = address >> kRankShift;
  *offset = address & kOffsetMask;
  if (!cluster && rank != self->rank) {
    fatal("shared::cta access at 0x%x, which belongs to rank %u of the cluster", address, rank);
  }
  if (rank >= self->cluster->ctas.size()) {
    fatal("shared::cluster access at 0x%x: the cluster has no rank %u", address, rank);
  }
  Cta* const cta = self->cluster->ctas[rank].get();
  if (cta->done) {
    fatal("access to the shared memory of rank %u, which has exited", rank);
  }
  return cta;
}

/// The bytes at an offset of a CTA's shared memory; fatal if they lie outside of it.
u8* Machine::shared_bytes(Cta* cta, u32 offset, u32 bytes) {
  if (offset < kSharedBase || offset + bytes > cta->shared_end) {
    fatal("shared memory access [%u, %u) outside of [%u, %u)", offset, offset + bytes, kSharedBase,
          cta->shared_end);
  }
  return &cta->shared[offset];
}

/// Whether the current instruction may race with others like it: atomics, and loads and stores that are
/// volatile or have a memory order.
bool Machine::is_atomic() const {
  return current_->handler == &Machine::exec_atomic || current_->has("volatile") ||
         current_->has("relaxed") || current_->has("acquire") || current_->has("release");
}

/// Reports a hazard if a pending asynchronous operation writes the range of the access, or reads it and the
/// access is a write. `fifo` names the tcgen05 queue that the access belongs to, if any.
void Machine::check_conflicts(Cta const* cta, bool tmem, Access const& access, char const* what,
                              Cta const* fifo) {
  for (Access const& pending : cta->pending[tmem]) {
    if ((pending.write || access.write) && pending.low < access.high && access.low < pending.high &&
        (!tmem || (pending.lane_low < access.lane_high && access.lane_low < pending.lane_high)) &&
        pending.operation != access.operation && (fifo == nullptr || pending.fifo != fifo)) {
      hazard("%s %s [%u, %u) while a %s that %s [%u, %u) is pending", what,
             tmem ? "TMEM columns" : "shared memory", access.low, access.high, pending.what,
             pending.write ? "writes" : "reads", pending.low, pending.high);
      return;
    }
  }
}

void Machine::shared_read(Warp& warp, Cta* cta, u32 offset, u32 bytes, void* out) {
  u8 const* const from = shared_bytes(cta, offset, bytes);
  if (!cta->pending[0].empty()) {
    check_conflicts(cta, false, {offset, offset + bytes, 0, 0, false, 0, "", nullptr}, "thread reads",
                    nullptr);
  }
  if (std::memchr(&cta->written[offset], 0, bytes) != nullptr) {
    hazard("read of uninitialised shared memory [%u, %u)", offset, offset + bytes);
  }
  if (races_ != nullptr) {
    if (char const* const race = races_->access(warp, *cta, offset, bytes, false, is_atomic())) {
      hazard("read of shared memory [%u, %u) races with a %s", offset, offset + bytes, race);
    }
  }
  std::memcpy(out, from, bytes);
}

void Machine::shared_write(Warp& warp, Cta* cta, u32 offset, u32 bytes, void const* in) {
  u8* const to = shared_bytes(cta, offset, bytes);
  if (!cta->pending[0].empty()) {
    check_conflicts(cta, false, {offset, offset + bytes, 0, 0, true, 0, "", nullptr}, "thread writes",
                    nullptr);
  }
  // mbarriers are opaque: only the mbarrier instructions may change their 8 bytes.
  if (!cta->mbarriers.empty()) {
    auto const next = cta->mbarriers.lower_bound(offset < 7 ? 0 : offset - 7);
    if (next != cta->mbarriers.end() && *next < offset + bytes) {
      fatal("store to [%u, %u) overwrites the mbarrier at %u", offset, offset + bytes, *next);
    }
  }
  if (races_ != nullptr) {
    if (char const* const race = races_->access(warp, *cta, offset, bytes, true, is_atomic())) {
      hazard("write of shared memory [%u, %u) races with a %s", offset, offset + bytes, race);
    }
  }
  std::memset(&cta->written[offset], 1, bytes);
  std::memcpy(to, in, bytes);
}

/// The space that an address lies in. A generic address, or one in the window of its space, becomes the
/// address within the space. Constants lie in global memory.
Space Machine::space_of(Space space, u64* address) {
  auto const in_window = [&](u64 window) { return *address >= window && *address < window + kWindowBytes; };
  if (space == Space::kParam && *address < kParamWindow) {
    return Space::kLocal;  // .param variables around a call, see Parser::directive
  }
  if (space == Space::kGeneric) {
    if (in_window(kSharedWindow)) {
      *address -= kSharedWindow;
      return Space::kSharedCluster;
    }
    if (in_window(kLocalWindow)) {
      *address -= kLocalWindow;
      return Space::kLocal;
    }
    space = in_window(kParamWindow) ? Space::kParam : Space::kGlobal;
  }
  if (space == Space::kParam) {
    *address -= kParamWindow;
  }
  return space == Space::kConst ? Space::kGlobal : space;
}

/// The bytes at an offset of a thread's local memory; fatal if they lie outside of it.
u8* Machine::local_bytes(Warp& warp, int lane, u64 offset, u32 bytes) {
  if (offset + bytes > kernel_.local_bytes) {
    fatal("local memory access [%llu, +%u) outside of %u bytes", static_cast<unsigned long long>(offset),
          bytes, kernel_.local_bytes);
  }
  return &warp.local[static_cast<u64>(lane) * kernel_.local_bytes + offset];
}

void Machine::memory_read(Warp& warp, Space space, u64 address, u32 bytes, int lane, void* out) {
  u64 const original = address;
  space = space_of(space, &address);
  if (address % bytes != 0) {
    fatal("misaligned read of %u bytes at 0x%llx", bytes, static_cast<unsigned long long>(original));
  }
  switch (space) {
    case Space::kParam:
      if (address + bytes > launch_.params.size()) {
        fatal("read of parameter bytes [%llu, +%u) of %zu", static_cast<unsigned long long>(address), bytes,
              launch_.params.size());
      }
      std::memcpy(out, &launch_.params[address], bytes);
      return;
    case Space::kShared:
    case Space::kSharedCluster: {
      u32 offset;
      Cta* const cta =
          shared_cta(warp.cta, static_cast<u32>(address), space == Space::kSharedCluster, &offset);
      shared_read(warp, cta, offset, bytes, out);
      return;
    }
    case Space::kLocal: std::memcpy(out, local_bytes(warp, lane, address, bytes), bytes); return;
    default: break;
  }
  DeviceMemory& memory = DeviceMemory::instance();
  memory.check(address, bytes, "read");
  if (session_.options.report_unwritten_global != 0) {
    if (size_t const first = memory.first_unwritten(address, bytes); first < bytes) {
      hazard("read of global memory that was never written, at 0x%llx + %zu",
             static_cast<unsigned long long>(address), first);
    }
  }
  std::memcpy(out, reinterpret_cast<void const*>(address), bytes);
}

void Machine::memory_write(Warp& warp, Space space, u64 address, u32 bytes, int lane, void const* in) {
  u64 const original = address;
  space = space_of(space, &address);
  if (address % bytes != 0) {
    fatal("misaligned write of %u bytes at 0x%llx", bytes, static_cast<unsigned long long>(original));
  }
  switch (space) {
    case Space::kShared:
    case Space::kSharedCluster: {
      u32 offset;
      Cta* const cta =
          shared_cta(warp.cta, static_cast<u32>(address), space == Space::kSharedCluster, &offset);
      shared_write(warp, cta, offset, bytes, in);
      return;
    }
    case Space::kLocal: std::memcpy(local_bytes(warp, lane, address, bytes), in, bytes); return;
    case Space::kGlobal: break;
    default: fatal("write to a space that is read-only");
  }
  DeviceMemory::instance().check(address, bytes, "write");
  DeviceMemory::instance().mark(address, bytes, true);
  std::memcpy(reinterpret_cast<void*>(address), in, bytes);
}

}  // namespace ptxemu
