// Parsed PTX: operands, instructions, kernels, and the library of files in which kernels are found by name.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "types.hpp"

namespace ptxemu {

class Machine;
struct Warp;
struct Group;
struct Instruction;

enum class Space : u8 { kGeneric, kParam, kShared, kSharedCluster, kGlobal, kLocal, kConst };

struct Operand {
  enum Kind : u8 { kNone, kRegister, kConstant, kSpecial, kSymbol, kAddress, kVector, kLabel, kSink };
  Kind kind = kNone;
  bool negated = false;  // !%p
  Type type = Type::kNone;
  int reg = -1;       // kRegister; kAddress: its base, -1 where the base is a symbol or a number
  int reg2 = -1;      // the second of a pair %r|%p
  int constant = -1;  // kConstant: row of Kernel::constants
  int special = 0;    // kSpecial: see special.cpp
  u64 value = 0;      // kConstant: the number; kSymbol, kAddress: byte offset (kGlobal symbols: the address)
  Space symbol_space = Space::kGeneric;  // kSymbol, kAddress with a symbol for its base: where it lies
  std::vector<Operand> parts;            // kVector: elements; kAddress: the vector of coordinates
  std::string label;
};

enum class Outcome : u8 { kNext, kJumped, kBlocked, kYield };

/// Register-to-register operation on the lanes in `mask`; each pointer is a row of 32 lanes.
using LaneFunction = void (*)(Instruction const&, u64* destination, u64 const* const* sources, u32 mask);
using Handler = Outcome (Machine::*)(Warp&, Group&, Instruction const&, u32 mask);

enum class Rounding : u8 { kNearest, kZero, kDown, kUp };

struct Instruction {
  LaneFunction lanes = nullptr;  // if null, `handler` runs it
  Handler handler = nullptr;
  int predicate = -1;
  bool predicate_negated = false;
  Rounding rounding = Rounding::kNearest;
  bool flush = false;     // .ftz
  bool saturate = false;  // .sat
  Type type = Type::kNone;
  Space space = Space::kGeneric;
  int mode[3] = {0, 0, 0};   // what the opcode's decoder says, see decode_*.cpp
  int target = -1;           // bra: index of the instruction
  std::vector<int> targets;  // brx.idx
  std::vector<Operand> operands;
  int line = 0;  // in the PTX file
  std::string opcode;
  std::vector<std::string> parts;  // of the opcode, between the dots
  std::string text;

  bool has(char const* part) const {
    for (std::string const& p : parts) {
      if (p == part) {
        return true;
      }
    }
    return false;
  }
};

struct Parameter {
  std::string name;
  u32 offset, bytes;
};

struct Kernel {
  std::string name;
  std::string file;
  std::vector<Instruction> code;
  std::vector<Type> registers;
  std::vector<u64> constants;  // rows of 32 equal values
  std::vector<Parameter> parameters;
  u32 param_bytes = 0;
  u32 max_threads = 0;  // .maxntid, 0: none
  u32 required_cluster[3] = {0, 0, 0};
  u32 static_shared_bytes = 0;
  u32 local_bytes = 0;
};

/// Decides what executes an instruction; unknown ones get a handler that is fatal when it is reached.
void decode(Instruction& instruction);

int special_register(std::string const& name);  // -1: unknown

/// What module-scope variables are called and where they live.
struct ModuleSymbol {
  Space space;
  u64 address;
};

struct PtxFile {
  std::string path;
  std::string text;
  std::map<std::string, ModuleSymbol> symbols;
  u32 static_shared_bytes = 0;
  std::vector<void*> allocations;  // of .global and .const variables
  bool scanned = false;            // module scope
};

/// Parses the entry that starts at `position` of the file's text.
std::shared_ptr<Kernel> parse_kernel(PtxFile& file, size_t position, std::string const& name);
/// Finds the variables declared outside of functions.
void scan_module(PtxFile& file);

/// Kernels by name over all loaded files; each is parsed at its first launch.
class PtxLibrary {
 public:
  /// Loads a .ptx file, or every *.ptx in a folder. Files of targets other than sm_100* are passed over.
  void load(std::string const& path);
  std::shared_ptr<Kernel> find(std::string const& name);  // null: no such entry
  bool has_entry(std::string const& name) const { return entries_.count(name) != 0; }
  bool empty() const { return entries_.empty(); }
  void clear();

 private:
  struct Entry {
    PtxFile* file;
    size_t position;
    std::shared_ptr<Kernel> kernel;
  };
  void load_file(std::string const& path);
  std::vector<std::unique_ptr<PtxFile>> files_;
  std::map<std::string, Entry> entries_;
};

}  // namespace ptxemu
