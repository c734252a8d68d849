// Asynchronous copies from global to shared memory that need no tensor map (PTX ISA, "Data Movement and
// Conversion Instructions: Non-tensor copy"): cp.async.bulk, which completes on an mbarrier, and cp.async of
// 4, 8 or 16 bytes, for which the thread that issued it waits.
//
// A copy reads its source and writes its destination at one moment, when its asynchronous operation executes.
#include "families.hpp"
#include "machine.hpp"
#include "memory.hpp"
#include "races.hpp"

namespace ptxemu {

/// cp.async.bulk from global to shared memory of the CTA.
bool decode_bulk_copy(Instruction& in) {
  in.handler = &Machine::exec_bulk_copy;
  return in.parts.size() == 6 && (in.parts[3] == "shared::cluster" || in.parts[3] == "shared::cta") &&
         in.parts[4] == "global" && in.parts[5] == "mbarrier::complete_tx::bytes" && in.operands.size() == 4;
}

/// cp.async, cp.async.wait_all.
bool decode_async_copy(Instruction& in) {
  if (in.has("wait_all")) {
    in.handler = &Machine::exec_async_copy_wait;
    return true;
  }
  in.handler = &Machine::exec_async_copy;
  return in.parts.size() == 5 && (in.parts[2] == "ca" || in.parts[2] == "cg") &&
         (in.parts[3] == "shared" || in.parts[3] == "shared::cta") && in.parts[4] == "global" &&
         in.operands.size() == 3;
}

/// cp.async.bulk [destination], [source], bytes, [mbarrier]
Outcome Machine::exec_bulk_copy(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Cta* const self = warp.cta;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 const lane = 1u << l;
    u32 offset, barrier;
    Cta* const to = shared_cta(self, static_cast<u32>(uniform(warp, in.operands[0], lane)), true, &offset);
    u64 const from = uniform(warp, in.operands[1], lane);
    u32 const bytes = static_cast<u32>(uniform(warp, in.operands[2], lane));
    Cta* const signalled =
        shared_cta(self, static_cast<u32>(uniform(warp, in.operands[3], lane)), true, &barrier);
    if (offset % 16 != 0 || from % 16 != 0 || bytes % 16 != 0) {
      fatal("cp.async.bulk of %u bytes from 0x%llx to %u, all must be multiples of 16", bytes,
            static_cast<unsigned long long>(from), offset);
    }
    if (to != signalled) {
      fatal("cp.async.bulk: the mbarrier of another CTA than the destination's");
    }
    shared_bytes(to, offset, bytes);  // checks the range
    mbarrier(to, barrier);
    check_signal(warp, to, barrier);
    auto operation = make_operation(self, "bulk copy");
    operation->writes(to, offset, offset + bytes);
    if (races_ != nullptr) {
      races_->start(warp, *operation);
    }
    operation->run = [this, to, from, offset, bytes, barrier, raw = operation.get()] {
      DeviceMemory& memory = DeviceMemory::instance();
      memory.check(from, bytes, "cp.async.bulk");
      if (session_.options.report_unwritten_global != 0 && memory.first_unwritten(from, bytes) < bytes) {
        hazard("cp.async.bulk of global memory that was never written, at 0x%llx + %zu",
               static_cast<unsigned long long>(from), memory.first_unwritten(from, bytes));
      }
      std::memcpy(shared_bytes(to, offset, bytes), reinterpret_cast<void const*>(from), bytes);
      std::memset(&to->written[offset], 1, bytes);
      if (races_ != nullptr) {
        races_->finish(*raw, *to, barrier);
      }
      complete_bytes(to, barrier, bytes);
    };
    issue(operation, false);
  }
  return Outcome::kNext;
}

/// cp.async [destination], [source], bytes. The copy counts as a write of the warp that issued it, at the
/// time when it executes.
Outcome Machine::exec_async_copy(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Cta* const self = warp.cta;
  for (int l = 0; l < kWarpSize; ++l) {
    if (!(mask >> l & 1)) {
      continue;
    }
    u32 const lane = 1u << l;
    u32 offset;
    shared_cta(self, static_cast<u32>(uniform(warp, in.operands[0], lane)), false, &offset);
    u64 const from = uniform(warp, in.operands[1], lane);
    u32 const bytes = static_cast<u32>(in.operands[2].value);
    if ((bytes != 4 && bytes != 8 && bytes != 16) || offset % bytes != 0 || from % bytes != 0) {
      fatal("cp.async of %u bytes from 0x%llx to %u, must be 4, 8 or 16 bytes that are aligned to their size",
            bytes, static_cast<unsigned long long>(from), offset);
    }
    shared_bytes(self, offset, bytes);  // checks the range
    auto operation = make_operation(self, "cp.async");
    operation->generic_proxy = true;
    operation->writes(self, offset, offset + bytes);
    auto const finished = std::make_shared<bool>(false);
    warp.copies[l].push_back(finished);
    operation->run = [this, self, from, offset, bytes, finished, l, issuer = &warp] {
      u8 copied[16];
      memory_read(*issuer, Space::kGlobal, from, bytes, l, copied);
      shared_write(*issuer, self, offset, bytes, copied);
      *finished = true;
    };
    issue(operation, false);
  }
  return Outcome::kNext;
}

/// cp.async.wait_all: waits until the copies of these lanes have executed.
Outcome Machine::exec_async_copy_wait(Warp& warp, Group& group, Instruction const&, u32 mask) {
  if (!group.resumed && mask != 0) {
    Group probe = group;
    probe.mask = mask;
    probe.wait = Wait::kCopies;
    if (!is_over(warp, probe)) {
      group.wait = Wait::kCopies;
      return Outcome::kBlocked;
    }
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      warp.copies.erase(l);
    }
  }
  group.resumed = false;
  return Outcome::kNext;
}

}  // namespace ptxemu
