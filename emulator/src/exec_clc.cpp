// Cluster launch control: a running cluster cancels the launch of another cluster and takes over its work
// (PTX ISA, "clusterlaunchcontrol.try_cancel", "clusterlaunchcontrol.query_cancel").
#include "families.hpp"
#include "machine.hpp"
#include "races.hpp"

namespace ptxemu {

namespace {

// The emulator's encoding of a response: three words with the coordinates of the canceled cluster's first
// CTA, and this word, whose lowest bit says whether a cluster was canceled.
constexpr u32 kResponse = 0xC1C00000;

}  // namespace

/// mode of try_cancel: whether the response goes to all CTAs of the cluster.
bool decode_clc(Instruction& in) {
  if (in.has("try_cancel")) {
    in.mode[0] = in.has("multicast::cluster::all");
    in.handler = &Machine::exec_clc_try_cancel;
  } else if (in.has("is_canceled")) {
    in.handler = &Machine::exec_clc_is_canceled;
  } else if (in.opcode.find("get_first_ctaid") != std::string::npos) {
    in.handler = &Machine::exec_clc_first_ctaid;
  }
  return in.handler != nullptr;
}

/// Cancels the next cluster, if there is one, and writes the response to the issuing CTA or to all CTAs of
/// the cluster.
void Machine::answer_try_cancel(Cta* cta, u32 response, u32 barrier, bool multicast) {
  u32 words[4] = {0, 0, 0, kResponse};
  // A request may fail although clusters wait, for a kernel of higher priority (CUDA Programming Guide,
  // "Cluster Launch Control"). These clusters are launched later.
  int const mode = session_.options.mode;
  bool const preempted = (mode == PTXEMU_RANDOM || mode == PTXEMU_PCT) && random_() % 16 == 0;
  if (!waiting_clusters_.empty() && !preempted) {
    first_cta_of(waiting_clusters_.front(), words);
    waiting_clusters_.pop_front();
    words[3] |= 1;
    ++stolen_;
  }
  for (auto& to : cta->cluster->ctas) {
    if (multicast || to.get() == cta) {
      if (to->done) {
        fatal("the response to a try_cancel goes to rank %u, which has exited", to->rank);
      }
      std::memcpy(shared_bytes(to.get(), response, sizeof words), words, sizeof words);
      std::memset(&to->written[response], 1, sizeof words);
      complete_bytes(to.get(), barrier, sizeof words);
    }
  }
}

/// clusterlaunchcontrol.try_cancel [response], [mbarrier]
Outcome Machine::exec_clc_try_cancel(Warp& warp, Group&, Instruction const& in, u32 mask) {
  Cta* const cta = warp.cta;
  if (mask != 0 && warp.cancel_failed) {
    fatal("try_cancel by a warp that has seen an earlier one fail, which is undefined behavior");
  }
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u32 response, barrier;
      shared_cta(cta, static_cast<u32>(uniform(warp, in.operands[0], 1u << l)), false, &response);
      shared_cta(cta, static_cast<u32>(uniform(warp, in.operands[1], 1u << l)), false, &barrier);
      bool const multicast = in.mode[0] != 0;
      auto operation = make_operation(cta, "try_cancel");
      operation->fenced_reads = true;
      for (auto& to : cta->cluster->ctas) {
        if (multicast || to.get() == cta) {
          operation->writes(to.get(), response, response + 16);
          check_signal(warp, to.get(), barrier);
        }
      }
      if (races_ != nullptr) {
        races_->start(warp, *operation);
      }
      operation->run = [this, cta, response, barrier, multicast, raw = operation.get()] {
        if (races_ != nullptr) {
          for (auto& to : cta->cluster->ctas) {
            races_->finish(*raw, *to, barrier);
          }
        }
        answer_try_cancel(cta, response, barrier, multicast);
      };
      issue(operation, false);
    }
  }
  return Outcome::kNext;
}

/// clusterlaunchcontrol.query_cancel.is_canceled predicate, response
Outcome Machine::exec_clc_is_canceled(Warp& warp, Group&, Instruction const& in, u32 mask) {
  u64 const* const high = warp.row(in.operands[1].reg + 1);
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u32 const word = static_cast<u32>(high[l] >> 32);
      if ((word & ~1u) != kResponse) {
        fatal("query_cancel of a value that is not the response to a try_cancel");
      }
      warp.cancel_failed = warp.cancel_failed || (word & 1) == 0;
      write(warp, in.operands[0], l, word & 1);
    }
  }
  return Outcome::kNext;
}

/// clusterlaunchcontrol.query_cancel.get_first_ctaid {x, y, z, _}, response; ::x, ::y and ::z have a scalar
/// result.
Outcome Machine::exec_clc_first_ctaid(Warp& warp, Group&, Instruction const& in, u32 mask) {
  for (int l = 0; l < kWarpSize; ++l) {
    if (mask >> l & 1) {
      u64 const low = warp.row(in.operands[1].reg)[l], high = warp.row(in.operands[1].reg + 1)[l];
      u64 const words[4] = {low & 0xFFFFFFFF, low >> 32, high & 0xFFFFFFFF, 0};
      Operand const& to = in.operands[0];
      for (size_t i = 0; i < to.parts.size(); ++i) {
        write(warp, to.parts[i], l, words[i]);
      }
      if (to.kind == Operand::kRegister) {
        size_t const colon = in.opcode.find("get_first_ctaid::");
        write(warp, to, l, colon == std::string::npos ? words[0] : words[in.opcode[colon + 17] - 'x']);
      }
    }
  }
  return Outcome::kNext;
}

}  // namespace ptxemu
