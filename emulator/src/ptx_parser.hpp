// The parser of one PTX entry. Device functions are inlined where they are called, so a kernel is one list.
#pragma once

#include <unordered_map>

#include "ptx.hpp"
#include "ptx_cursor.hpp"

namespace ptxemu {

class Parser : Cursor {
 public:
  Parser(PtxFile& file, size_t position, Kernel& kernel)
      : Cursor(file.path, file.text, position), file_(file), kernel_(kernel) {}
  void parse();

 private:
  struct Scope {
    int id;
    std::unordered_map<std::string, int> registers;
    std::unordered_map<std::string, int> ranges;  // %r of %r<100> -> its first register
  };
  struct Fix {  // a branch whose label was not known yet
    int instruction;
    std::string label;
    std::vector<int> scopes;
  };
  /// What a declaration such as `.align 8 .b8 name[16]` says.
  struct Variable {
    std::string name;
    u32 align = 1, bytes = 0;
    bool open = false;  // name[]
  };

  // Declarations.
  void header();
  Variable variable();
  void parameter();
  u32 place(u32& total, Variable const& v);
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
  int inlined_ = 0;           // depth of calls
  std::vector<int> returns_;  // instructions of the function being inlined that leave it
  u32 dynamic_align_ = 16;    // of the dynamic shared memory
  std::vector<Fix> fixes_;
  std::unordered_map<std::string, int> labels_;                       // "scope:name"
  std::unordered_map<std::string, std::vector<std::string>> tables_;  // .branchtargets
  std::unordered_map<std::string, ModuleSymbol> variables_;
  std::unordered_map<u64, int> constant_rows_;
};

}  // namespace ptxemu
