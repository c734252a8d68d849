// The vector clocks of warps, and the last accesses to each word of shared memory.
#include "races.hpp"

#include <algorithm>

#include "machine.hpp"

namespace ptxemu {

RaceDetector::State& RaceDetector::state(Warp const& warp) { return states_[warp.cta->cluster]; }

void RaceDetector::join(Clock& into, Clock const& from) {
  into.resize(std::max(into.size(), from.size()));
  for (size_t i = 0; i < from.size(); ++i) {
    into[i] = std::max(into[i], from[i]);
  }
}

void RaceDetector::add_warp(Warp& warp) {
  std::vector<Clock>& clocks = state(warp).clocks;
  warp.race_id = static_cast<u32>(clocks.size());
  clocks.emplace_back(clocks.size() + 1);
  clocks.back().back() = 1;
}

void RaceDetector::remove_cluster(Cluster const& cluster) { states_.erase(&cluster); }

/// Accesses that the warp has made are ordered before the point; later ones are not, since its clock
/// advances.
void RaceDetector::release(Warp const& warp, Point& point) {
  Clock& clock = state(warp).clocks[warp.race_id];
  join(point.released, clock);
  ++clock[warp.race_id];
}

void RaceDetector::arrive_barrier(Warp const& warp, u32 id) {
  release(warp, state(warp).barriers[{warp.cta, id}]);
}

void RaceDetector::complete_barrier(Cta const& cta, u32 id) {
  Point& point = state(*cta.cluster).barriers[{&cta, id}];
  join(point.acquired, point.released);
}

void RaceDetector::leave_barrier(Warp const& warp, u32 id) {
  State& s = state(warp);
  join(s.clocks[warp.race_id], s.barriers[{warp.cta, id}].acquired);
}

void RaceDetector::arrive_cluster(Warp const& warp) { release(warp, state(warp).barrier); }

void RaceDetector::complete_cluster(Cluster const& cluster) {
  Point& point = state(cluster).barrier;
  join(point.acquired, point.released);
}

void RaceDetector::leave_cluster(Warp const& warp) {
  State& s = state(warp);
  join(s.clocks[warp.race_id], s.barrier.acquired);
}

void RaceDetector::arrive_mbarrier(Warp const& warp, Cta const& cta, u32 offset) {
  release(warp, state(warp).mbarriers[{&cta, offset}]);
}

void RaceDetector::complete_phase(Cta const& cta, u32 offset) {
  Point& point = state(*cta.cluster).mbarriers[{&cta, offset}];
  join(point.acquired, point.released);
}

void RaceDetector::observe_mbarrier(Warp const& warp, Cta const& cta, u32 offset) {
  State& s = state(warp);
  join(s.clocks[warp.race_id], s.mbarriers[{&cta, offset}].acquired);
}

void RaceDetector::start(Warp const& warp, AsyncOperation const& operation) {
  Point point;
  release(warp, point);
  operations_[operation.id] = std::move(point.released);
}

void RaceDetector::finish(AsyncOperation const& operation, Cta const& cta, u32 offset) {
  if (auto const found = operations_.find(operation.id); found != operations_.end()) {
    join(state(*cta.cluster).mbarriers[{&cta, offset}].released, found->second);
  }
}

bool RaceDetector::conflicts(Entry const (&entries)[kEntries], Clock const& clock, u16 self, u8 bytes,
                             bool atomic) {
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
void RaceDetector::record(Entry (&entries)[kEntries], Clock const& clock, Entry const& entry) {
  Entry* slot = &entries[entry.warp % kEntries];  // the entry that is lost if no better one is found
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
  Clock const& clock = s.clocks[warp.race_id];
  std::vector<Word>& words = s.words[&cta];
  if (words.empty()) {
    words.resize((cta.shared_end + 3) / 4);
  }
  auto const self = static_cast<u16>(warp.race_id);
  char const* race = nullptr;
  // An access is compared word by word, with a mask of the bytes that it touches in each.
  for (u32 at = offset & ~3u; at < offset + bytes; at += 4) {
    u32 const first = std::max(at, offset) - at, last = std::min(at + 4, offset + bytes) - at;
    auto const mask = static_cast<u8>((1u << last) - (1u << first));
    Word& word = words[at / 4];
    if (conflicts(word.writers, clock, self, mask, atomic)) {
      race = "write of another warp";
    } else if (is_write && conflicts(word.readers, clock, self, mask, atomic)) {
      race = "read of another warp";
    }
    Entry const entry = {clock[warp.race_id], self, mask, static_cast<u8>(atomic)};
    record(is_write ? word.writers : word.readers, clock, entry);
  }
  return race;
}

}  // namespace ptxemu
