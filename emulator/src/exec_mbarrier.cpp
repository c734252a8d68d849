// mbarriers (PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier").
//
// An mbarrier lies in 8 bytes of shared memory in the encoding of pack(). Every change goes through
// set_mbarrier(), which completes the phase as soon as no arrivals and no bytes are pending. A phase cannot
// complete twice without a change, so a waiter that knows the parity of its phase never misses it.
#include "families.hpp"
#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

namespace {

// Bits: pending arrivals : 20 | expected arrivals : 20 | byte count + kBias : 22 | phase : 1 | valid : 1
constexpr i32 kBias = 1 << 21;
constexpr u64 kCountMask = 0xFFFFF;

u64 pack(Mbarrier const& b) {
  return static_cast<u64>(b.pending) | static_cast<u64>(b.expected) << 20 |
         static_cast<u64>(static_cast<u32>(b.tx_count + kBias)) << 40 | static_cast<u64>(b.phase) << 62 |
         1ull << 63;
}

Mbarrier unpack(u64 word) {
  return {static_cast<u32>(word & kCountMask), static_cast<u32>(word >> 20 & kCountMask),
          static_cast<i32>(word >> 40 & 0x3FFFFF) - kBias, static_cast<u32>(word >> 62 & 1)};
}

enum WaitMode { kTest, kTry };

}  // namespace

/// mode: of arrive, whether it has .expect_tx; of a wait, the WaitMode and whether it has .parity; of both,
/// the Order, which is release or acquire by default.
bool decode_mbarrier(Instruction& in) {
  in.mode[2] = static_cast<int>(in.has("relaxed") ? Order::kRelaxed : Order::kFull);
  in.space = in.has("shared::cluster") ? Space::kSharedCluster : Space::kShared;
  if (in.has("noComplete") || in.has("arrive_drop") || in.has("complete_tx")) {
    return false;
  } else if (in.has("init")) {
    in.handler = &Machine::exec_mbarrier_init;
  } else if (in.has("inval")) {
    in.handler = &Machine::exec_mbarrier_inval;
  } else if (in.has("arrive")) {
    in.mode[0] = in.has("expect_tx");
    in.handler = &Machine::exec_mbarrier_arrive;
  } else if (in.has("expect_tx")) {
    in.handler = &Machine::exec_mbarrier_expect_tx;
  } else if (in.has("try_wait") || in.has("test_wait")) {
    in.mode[0] = in.has("try_wait") ? kTry : kTest;
    in.mode[1] = in.has("parity");
    in.handler = &Machine::exec_mbarrier_wait;
  }
  return in.handler != nullptr;
}

/// The mbarrier at an offset; fatal if none was initialised there.
Mbarrier Machine::mbarrier(Cta* cta, u32 offset) {
  if (offset % 8 != 0) {
    fatal("mbarrier at %u, must be a multiple of 8", offset);
  }
  if (cta->mbarriers.count(offset) == 0) {
    fatal("no mbarrier was initialised at %u of rank %u", offset, cta->rank);
  }
  u64 word;
  std::memcpy(&word, shared_bytes(cta, offset, 8), 8);
  return unpack(word);
}

/// Stores an mbarrier, and completes its phase if nothing is pending.
void Machine::set_mbarrier(Cta* cta, u32 offset, Mbarrier barrier) {
  ++progress_;  // an event, for the detection of deadlocks
  if (barrier.pending == 0 && barrier.tx_count == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.expected;
    if (races_ != nullptr) {
      races_->complete_phase(*cta, offset);
    }
  }
  if (barrier.tx_count >= kBias - 1 || barrier.tx_count <= 1 - kBias) {
    fatal("mbarrier at %u: %d bytes are more than it can count", offset, barrier.tx_count);
  }
  u64 const word = pack(barrier);
  std::memcpy(&cta->shared[offset], &word, 8);
  std::memset(&cta->written[offset], 1, 8);
}

/// Arrives `count` times, after the phase has been made to expect more bytes.
void Machine::arrive(Cta* cta, u32 offset, u32 count, i32 expect_bytes) {
  Mbarrier barrier = mbarrier(cta, offset);
  if (count > barrier.pending) {
    fatal("mbarrier at %u of rank %u: %u arrivals, but only %u are pending", offset, cta->rank, count,
          barrier.pending);
  }
  barrier.tx_count += expect_bytes;
  barrier.pending -= count;
  set_mbarrier(cta, offset, barrier);
}

/// An operation of another warp than the one that initialised the mbarrier must be ordered after the init by
/// some synchronization. With a relaxed barrier the PTX ISA demands a fence.mbarrier_init, too ("membar,
/// fence"), which is not checked here: CUTLASS initialises the mbarrier of its TMEM deallocation behind the
/// last such fence.
void Machine::check_init(Warp& warp, Cta* cta, u32 offset) {
  if (races_ != nullptr && !races_->init_is_ordered(warp, *cta, offset, false)) {
    hazard("mbarrier at %u of rank %u is used by a warp that no synchronization orders after its init",
           offset, cta->rank);
  }
}

/// An asynchronous operation signals the mbarrier through the async proxy, for which its init must have been
/// fenced: by fence.mbarrier_init, as in CUTLASS, or by fence.proxy.async (CUDA Programming Guide, "Using
/// TMA").
void Machine::check_signal(Warp& warp, Cta* cta, u32 offset) {
  if (races_ != nullptr && !races_->init_is_ordered(warp, *cta, offset, true)) {
    hazard("mbarrier at %u of rank %u is signalled by an asynchronous operation, and its init was not fenced",
           offset, cta->rank);
  }
}

