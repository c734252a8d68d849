// Parsed PTX: operands, instructions and kernels, and the library of files in which kernels are found by
// name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device.hpp"
#include "types.hpp"

namespace ptxemu {

class Machine;
struct Warp;
struct Group;
struct Instruction;

/// State spaces (PTX ISA, "State Spaces"). kShared is .shared::cta, kSharedCluster is .shared::cluster.
enum class Space : u8 { kGeneric, kParam, kShared, kSharedCluster, kGlobal, kLocal, kConst };

/// An operand of an instruction. Operand::kind says which of the other members mean something.
struct Operand {
  enum Kind : u8 {
    kNone,
    kRegister,
    kConstant,
    kSpecial,  // a special register such as %tid.x
    kSymbol,   // the address of a variable or parameter
    kAddress,  // [base + offset], of TMA instructions also [map, {coordinates}]
    kVector,   // {a, b}
    kLabel,
    kSink,  // _, a result that is discarded
  };
  Kind kind = kNone;
  bool negated = false;  // !%p
  Type type = Type::kNone;
  int reg = -1;       // kRegister; kAddress: the base register, -1 if the base is a symbol or a number
  int reg2 = -1;      // the second register of a pair %r|%p, -1 if there is none
  int constant = -1;  // kConstant: row of Kernel::constants
  int special = 0;    // kSpecial: number of the special register, see operands.cpp
  u64 value = 0;      // kConstant: the number; kSymbol, kAddress: byte offset (kGlobal symbols: the address)
  Space symbol_space = Space::kGeneric;  // kSymbol, and kAddress with a symbol as base: the symbol's space
  std::vector<Operand> parts;            // kVector: elements; kAddress: the vector of coordinates
  std::string label;                     // kLabel
};

/// What the scheduler does after an instruction.
enum class Outcome : u8 {
  kNext,     // go on with the next instruction
  kJumped,   // the handler has set the program counters
  kBlocked,  // the group waits and executes the same instruction again
  kYield,    // go on with the next instruction, but let another warp run first
};

/// A register-to-register operation on the lanes in `mask`. Each pointer is a row of 32 lanes of 64 bits.
using LaneFunction = void (*)(Instruction const&, u64* destination, u64 const* const* sources, u32 mask);
/// Any other instruction, as a member function of Machine. `mask` holds the lanes whose predicate is true.
using Handler = Outcome (Machine::*)(Warp&, Group&, Instruction const&, u32 mask);

enum class Rounding : u8 { kNearest, kZero, kDown, kUp };

struct Instruction {
  LaneFunction lanes = nullptr;  // if null, `handler` executes the instruction
  Handler handler = nullptr;
  int predicate = -1;  // register of the guard predicate, -1 if there is none
  bool predicate_negated = false;
  Rounding rounding = Rounding::kNearest;
  bool flush = false;     // .ftz
  bool saturate = false;  // .sat, .satfinite
  Type type = Type::kNone;
  Space space = Space::kGeneric;
  int mode[3] = {0, 0, 0};   // modifiers; their meaning is private to the decoder and handler of the family
  int target = -1;           // bra: index of the instruction
  std::vector<int> targets;  // brx.idx
  std::vector<Operand> operands;
  int line = 0;  // in the PTX file, from 1
  std::string opcode;
  std::vector<std::string> parts;  // the opcode's parts between the dots
  std::string text;

  /// Whether the opcode has the part, e.g. "sync".
  bool has(char const* part) const {
    for (std::string const& p : parts) {
      if (p == part) {
        return true;
      }
    }
    return false;
  }
};

/// A parameter of a kernel, in the kernel's parameter block.
struct Parameter {
  std::string name;
  u32 offset, bytes;
};

struct Kernel {
  std::string name;
  std::string file;
  Target target;  // of the file
  std::vector<Instruction> code;
  std::vector<Type> registers;  // a .b128 register is two: its low half has this type, its high half kB64
  std::vector<u64> constants;   // rows of 32 equal values, one row for each constant of the code
  std::vector<Parameter> parameters;
  u32 param_bytes = 0;
  u32 max_threads = 0;                  // .maxntid or .reqntid, 0 if the kernel has neither
  u32 required_cluster[3] = {0, 0, 0};  // .reqnctapercluster, 0 if the kernel has none
  u32 static_shared_bytes = 0;
  u32 local_bytes = 0;  // of a thread
};

/// Sets what executes an instruction. An instruction that is not modelled gets a handler that is fatal when
/// it is reached, so that kernels may hold such instructions on paths that are not taken; so does one that
/// devices of the target do not have.
void decode(Instruction& instruction, Target const& target);

/// The number of a special register; -1 if it is not known.
int special_register(std::string const& name);

/// A variable, with its address in its space.
struct ModuleSymbol {
  Space space;
  u64 address;
};

struct PtxFile {
  std::string path;
  std::string text;
  Target target;
  std::map<std::string, ModuleSymbol> symbols;  // variables of module scope, filled by scan_module()
  std::vector<void*> allocations;               // device memory of .global and .const variables
  bool scanned = false;                         // scan_module() has run
};

/// Parses the entry that starts at `position` of the file's text.
std::shared_ptr<Kernel> parse_kernel(PtxFile& file, size_t position, std::string const& name);
/// Finds the variables that are declared outside of functions, and allocates those in device memory.
void scan_module(PtxFile& file);

/// Kernels by name over all loaded files; each is parsed when it is launched first.
class PtxLibrary {
 public:
  /// Loads a .ptx file, or every *.ptx file of a folder. Files of targets other than sm_10* and sm_12* are
  /// skipped.
  void load(std::string const& path);
  /// The kernel of this name whose target runs on the compute capability; null if no file has one. The
  /// latest target is preferred, and the first file of those that have it.
  std::shared_ptr<Kernel> find(std::string const& name, int compute_capability);
  bool empty() const { return entries_.empty(); }
  void clear();

 private:
  struct Entry {
    PtxFile* file;
    size_t position;                 // of the entry's name in the file
    std::shared_ptr<Kernel> kernel;  // null until it is parsed
  };
  void load_file(std::string const& path);
  std::vector<std::unique_ptr<PtxFile>> files_;
  std::map<std::string, std::vector<Entry>> entries_;  // by name: one for each target
};

}  // namespace ptxemu
