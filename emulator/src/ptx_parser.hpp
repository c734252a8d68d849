// The parser of one PTX entry. Device functions are inlined where they are called, so that a kernel is one
// list of instructions.
#pragma once

#include <unordered_map>

#include "ptx.hpp"
#include "ptx_cursor.hpp"

namespace ptxemu {

/// Parses an entry into a Kernel. PTX scopes nest in braces; names of registers and labels are looked up from
/// the innermost scope outwards.
class Parser : Cursor {
 public:
  Parser(PtxFile& file, size_t position, Kernel& kernel)
      : Cursor(file.path, file.text, position), file_(file), kernel_(kernel) {}
  void parse();

 private:
  struct Scope {
    int id;
    std::unordered_map<std::string, int> registers;
    // %r of %r<100> -> twice the index of %r0, plus 1 if each register of the range takes two (.b128)
    std::unordered_map<std::string, int> ranges;
  };
  struct Fix {  // a branch; its target is resolved when all labels are known
    int instruction;
    std::string label;
    std::vector<int> scopes;  // the scopes that enclose the branch
  };
  /// What a declaration such as `.align 8 .b8 name[16]` says.
  struct Variable {
    std::string name;
    u32 align = 1, bytes = 0;
    bool open = false;  // name[]: an array of unknown size
  };

  // Declarations.
  void header();
  Variable variable();
  void parameter();
  u32 allocate(u32& total, Variable const& v);
  int new_register(Type type);
  void declare_registers();
  int find_register(std::string const& name) const;
  int find_label(std::string const& label, std::vector<int> const& scopes) const;
  void directive(std::string const& word);

  // Operands.
  Operand constant(u64 value);
  Operand number();
  Operand address();
  Operand symbol(std::string const& name);
  Operand operand();

  // Statements.
  void body();
  void statement();
  bool label(std::string const& word);
  void operands(Instruction& instruction);
  void call(Instruction& instruction);
  std::vector<std::string> names_in_parentheses();
  size_t find_function(std::string const& name) const;
  std::vector<int> scope_ids() const;

  PtxFile& file_;
  Kernel& kernel_;
  std::vector<Scope> scopes_;
  int next_scope_ = 0;
  int inlined_ = 0;           // nesting depth of inlined calls
  std::vector<int> returns_;  // ret instructions of the function that is being inlined, which become branches
  u32 dynamic_align_ = 16;    // of the dynamic shared memory
  std::vector<Fix> fixes_;
  std::unordered_map<std::string, int> labels_;                       // "scope:name" -> instruction
  std::unordered_map<std::string, std::vector<std::string>> tables_;  // .branchtargets
  std::unordered_map<std::string, ModuleSymbol> variables_;  // of the kernel and of inlined functions
  std::unordered_map<u64, int> constant_rows_;               // value -> row of Kernel::constants
};

}  // namespace ptxemu
