// tcgen05: allocation of TMEM, copies of scale factors, and commits (PTX ISA, "TensorCore 5th Generation
// Family Instructions": tcgen05.alloc, tcgen05.cp, tcgen05.commit). exec_tmem.cpp has loads and stores,
// mma.cpp the products.
//
// Each CTA has its own 512 columns of TMEM, so that CTAs of one launch never wait for columns of each other.
// Those of a dependent launch may hold columns on the same SM: see allocate_tmem.
#include <algorithm>

#include "families.hpp"
#include "machine.hpp"
#include "races.hpp"
#include "tcgen05.hpp"

namespace ptxemu {

/// mode: the size of the CTA group; of mma the kind (mma.cpp); of commit whether it is multicast; of ld and
/// st the shape and the repetition.
bool decode_tcgen05(Instruction& in) {
  std::string const name = in.parts[1].substr(0, in.parts[1].find(':'));
  in.mode[0] = in.has("cta_group::2") ? 2 : 1;
  if (name == "alloc") {
    in.handler = &Machine::exec_tcgen05_alloc;
  } else if (name == "dealloc") {
    in.handler = &Machine::exec_tcgen05_dealloc;
  } else if (name == "relinquish_alloc_permit") {
    in.handler = &Machine::exec_tcgen05_relinquish;
  } else if (name == "cp") {
    in.handler = &Machine::exec_tcgen05_cp;
    return in.parts.size() == 5 && in.has("32x128b") && in.has("warpx4");
  } else if (name == "mma") {
    in.handler = &Machine::exec_tcgen05_mma;
    bool const is_fp4 = in.has("kind::mxf4") || in.has("kind::mxf4nvf4");
    bool const nvfp4 = in.has("kind::mxf4nvf4") && (in.has("block16") || in.has("scale_vec::4X"));
    bool const mxfp8 = in.has("kind::mxf8f6f4") && in.has("block_scale");
    bool const mxfp4 = is_fp4 && in.has("block_scale") && (in.has("block32") || in.has("scale_vec::2X"));
    in.mode[1] = mxfp8 ? 1 : mxfp4 ? 2 : 0;
    return (nvfp4 || mxfp8 || mxfp4) && !in.has("sp") && in.operands.size() == 7;
  } else if (name == "commit") {
    in.mode[1] = in.has("multicast::cluster");
    in.handler = &Machine::exec_tcgen05_commit;
  } else if (name == "ld" || name == "st") {
    static char const* const shapes[] =  // in the order of exec_tmem.cpp
        {"32x32b", "16x64b", "16x128b", "16x256b"};
    in.mode[1] = -1;
    for (int i = 0; i < 4; ++i) {
      in.mode[1] = in.has(shapes[i]) ? i : in.mode[1];
    }
    for (std::string const& part : in.parts) {
      if (part[0] == 'x') {
        in.mode[2] = std::atoi(part.c_str() + 1);
      }
    }
    in.handler = name == "ld" ? &Machine::exec_tcgen05_ld : &Machine::exec_tcgen05_st;
    return in.mode[1] >= 0 && in.mode[2] > 0 && !in.has("pack::16b") && !in.has("unpack::16b") &&
           !in.has("red");
  } else if (name == "wait") {
    in.mode[1] = in.has("wait::st");
    in.handler = &Machine::exec_tcgen05_wait;
  } else if (name == "fence") {
    in.mode[1] = in.has("fence::after_thread_sync");
    in.handler = &Machine::exec_tcgen05_fence;
  }
  return in.handler != nullptr;
}

/// The CTA, or with size 2 its pair, the even rank first.
std::vector<Cta*> Machine::cta_group(Cta* cta, int size) {
  if (size == 1) {
    return {cta};
  }
  if ((cta->rank | 1) >= cta->cluster->ctas.size()) {
    fatal("cta_group::2 in a cluster without a pair of CTAs");
  }
  return {cta->cluster->ctas[cta->rank & ~1u].get(), cta->cluster->ctas[cta->rank | 1].get()};
}

u32 Machine::allocated_columns(Cta const& cta) {
  u32 columns = 0;
  for (auto const& [first, count] : cta.tmem_allocations) {
    columns += count;
  }
  return columns;
}

/// The lowest free range of columns. TMEM is created, with NaN in all cells, at the first allocation.
u32 Machine::allocate_tmem(Cta* cta, u32 columns) {
  if (cta->tmem.empty()) {
    cta->tmem.assign(kTmemLanes * kTmemColumns, 0x7FC0BEEF);
    cta->tmem_written.assign(kTmemLanes * kTmemColumns, 0);
  }
  u32 base = 0;  // the first gap between allocations that is wide enough, or the end
  for (auto const& [first, count] : cta->tmem_allocations) {
    if (base + columns <= first) {
      break;
    }
    base = first + count;
  }
  if (base + columns > kTmemColumns) {
    fatal("tcgen05.alloc of %u columns would wait for ever", columns);
  }
  // Dependents start once this grid has executed launch_dependents. Those that have allocated columns keep
  // them until this grid ends, and this grid would wait for the columns (PTX ISA, "griddepcontrol",
  // "tcgen05.alloc").
  u32 const shared_bytes = launch_.dynamic_shared_bytes + kernel_.static_shared_bytes + kSharedBase +
                           session_.held_shared_bytes + kSharedBase;
  if (cta->launched_dependents && allocated_columns(*cta) + columns + session_.held_columns > kTmemColumns &&
      shared_bytes <= device_of(session_.options.compute_capability).sm_shared_bytes) {
    fatal(
        "tcgen05.alloc of %u columns after griddepcontrol.launch_dependents would wait for ever: a CTA of "
        "the "
        "dependent launch may hold %u on the same SM, and waits in griddepcontrol.wait",
        columns, session_.held_columns);
  }
  cta->tmem_allocations[base] = columns;
  return base;
}

/// Fatal unless the columns lie in one allocation.
void Machine::check_tmem(Cta* cta, u32 column, u32 columns) {
  auto next = cta->tmem_allocations.upper_bound(column);
  if (next != cta->tmem_allocations.begin()) {
    --next;
    if (column + columns <= next->first + next->second) {
      return;
    }
  }
  fatal("TMEM columns [%u, %u) of rank %u are not allocated", column, column + columns, cta->rank);
}

/// The order of an access to TMEM after those of other warps, at its issue (PTX ISA, "tcgen05 Memory
/// Consistency Model"): by release and acquire, or by a tcgen05.fence::before_thread_sync, any
/// synchronization and a tcgen05.fence::after_thread_sync. A load is recorded when tcgen05.wait::ld completes
/// it, all else here.
void Machine::check_tmem_order(Warp& warp, Cta* cta, Access const& access, char const* what) {
  if (races_ == nullptr) {
    return;
  }
  u32 const first = access.lane_low / kWarpSize, last = (access.lane_high + kWarpSize - 1) / kWarpSize;
  if (!races_->tmem_is_ordered(warp, *cta, access.low, access.high, first, last, access.write)) {
    hazard("%s TMEM columns [%u, %u), which no synchronization and tcgen05.fence order after another warp's",
           what, access.low, access.high);
  }
  if (std::strcmp(access.what, "tcgen05.ld") != 0) {
    races_->record_tmem(warp, *cta, access.low, access.high, first, last, access.write);
  }
}

/// tcgen05.fence::before_thread_sync and ::after_thread_sync
Outcome Machine::exec_tcgen05_fence(Warp& warp, Group&, Instruction const& in, u32 mask) {
  if (mask != 0 && races_ != nullptr) {
    if (in.mode[1] != 0) {
      races_->fence_tcgen05_after(warp);
    } else {
      races_->fence_tcgen05_before(warp);
    }
  }
  return Outcome::kNext;
}

/// tcgen05.alloc [destination], columns
Outcome Machine::exec_tcgen05_alloc(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  Cta* const cta = warp.cta;
  u32 const columns = static_cast<u32>(uniform(warp, in.operands[1], mask));
  if (columns < 32 || columns > kTmemColumns || (columns & (columns - 1)) != 0) {
    fatal("tcgen05.alloc of %u columns, must be a power of two from 32 to 512", columns);
  }
  if (cta->relinquished) {
    fatal("tcgen05.alloc after relinquish_alloc_permit");
  }
  u32 base = 0;
  if (in.mode[0] == 1) {
    base = allocate_tmem(cta, columns);
  } else {  // the CTAs of the pair wait for each other, and the second to arrive allocates for both
    cta_group(cta, 2);
    Cta* const peer = cta->cluster->ctas[cta->rank ^ 1].get();
    if (!warp.alloc_arrived) {
      warp.alloc_arrived = true;
      ++progress_;
      // Both CTAs count their arrivals; the one that arrives second finds the counts equal.
      cta->pair_arrivals++;
      cta->pair_columns = columns;
      if (peer->pair_arrivals >= cta->pair_arrivals) {
        cta->pair_base = allocate_tmem(cta, columns);
        peer->pair_base = allocate_tmem(peer, columns);
        if (peer->pair_columns != columns || cta->pair_base != peer->pair_base) {
          fatal("the CTAs of a pair allocate different TMEM columns");
        }
      }
    }
    if (peer->pair_arrivals < cta->pair_arrivals) {
      group.wait = Wait::kTmemAlloc;
      group.wait_generation = cta->pair_arrivals;
      return Outcome::kBlocked;
    }
    group.resumed = false;
    warp.alloc_arrived = false;
    base = cta->pair_base;
  }
  u32 offset;
  Cta* const to = shared_cta(cta, static_cast<u32>(uniform(warp, in.operands[0], mask)), false, &offset);
  std::memcpy(shared_bytes(to, offset, 4), &base, 4);
  std::memset(&to->written[offset], 1, 4);
  if (races_ != nullptr) {
    races_->access(warp, *to, offset, 4, true, false);
  }
  return Outcome::kNext;
}

/// tcgen05.dealloc address, columns
Outcome Machine::exec_tcgen05_dealloc(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  if (mask == 0) {
    return Outcome::kNext;
  }
  Cta* const cta = warp.cta;
  u32 const base = static_cast<u32>(uniform(warp, in.operands[0], mask));
  u32 const columns = static_cast<u32>(uniform(warp, in.operands[1], mask));
  auto const found = cta->tmem_allocations.find(base);
  if (found == cta->tmem_allocations.end() || found->second != columns) {
    fatal("tcgen05.dealloc of %u columns at %u, which is no allocation", columns, base);
  }
  Access const access = {base, base + columns, 0, kTmemLanes, true, 0, "", nullptr};
  check_conflicts(cta, true, access, "tcgen05.dealloc of", nullptr);
  check_tmem_order(warp, cta, access, "tcgen05.dealloc of");
  cta->tmem_allocations.erase(found);
  return Outcome::kNext;
}

Outcome Machine::exec_tcgen05_relinquish(Warp& warp, Group& group, Instruction const&, u32 mask) {
  if (!converged(warp, group, kFullMask)) {
    return Outcome::kBlocked;
  }
  warp.cta->relinquished = warp.cta->relinquished || mask != 0;
  return Outcome::kNext;
}

/// .32x128b.warpx4: copies 32 rows of 16 bytes to 4 columns of each of the four groups of 32 lanes.
void Machine::copy_to_tmem(Cta* cta, u32 column, u64 descriptor) {
  for (u32 row = 0; row < 32; ++row) {
    for (u32 q = 0; q < 4; ++q) {
      u32 const from = descriptor_address(descriptor, row, 4 * q);
      u32 word;
      std::memcpy(&word, shared_bytes(cta, from, 4), 4);
      if (std::memchr(&cta->written[from], 0, 4) != nullptr) {
        hazard("tcgen05.cp reads uninitialised shared memory at %u", from);
      }
      for (u32 lane = row; lane < kTmemLanes; lane += 32) {
        cta->tmem_word(lane, column + q) = word;
        cta->tmem_is_written(lane, column + q) = 1;
      }
    }
  }
}

/// tcgen05.cp [TMEM address], descriptor
Outcome Machine::exec_tcgen05_cp(Warp& warp, Group&, Instruction const& in, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 const to = static_cast<u32>(uniform(warp, in.operands[0], 1u << l));
    u64 const descriptor = uniform(warp, in.operands[1], 1u << l);
    u32 const column = to & 0xFFFF;
    if ((to >> 16 & 0x3FFF) != 0) {
      fatal("tcgen05.cp to lane %u is not modelled", to >> 16 & 0x3FFF);
    }
    session_.statistics.add("tcgen05.cp", format_text("32x128b.warpx4 cta_group::%d %s", in.mode[0],
                                                      describe_descriptor(descriptor).c_str()));
    std::vector<Cta*> const ctas = cta_group(warp.cta, in.mode[0]);
    auto operation = make_operation(warp.cta, "tcgen05.cp");
    for (Cta* cta : ctas) {
      auto const [low, high] = descriptor_bytes(descriptor, 32);
      operation->reads(cta, low, high);
      operation->writes_tmem(cta, column, column + 4);
      check_tmem(cta, column, 4);
    }
    operation->run = [this, ctas, column, descriptor] {
      for (Cta* cta : ctas) {
        copy_to_tmem(cta, column, descriptor);
      }
    };
    issue(operation, true);
  }
  return Outcome::kNext;
}

