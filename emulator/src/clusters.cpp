// Creation of clusters and CTAs, and the texts of reports.
#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

/// The coordinates of the first CTA of a cluster.
void Machine::first_cta_of(u64 index, u32 coordinates[3]) const {
  for (int i = 0; i < 3; ++i) {
    u64 const count = launch_.grid[i] / launch_.cluster[i];
    coordinates[i] = static_cast<u32>(index % count) * launch_.cluster[i];
    index /= count;
  }
}

void Machine::launch_cluster(u64 index) {
  auto cluster = std::make_unique<Cluster>();
  cluster->index = index;
  first_cta_of(index, cluster->base);
  u32 const count = launch_.cluster[0] * launch_.cluster[1] * launch_.cluster[2];
  u32 const warps = (launch_.num_threads() + kWarpSize - 1) / kWarpSize;
  cluster->num_threads = count * warps * kWarpSize;  // the cluster barrier counts whole warps
  for (u32 rank = 0; rank < count; ++rank) {
    cluster->ctas.push_back(make_cta(*cluster, rank));
  }
  for (auto& cta : cluster->ctas) {
    for (Warp& warp : cta->warps) {
      warps_.push_back(&warp);
    }
  }
  live_.push_back(std::move(cluster));
}

/// Shared memory starts as random bytes whose top bits are set, and is marked as never written.
std::unique_ptr<Cta> Machine::make_cta(Cluster& cluster, u32 rank) {
  auto cta = std::make_unique<Cta>();
  cta->rank = rank;
  cta->cluster = &cluster;
  u32 const offset[3] = {rank % launch_.cluster[0], rank / launch_.cluster[0] % launch_.cluster[1],
                         rank / launch_.cluster[0] / launch_.cluster[1]};
  for (int i = 0; i < 3; ++i) {
    cta->id[i] = cluster.base[i] + offset[i];
  }
  cta->shared_end = kSharedBase + kernel_.static_shared_bytes + launch_.dynamic_shared_bytes;
  size_t const bytes =
      (cta->shared_end + 23) / 8 * 8;  // at least 16 more: the last unit of a TMA box may be partial
  cta->shared.resize(bytes);
  for (size_t i = 0; i < bytes; i += 8) {
    u64 const garbage = random_() | 0x8080808080808080ull;
    std::memcpy(&cta->shared[i], &garbage, 8);
  }
  cta->written.resize(bytes);
  u32 const threads = launch_.num_threads();
  cta->warps.resize((threads + kWarpSize - 1) / kWarpSize);
  for (u32 i = 0; i < cta->warps.size(); ++i) {
    Warp& warp = cta->warps[i];
    warp.cta = cta.get();
    warp.index = i;
    warp.priority = random_();
    u32 const lanes = std::min<u32>(kWarpSize, threads - i * kWarpSize);
    warp.alive = lanes == kWarpSize ? kFullMask : (1u << lanes) - 1;
    warp.groups.push_back({0, warp.alive});
    // calloc does not touch the pages, so registers that a warp never uses occupy no memory.
    size_t const rows = std::max<size_t>(kernel_.registers.size(), 1);
    warp.registers.reset(static_cast<u64*>(std::calloc(rows * kWarpSize, sizeof(u64))));
    warp.local.assign(static_cast<size_t>(kernel_.local_bytes) * kWarpSize, 0xFF);
    if (races_ != nullptr) {
      races_->add_warp(warp);
    }
  }
  ++ctas_;
  return cta;
}

std::string Machine::location() const {
  if (current_warp_ == nullptr || current_ == nullptr) {
    return format_text("in %.100s", kernel_.name.c_str());
  }
  Cta const& cta = *current_warp_->cta;
  return format_text("in %.100s, CTA (%u,%u,%u), warp %u, %s:%d: %s", kernel_.name.c_str(), cta.id[0],
                     cta.id[1], cta.id[2], current_warp_->index, kernel_.file.c_str(), current_->line,
                     current_->text.c_str());
}

void Machine::run_reporting() {
  try {
    run();
  } catch (Fatal const& error) {
    throw Fatal(std::string(error.what()) + "\n  " + location());
  }
}

void Machine::hazard(char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  char text[600];
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  // The line and the start of the text identify a kind of hazard: its numbers differ from time to time.
  std::string const key = format_text("%d %.50s", current_ == nullptr ? 0 : current_->line, text);
  bool const fresh = reported_.insert(key).second;
  session_.report_hazard(fresh ? std::string(text) + "\n  " + location() : std::string(), fresh);
  if (session_.options.hazards_are_fatal != 0) {
    fatal("%s", text);
  }
}

/// What each group of lanes waits for.
std::string Machine::deadlock_report() {
  static char const* const names[] = {
      "nothing",     "an mbarrier",  "a named barrier",     "the cluster barrier",
      "other lanes", "a bulk group", "TMEM of the CTA pair"};
  std::string report = "deadlock: no warp can run and no asynchronous operation is pending";
  for (Warp const* warp : warps_) {
    for (Group const& group : warp->groups) {
      Cta const& cta = *warp->cta;
      Instruction const& in = kernel_.code[static_cast<size_t>(group.pc)];
      Wait const wait = group.timed_out ? Wait::kMbarrier : group.wait;
      report += format_text("\n  CTA (%u,%u,%u) warp %u lanes %08x waits for %s", cta.id[0], cta.id[1],
                            cta.id[2], warp->index, group.mask, names[static_cast<int>(wait)]);
      if (wait == Wait::kMbarrier) {
        Mbarrier const barrier = mbarrier(group.wait_cta, group.wait_address);
        report += format_text(" at %u, parity %u [phase %u, %u of %u arrivals pending, %d bytes]",
                              group.wait_address, group.wait_parity, barrier.phase, barrier.pending,
                              barrier.expected, barrier.tx_count);
      } else if (wait == Wait::kBarrier) {
        NamedBarrier const& barrier = cta.barriers[group.wait_address];
        report +=
            format_text(" %u (%u of %u threads)", group.wait_address, barrier.arrived, barrier.expected);
      }
      report += format_text(", line %d: %.100s", in.line, in.text.c_str());
    }
  }
  return report;
}

}  // namespace ptxemu
