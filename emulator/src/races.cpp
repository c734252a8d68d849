// The vector clocks of warps, and the last accesses to shared memory and TMEM.
#include "races.hpp"

#include <algorithm>
#include <iterator>
#include <set>

#include "machine.hpp"

namespace ptxemu {

RaceDetector::State& RaceDetector::state(Warp const& warp) { return states_[warp.cta->cluster]; }

RaceDetector::WarpState& RaceDetector::self(Warp const& warp) { return state(warp).warps[warp.race_id]; }

RaceDetector::Memory& RaceDetector::memory(State& state, Cta const& cta) {
  Memory& memory = state.memory[&cta];
  if (memory.words.empty()) {
    memory.words.resize((cta.shared_end + 3) / 4);
    memory.async_writes.resize((cta.shared_end + kUnit - 1) / kUnit);
    memory.touched.resize((cta.shared_end + kChunk - 1) / kChunk);
  }
  return memory;
}

void RaceDetector::join(Clock& into, Clock const& from) {
  into.resize(std::max(into.size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) {
    into[i] = std::max(into[i], from[i]);
  }
}

void RaceDetector::join(Known& into, Known const& from) {
  join(into.execution, from.execution);
  join(into.base, from.base);
  join(into.proxy, from.proxy);
  join(into.tcgen05, from.tcgen05);
  join(into.inits, from.inits);
}

void RaceDetector::add_warp(Warp& warp) {
  std::vector<WarpState>& warps = state(warp).warps;
  warps.resize(std::max<size_t>(warps.size(), kEngine + 1));
  warp.race_id = static_cast<u32>(warps.size());
  warps.emplace_back();
  Known& now = warps.back().now;
  for (Clock* clock : {&now.execution, &now.base, &now.proxy, &now.tcgen05, &now.inits}) {
    clock->resize(warps.size());
  }
  now.base.back() = 1;
}

void RaceDetector::remove_cluster(Cluster const& cluster) {
  std::set<int> useful = state(cluster).needed_waits;
  for (auto const& [cta, memory] : state(cluster).memory) {
    for (auto const& [line, fenced] : memory.fenced) {
      for (size_t i = 0; i < memory.matters.size(); ++i) {
        if ((fenced[i] & memory.matters[i]) != 0) {
          useful.insert(line);
          break;
        }
      }
    }
  }
  for (int line : useful) {
    ++useful_[line];
  }
  states_.erase(&cluster);
}

u32 RaceDetector::clock_of(Warp const& warp) { return self(warp).now.base[warp.race_id]; }

/// Later accesses of the warp are not covered by what it has released or fenced so far.
void RaceDetector::advance(Warp const& warp) { ++self(warp).now.base[warp.race_id]; }

void RaceDetector::release(Warp const& warp, Known& released, Order order) {
  WarpState& w = self(warp);
  w.now.execution[warp.race_id] = w.now.base[warp.race_id];
  if (order == Order::kFull) {
    join(released, w.now);
  } else {
    join(released, w.fenced);
    join(released.execution, w.now.execution);
    join(released.tcgen05, w.now.tcgen05);
    join(released.inits, w.now.inits);
  }
  advance(warp);
}

void RaceDetector::acquire(Warp const& warp, Known const& acquired, Order order) {
  WarpState& w = self(warp);
  if (order == Order::kFull) {
    join(w.now, acquired);
  } else {
    join(w.unacquired, acquired);
    join(w.now.execution, acquired.execution);
    join(w.now.tcgen05, acquired.tcgen05);
  }
}

void RaceDetector::arrive_barrier(Warp const& warp, u32 id) {
  release(warp, state(warp).barriers[{warp.cta, id}].released, Order::kFull);
}

void RaceDetector::complete_barrier(Cta const& cta, u32 id) {
  Point& point = state(*cta.cluster).barriers[{&cta, id}];
  join(point.acquired, point.released);
}

void RaceDetector::leave_barrier(Warp const& warp, u32 id) {
  acquire(warp, state(warp).barriers[{warp.cta, id}].acquired, Order::kFull);
}

void RaceDetector::arrive_cluster(Warp const& warp, Order order) {
  release(warp, state(warp).barrier.released, order);
}

void RaceDetector::complete_cluster(Cluster const& cluster) {
  Point& point = state(cluster).barrier;
  join(point.acquired, point.released);
}

void RaceDetector::leave_cluster(Warp const& warp, Order order) {
  acquire(warp, state(warp).barrier.acquired, order);
}

void RaceDetector::init_mbarrier(Warp const& warp, Cta const& cta, u32 offset) {
  Point& point = state(warp).mbarriers[{&cta, offset}];
  point = {};
  point.init_warp = static_cast<u16>(warp.race_id);
  point.init_clock = clock_of(warp);
}

bool RaceDetector::init_is_ordered(Warp const& warp, Cta const& cta, u32 offset, bool async) {
  Point const& point = state(warp).mbarriers[{&cta, offset}];
  Known const& now = self(warp).now;
  u16 const by = point.init_warp;
  bool const generic = !async && (by == warp.race_id || at(now.execution, by) >= point.init_clock);
  return generic || at(now.inits, by) >= point.init_clock || at(now.proxy, by) >= point.init_clock;
}

void RaceDetector::arrive_mbarrier(Warp const& warp, Cta const& cta, u32 offset, Order order) {
  release(warp, state(warp).mbarriers[{&cta, offset}].released, order);
}

void RaceDetector::complete_phase(Cta const& cta, u32 offset) {
  Point& point = state(*cta.cluster).mbarriers[{&cta, offset}];
  join(point.acquired, point.released);
}

void RaceDetector::observe_mbarrier(Warp const& warp, Cta const& cta, u32 offset, Order order) {
  acquire(warp, state(warp).mbarriers[{&cta, offset}].acquired, order);
}

/// A release fence makes a later relaxed arrival a release of what is before the fence, and an acquire fence
/// makes an earlier relaxed wait an acquire. One function does both: an .acquire or .release alone is rare.
void RaceDetector::fence(Warp const& warp) {
  WarpState& w = self(warp);
  join(w.now, w.unacquired);
  w.fenced = w.now;
  advance(warp);
}

void RaceDetector::fence_proxy(Warp const& warp, int line) {
  Known& now = self(warp).now;
  if (trace_) {
    note_fence(warp, line);
  }
  join(now.proxy, now.base);
  advance(warp);
}

void RaceDetector::note_fence(Warp const& warp, int line) {
  State& s = state(warp);
  Known const& now = s.warps[warp.race_id].now;
  auto const is_new = [&](auto const& entries) {
    return std::any_of(std::begin(entries), std::end(entries), [&](Entry const& entry) {
      return entry.clock != 0 && at(now.base, entry.warp) >= entry.clock &&
             at(now.proxy, entry.warp) < entry.clock;
    });
  };
  for (auto& [cta, memory] : s.memory) {
    std::vector<u8>& fenced = memory.fenced[line];
    fenced.resize(memory.words.size());
    memory.matters.resize(memory.words.size());
    for (size_t i = 0; i < memory.words.size(); ++i) {
      if (memory.touched[i * 4 / kChunk] != 0) {
        Word const& word = memory.words[i];
        fenced[i] |= (is_new(word.writers) ? kWritten : 0) | (is_new(word.readers) ? kRead : 0);
      }
    }
  }
}

void RaceDetector::note_wait(Cta const& cta, u32 low, u32 high, int line) {
  Memory& m = memory(state(*cta.cluster), cta);
  m.waited.resize(m.words.size());
  std::fill(m.waited.begin() + low / 4, m.waited.begin() + std::min<size_t>((high + 3) / 4, m.waited.size()),
            line);
}

void RaceDetector::note_write(State& state, Memory& memory, u32 low, u32 high) {
  for (size_t i = low / 4; i < std::min<size_t>((high + 3) / 4, memory.waited.size()); ++i) {
    if (memory.waited[i] != 0) {
      state.needed_waits.insert(memory.waited[i]);
      memory.waited[i] = 0;
    }
  }
}

void RaceDetector::fence_inits(Warp const& warp) {
  Known& now = self(warp).now;
  now.inits[warp.race_id] = now.base[warp.race_id];
  advance(warp);
}

void RaceDetector::fence_tcgen05_before(Warp const& warp) {
  Known& now = self(warp).now;
  now.tcgen05[warp.race_id] = now.base[warp.race_id];
  advance(warp);
}

void RaceDetector::fence_tcgen05_after(Warp const& warp) {
  WarpState& w = self(warp);
  join(w.tmem, w.now.tcgen05);
}

/// is_commit: tcgen05.commit performs a tcgen05.fence::before_thread_sync (PTX ISA, "Non-pipelined
/// instructions, same thread").
void RaceDetector::start(Warp const& warp, AsyncOperation const& operation, bool is_commit) {
  Known& known = operations_[operation.id].known;
  u32 const clock = clock_of(warp);
  release(warp, known, Order::kFull);
  if (is_commit) {
    known.tcgen05[warp.race_id] = clock;
  }
}

void RaceDetector::finish(AsyncOperation const& operation, Cta const& cta, u32 offset) {
  auto const found = operations_.find(operation.id);
  if (found == operations_.end()) {
    return;
  }
  Issued& issued = found->second;
  State& s = state(*cta.cluster);
  if (issued.completed == 0) {
    issued.completed = ++s.engine;
    issued.known.base[kEngine] = issued.completed;
    for (AsyncOperation::Region const& region : operation.regions) {
      if (!region.tmem && region.write) {
        std::vector<u32>& writes = memory(s, *region.cta).async_writes;
        std::fill(writes.begin() + region.low / kUnit,
                  writes.begin() + std::min<long>((region.high + kUnit - 1) / kUnit, writes.size()),
                  issued.completed);
      }
    }
  }
  join(s.mbarriers[{&cta, offset}].released, issued.known);
}

template <int N>
bool RaceDetector::conflicts(Entry const (&entries)[N], Clock const& clock, u16 self, u8 bytes, bool atomic) {
  for (Entry const& entry : entries) {
    if (entry.clock != 0 && entry.warp != self && (entry.bytes & bytes) != 0 && !(atomic && entry.atomic) &&
        (entry.warp >= clock.size() || clock[entry.warp] < entry.clock)) {
      return true;
    }
  }
  return false;
}

/// Replaces an entry that is ordered before this access and covers no other bytes: an access that races with
/// the old entry races with the new one too. If there is none, an entry is lost, and races with it are
/// missed.
template <int N>
void RaceDetector::record(Entry (&entries)[N], Clock const& clock, Entry const& entry) {
  Entry* slot = &entries[entry.warp % N];  // the entry that is lost if no better one is found
  for (Entry& old : entries) {
    bool const ordered = old.warp < clock.size() && clock[old.warp] >= old.clock;
    if (old.clock == 0 || ((old.warp == entry.warp || ordered) && (old.bytes & ~entry.bytes) == 0)) {
      slot = &old;
      break;
    }
  }
  *slot = entry;
}

char const* RaceDetector::access(Warp const& warp, Cta const& cta, u32 offset, u32 bytes, bool is_write,
                                 bool atomic) {
  State& s = state(warp);
  Clock const& clock = s.warps[warp.race_id].now.base;
  Memory& m = memory(s, cta);
  auto const self = static_cast<u16>(warp.race_id);
  char const* race = nullptr;
  if (trace_ && is_write) {
    note_write(s, m, offset, offset + bytes);
  }
  for (u32 unit = offset / kUnit; unit * kUnit < offset + bytes; ++unit) {
    if (m.async_writes[unit] > clock[kEngine]) {
      race = "write of an asynchronous operation whose completion the warp has not acquired";
    }
  }
  for (u32 chunk = offset / kChunk; chunk * kChunk < offset + bytes; ++chunk) {
    m.touched[chunk] = 1;
  }
  // An access is compared word by word, with a mask of the bytes that it touches in each.
  for (u32 at = offset & ~3u; at < offset + bytes; at += 4) {
    u32 const first = std::max(at, offset) - at, last = std::min(at + 4, offset + bytes) - at;
    auto const mask = static_cast<u8>((1u << last) - (1u << first));
    Word& word = m.words[at / 4];
    if (conflicts(word.writers, clock, self, mask, atomic)) {
      race = "write of another warp";
    } else if (is_write && conflicts(word.readers, clock, self, mask, atomic)) {
      race = "read of another warp";
    }
    Entry const entry = {clock[warp.race_id], self, mask, static_cast<u8>(atomic)};
    if (is_write) {
      record(word.writers, clock, entry);
    } else {
      record(word.readers, clock, entry);
    }
  }
  return race;
}

char const* RaceDetector::async_access(Warp const& warp, Cta const& cta, u32 low, u32 high, bool is_write,
                                       bool fenced_reads) {
  State& s = state(warp);
  Known const& now = s.warps[warp.race_id].now;
  Memory& m = memory(s, cta);
  high = std::min(high, cta.shared_end);
  if (trace_ && is_write) {
    note_write(s, m, low, high);
  }
  if (trace_ && high > low) {
    m.matters.resize(m.words.size());
    for (u32 i = low / 4; i < (high + 3) / 4; ++i) {
      m.matters[i] |= kWritten | (is_write && fenced_reads ? kRead : 0);
    }
  }
  for (u32 unit = low / kUnit; unit * kUnit < high; ++unit) {
    if (m.async_writes[unit] > now.base[kEngine]) {
      return "written by an asynchronous operation whose completion the warp has not acquired";
    }
  }
  // An operation of the async proxy is no warp, so that it is ordered after the issuing warp's own accesses
  // by a proxy fence alone, too.
  constexpr u16 kNobody = kEngine;
  for (u32 chunk = low / kChunk; chunk * kChunk < high; ++chunk) {
    if (m.touched[chunk] == 0) {
      continue;
    }
    u32 const end = std::min(high, (chunk + 1) * kChunk);
    for (u32 at = std::max(low, chunk * kChunk) & ~3u; at < end; at += 4) {
      Word const& word = m.words[at / 4];
      if (conflicts(word.writers, now.proxy, kNobody, 15, false)) {
        return "written by threads without a fence.proxy.async after it";
      }
      if (is_write && conflicts(word.readers, now.base, kNobody, 15, false)) {
        return "read by threads that no synchronization orders before it";
      }
      if (is_write && fenced_reads && conflicts(word.readers, now.proxy, kNobody, 15, false)) {
        return "read by threads without a fence.proxy.async after it";
      }
    }
  }
  return nullptr;
}

bool RaceDetector::tmem_is_ordered(Warp const& warp, Cta const& cta, u32 low, u32 high, u32 first, u32 last,
                                   bool is_write) {
  State& s = state(warp);
  WarpState const& w = s.warps[warp.race_id];
  std::vector<TmemCell> const& cells = memory(s, cta).tmem;
  if (cells.empty()) {
    return true;
  }
  auto const covers = [&](u16 by, u32 clock) {
    return clock == 0 || by == warp.race_id || at(w.now.base, by) >= clock || at(w.tmem, by) >= clock;
  };
  for (u32 column = low; column < high; ++column) {
    for (u32 quarter = first; quarter < last; ++quarter) {
      TmemCell const& cell = cells[column * kTmemQuarters + quarter];
      if (!covers(cell.writer, cell.write_clock) || (is_write && !covers(cell.reader, cell.read_clock))) {
        return false;
      }
    }
  }
  return true;
}

void RaceDetector::record_tmem(Warp const& warp, Cta const& cta, u32 low, u32 high, u32 first, u32 last,
                               bool is_write) {
  std::vector<TmemCell>& cells = memory(state(warp), cta).tmem;
  cells.resize(kTmemColumns * kTmemQuarters);
  u32 const clock = clock_of(warp);
  auto const by = static_cast<u16>(warp.race_id);
  for (u32 column = low; column < high; ++column) {
    for (u32 quarter = first; quarter < last; ++quarter) {
      TmemCell& cell = cells[column * kTmemQuarters + quarter];
      (is_write ? cell.write_clock : cell.read_clock) = clock;
      (is_write ? cell.writer : cell.reader) = by;
    }
  }
}

void RaceDetector::change_map(Warp const& warp, u64 address) {
  state(warp).maps[address] = {{clock_of(warp), static_cast<u16>(warp.race_id), 0, 0}, {}};
  advance(warp);
}

void RaceDetector::acquire_map(Warp const& warp, u64 address) {
  State& s = state(warp);
  auto const found = s.maps.find(address);
  if (found == s.maps.end()) {
    return;
  }
  Entry const& changed = found->second.changed;
  if (changed.warp == warp.race_id || at(self(warp).now.base, changed.warp) >= changed.clock) {
    found->second.acquired.push_back({clock_of(warp), static_cast<u16>(warp.race_id), 0, 0});
  }
}

char const* RaceDetector::use_map(Warp const& warp, u64 address) {
  State& s = state(warp);
  auto const found = s.maps.find(address);
  if (found == s.maps.end()) {
    return nullptr;
  }
  for (Entry const& entry : found->second.acquired) {
    if (entry.warp == warp.race_id || at(self(warp).now.base, entry.warp) >= entry.clock) {
      return nullptr;
    }
  }
  return "that threads have changed, without a fence.proxy.tensormap::generic.acquire after the change";
}

}  // namespace ptxemu