/// tcgen05.commit [mbarrier], CTA mask: arrives at the mbarrier when all earlier tcgen05 operations of this
/// CTA have executed. The commit goes through the same queue as these, so it cannot overtake them.
Outcome Machine::exec_tcgen05_commit(Warp& warp, Group&, Instruction const& in, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 const address = static_cast<u32>(uniform(warp, in.operands[0], 1u << l));
    u32 const offset = address & kOffsetMask;
    u32 const ranks = in.mode[1] != 0 ? static_cast<u32>(uniform(warp, in.operands[1], 1u << l)) & 0xFFFF
                                      : 1u << (address >> kRankShift);
    Cluster* const cluster = warp.cta->cluster;
    if (ranks >> cluster->ctas.size() != 0) {
      fatal("tcgen05.commit to ranks 0x%x of a cluster of %zu", ranks, cluster->ctas.size());
    }
    auto operation = make_operation(warp.cta, "tcgen05.commit");
    if (races_ != nullptr) {
      races_->start(warp, *operation, true);
      for (u32 rank = 0; rank < cluster->ctas.size(); ++rank) {
        if (ranks >> rank & 1) {
          check_signal(warp, cluster->ctas[rank].get(), offset);
        }
      }
    }
    operation->run = [this, cluster, ranks, offset, raw = operation.get()] {
      for (u32 rank = 0; rank < cluster->ctas.size(); ++rank) {
        if (ranks >> rank & 1) {
          Cta* const cta = cluster->ctas[rank].get();
          if (cta->done) {
            fatal("tcgen05.commit arrives at rank %u, which has exited", rank);
          }
          if (races_ != nullptr) {
            races_->finish(*raw, *cta, offset);
          }
          arrive(cta, offset, 1);
        }
      }
    };
    issue(operation, true);
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
