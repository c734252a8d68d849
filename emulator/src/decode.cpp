// The table of decoders, by the first part of the opcode.
#include "families.hpp"
#include "machine.hpp"

namespace ptxemu {

namespace {

using Decoder = bool (*)(Instruction&);

std::map<std::string, Decoder> const& decoders() {
  static std::map<std::string, Decoder> const table = [] {
    std::map<std::string, Decoder> t;
    auto const add = [&t](Decoder decoder, std::initializer_list<char const*> names) {
      for (char const* name : names) {
        t[name] = decoder;
      }
    };
    add(decode_arithmetic, {"add", "sub",      "mul", "mad",  "fma",   "div", "rem", "min",  "max", "neg",
                            "abs", "copysign", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "tanh", "sin", "cos"});
    add(decode_logic, {"and", "or", "xor", "not", "cnot", "shl", "shr", "shf", "bfe", "bfi", "lop3", "prmt",
                       "popc", "clz", "brev", "bfind", "selp"});
    add(decode_cvt, {"cvt"});
    add(decode_memory, {"ld", "ldu", "st", "atom", "red", "mov", "cvta", "prefetch", "prefetchu", "discard",
                        "applypriority", "createpolicy", "mapa"});
    add(decode_matrix, {"ldmatrix", "stmatrix"});
    add(decode_mma_sync, {"mma"});
    add(decode_control, {"bra", "brx", "ret", "exit", "trap", "setp", "nanosleep", "setmaxnreg",
                         "griddepcontrol", "pmevent"});
    add(decode_warp, {"shfl", "vote", "match", "redux", "elect", "activemask"});
    add(decode_barrier, {"bar", "barrier", "fence", "membar"});
    add(decode_mbarrier, {"mbarrier"});
    add(decode_bulk, {"cp"});
    add(decode_tensormap, {"tensormap"});
    add(decode_clc, {"clusterlaunchcontrol"});
    add(decode_tcgen05, {"tcgen05"});
    return t;
  }();
  return table;
}

}  // namespace

void decode(Instruction& in, Target const& target) {
  auto const found = decoders().find(in.parts[0]);
  bool const modelled = found != decoders().end() && found->second(in);
  if (!modelled || !target.has(in)) {
    in.lanes = nullptr;
    in.handler = modelled ? &Machine::exec_absent : &Machine::exec_unmodelled;
  }
}

}  // namespace ptxemu