/// complete_tx: an asynchronous operation has written the bytes.
void Machine::complete_bytes(Cta* cta, u32 offset, u32 bytes) {
  Mbarrier barrier = mbarrier(cta, offset);
  barrier.tx_count -= static_cast<i32>(bytes);
  set_mbarrier(cta, offset, barrier);
}

Outcome Machine::exec_mbarrier_init(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row address, count;
  read(warp, in.operands[0], address);
  read(warp, in.operands[1], count);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u32 offset;
      Cta* const cta = shared_cta(warp.cta, static_cast<u32>(address[l]), false, &offset);
      u32 const n = static_cast<u32>(count[l]);
      if (n == 0 || n > kCountMask || offset % 8 != 0) {
        fatal("mbarrier.init at %u with a count of %u", offset, n);
      }
      shared_bytes(cta, offset, 8);
      cta->mbarriers.insert(offset);
      set_mbarrier(cta, offset, {n, n, 0, 0});
      if (races_ != nullptr) {
        races_->init_mbarrier(warp, *cta, offset);
      }
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_mbarrier_inval(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row address;
  read(warp, in.operands[0], address);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u32 offset;
      Cta* const cta = shared_cta(warp.cta, static_cast<u32>(address[l]), false, &offset);
      mbarrier(cta, offset);
      cta->mbarriers.erase(offset);
    }
  }
  return Outcome::kNext;
}

/// mbarrier.arrive state, [address], count; .expect_tx has a number of bytes in place of the count. An
/// arrival at another CTA has no state.
Outcome Machine::exec_mbarrier_arrive(Warp& warp, Group&, Instruction const& in, u32 mask) {
  size_t const first = in.operands[0].kind == Operand::kAddress ? 0 : 1;
  Row address, number;
  read(warp, in.operands[first], address);
  bool const has_number = in.operands.size() > first + 1;
  if (has_number) {
    read(warp, in.operands[first + 1], number);
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u32 offset;
      Cta* const cta =
          shared_cta(warp.cta, static_cast<u32>(address[l]), in.space == Space::kSharedCluster, &offset);
      u32 const value = has_number ? static_cast<u32>(number[l]) : 1;
      bool const expect = in.mode[0] != 0;
      if (first == 1) {  // the state before the arrival, whose phase a later test_wait names
        write(warp, in.operands[0], l, pack(mbarrier(cta, offset)));
      }
      if (races_ != nullptr) {
        check_init(warp, cta, offset);
        races_->arrive_mbarrier(warp, *cta, offset, static_cast<Order>(in.mode[2]));
      }
      arrive(cta, offset, expect ? 1 : value, expect ? static_cast<i32>(value) : 0);
    }
  }
  return Outcome::kNext;
}

Outcome Machine::exec_mbarrier_expect_tx(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Row address, bytes;
  read(warp, in.operands[0], address);
  read(warp, in.operands[1], bytes);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u32 offset;
      Cta* const cta =
          shared_cta(warp.cta, static_cast<u32>(address[l]), in.space == Space::kSharedCluster, &offset);
      Mbarrier barrier = mbarrier(cta, offset);
      check_init(warp, cta, offset);
      barrier.tx_count += static_cast<i32>(bytes[l]);
      set_mbarrier(cta, offset, barrier);
    }
  }
  return Outcome::kNext;
}

/// test_wait and try_wait. try_wait blocks the warp, but its time limit may pass: at random on a first
/// attempt, and always if nothing else can run. The latter is needed: CUTLASS asks with try_wait whether a
/// stage is ready before it issues the loads that fill that stage.
Outcome Machine::exec_mbarrier_wait(Warp& warp, Group& group, Instruction const& in, u32 mask) {
  group.resumed = false;
  Row address, state;
  read(warp, in.operands[1], address);
  read(warp, in.operands[2], state);
  u32 ready = 0;
  bool any_waits = false;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 offset;
    Cta* const cta = shared_cta(warp.cta, static_cast<u32>(address[l]), false, &offset);
    u32 const parity = in.mode[1] != 0 ? static_cast<u32>(state[l]) & 1 : unpack(state[l]).phase;
    // A phase is complete when the current phase has the other parity.
    bool const complete = mbarrier(cta, offset).phase != parity;
    check_init(warp, cta, offset);
    if (complete) {
      ready |= 1u << l;
      if (races_ != nullptr) {
        races_->observe_mbarrier(warp, *cta, offset, static_cast<Order>(in.mode[2]));
      }
    } else if (!any_waits) {
      any_waits = true;
      group.wait_cta = cta;
      group.wait_address = offset;
      group.wait_parity = parity;
    }
  }
  if (in.mode[0] == kTry && mask != 0 && ready == 0) {
    // The first attempt at an instruction mostly returns false at once; the second one blocks.
    bool const gives_up = group.failed_pc != group.pc && random_() % 8 != 0;
    group.failed_pc = group.pc;
    if (!group.timed_out && !gives_up) {
      group.wait = Wait::kMbarrier;
      return Outcome::kBlocked;
    }
  } else {
    group.failed_pc = -1;
  }
  group.timed_out = false;
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      write(warp, in.operands[0], l, ready >> l & 1);
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
