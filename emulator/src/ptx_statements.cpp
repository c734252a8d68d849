// Operands and statements, and the inlining of device functions.
#include <cstdlib>

#include "ptx_parser.hpp"

namespace ptxemu {

namespace {

/// Marks an offset in the dynamic shared memory in Operand::value, until the size of the static shared
/// memory, which lies before it, is known.
constexpr u64 kDynamicShared = 1ull << 62;

void resolve_dynamic(Operand& operand, u32 dynamic) {
  if (operand.symbol_space == Space::kShared && (operand.value & kDynamicShared)) {
    operand.value = operand.value - kDynamicShared + dynamic;
  }
  for (Operand& part : operand.parts) {
    resolve_dynamic(part, dynamic);
  }
}

}  // namespace

Operand Parser::constant(u64 value) {
  auto const [entry, fresh] = constant_rows_.try_emplace(value, static_cast<int>(constant_rows_.size()));
  if (fresh) {
    kernel_.constants.insert(kernel_.constants.end(), kWarpSize, value);
  }
  Operand operand;
  operand.kind = Operand::kConstant;
  operand.constant = entry->second;
  operand.value = value;
  return operand;
}

/// An integer, or a float in the hexadecimal forms 0f and 0d.
Operand Parser::number() {
  skip_space();
  bool const negative = peek() == '-';
  if (negative || peek() == '+') {
    ++at_;
  }
  if (peek() == '0' && (peek_next() == 'f' || peek_next() == 'F')) {
    u64 const bits = std::strtoull(text_.substr(at_ + 2, 8).c_str(), nullptr, 16);
    at_ += 10;
    return constant(negative ? bits ^ 0x80000000u : bits);
  }
  if (peek() == '0' && (peek_next() == 'd' || peek_next() == 'D')) {
    u64 const bits = std::strtoull(text_.substr(at_ + 2, 16).c_str(), nullptr, 16);
    at_ += 18;
    return constant(negative ? bits ^ (1ull << 63) : bits);
  }
  char* end = nullptr;
  u64 const value = std::strtoull(text_.c_str() + at_, &end, 0);
  if (end == text_.c_str() + at_) {
    error("number '" + text_.substr(at_, 20) + "'");
  }
  at_ = static_cast<size_t>(end - text_.c_str());
  if (peek() == 'U') {
    ++at_;
  }
  return constant(negative ? 0 - value : value);
}

/// `base+offset]` or `base, {coordinates}]`, after the opening bracket.
Operand Parser::address() {
  Operand operand = this->operand();
  if (operand.kind != Operand::kConstant && operand.kind != Operand::kRegister &&
      operand.kind != Operand::kSymbol) {
    error("address '" + text_.substr(at_, 20) + "'");
  }
  if (operand.kind == Operand::kRegister) {
    operand.value = 0;
  }
  operand.kind = Operand::kAddress;
  while (!accept(']')) {
    if (accept('+')) {
      operand.value += number().value;
    } else {
      expect(',');
      operand.parts.push_back(this->operand());
    }
  }
  return operand;
}

/// A parameter or variable by its name; any other name is a label.
Operand Parser::symbol(std::string const& name) {
  Operand operand;
  operand.kind = Operand::kSymbol;
  for (Parameter const& parameter : kernel_.parameters) {
    if (parameter.name == name) {
      operand.symbol_space = Space::kParam;
      operand.value = parameter.offset;
      return operand;
    }
  }
  if (auto const found = variables_.find(name); found != variables_.end()) {
    operand.symbol_space = found->second.space;
    operand.value = found->second.address;
    return operand;
  }
  if (auto const found = file_.symbols.find(name); found != file_.symbols.end()) {
    operand.symbol_space = found->second.space;
    operand.value = found->second.address;
    if (found->second.space == Space::kShared) {
      // The address holds alignment << 32 | bytes (scan_module); the dynamic array has 0 bytes.
      u32 const align = static_cast<u32>(found->second.address >> 32);
      u32 const bytes = static_cast<u32>(found->second.address);
      if (bytes == 0) {
        dynamic_align_ = std::max(dynamic_align_, align);
        operand.value = kDynamicShared;
      } else {
        operand.value = allocate(kernel_.static_shared_bytes, {name, align, bytes, false});
      }
      variables_[name] = {Space::kShared, operand.value};
    }
    return operand;
  }
  operand.kind = Operand::kLabel;
  operand.label = name;
  return operand;
}

Operand Parser::operand() {
  Operand result;
  if (accept('{')) {
    result.kind = Operand::kVector;
    while (!accept('}')) {
      result.parts.push_back(operand());
      accept(',');
    }
    return result;
  }
  if (accept('[')) {
    return address();
  }
  if (accept('!')) {
    result = operand();
    result.negated = true;
    return result;
  }
  if (std::isdigit(static_cast<u8>(peek())) || peek() == '-') {
    return number();
  }
  std::string const name = identifier();
  if (name.empty()) {
    error("operand '" + text_.substr(at_, 20) + "'");
  }
  if (name == "_") {
    result.kind = Operand::kSink;  // also the first of a pair `_|%p`
  } else if (int const reg = find_register(name); reg >= 0) {
    result.kind = Operand::kRegister;
    result.reg = reg;
    result.type = kernel_.registers[static_cast<size_t>(reg)];
  } else if (name[0] == '%') {
    result.kind = Operand::kSpecial;
    result.special = special_register(name);
    if (result.special < 0) {
      error("register " + name);
    }
    return result;
  } else {
    return symbol(name);
  }
  if (accept('|')) {
    std::string const second = identifier();
    result.reg2 = second == "_" ? -1 : find_register(second);
  }
  return result;
}

void Parser::parse() {
  header();
  body();
  for (Fix const& fix : fixes_) {
    Instruction& instruction = kernel_.code[static_cast<size_t>(fix.instruction)];
    if (instruction.parts[0] == "brx") {
      for (std::string const& name : tables_.at(fix.label)) {
        instruction.targets.push_back(find_label(name, fix.scopes));
      }
    } else {
      instruction.target = find_label(fix.label, fix.scopes);
    }
  }
  // The dynamic shared memory begins behind the static variables, whose size is known only now.
  u32 const dynamic = (kernel_.static_shared_bytes + dynamic_align_ - 1) / dynamic_align_ * dynamic_align_;
  kernel_.static_shared_bytes = dynamic;
  for (Instruction& instruction : kernel_.code) {
    for (Operand& operand : instruction.operands) {
      resolve_dynamic(operand, dynamic);
    }
    decode(instruction, file_.target);
  }
}

void Parser::body() {
  int depth = 0;
  do {
    skip_space();
    if (peek() == '\0') {
      error("end of file inside a kernel");
    } else if (accept('{')) {
      scopes_.push_back({next_scope_++, {}, {}});
      ++depth;
    } else if (accept('}')) {
      scopes_.pop_back();
      --depth;
    } else if (!accept(';')) {
      statement();
    }
  } while (depth > 0);
}

std::vector<int> Parser::scope_ids() const {
  std::vector<int> ids;
  for (Scope const& scope : scopes_) {
    ids.push_back(scope.id);
  }
  return ids;
}

/// Reads the colon after a label, and the table that `.branchtargets` makes of it; false if the word is no
/// label.
bool Parser::label(std::string const& word) {
  skip_space();
  if (peek() != ':' || peek_next() == ':') {
    return false;
  }
  ++at_;
  labels_[std::to_string(scopes_.back().id) + ":" + word] = static_cast<int>(kernel_.code.size());
  skip_space();
  if (text_.compare(at_, 14, ".branchtargets") == 0) {
    at_ += 14;
    do {
      tables_[word].push_back(identifier());
    } while (accept(','));
    expect(';');
  }
  return true;
}

void Parser::statement() {
  size_t const begin = at_;
  Instruction instruction;
  instruction.line = line_;
  if (accept('@')) {
    instruction.predicate_negated = accept('!');
    instruction.predicate = find_register(identifier());
    if (instruction.predicate < 0) {
      error("predicate '" + text_.substr(begin, 20) + "'");
    }
  }
  std::string const word = identifier();
  if (word.empty()) {
    error("statement '" + text_.substr(at_, 30) + "'");
  }
  if (label(word)) {
    return;
  }
  if (word[0] == '.') {
    directive(word);
    return;
  }
  instruction.opcode = word;
  for (size_t i = 0, dot; i <= word.size(); i = dot + 1) {
    dot = std::min(word.find('.', i), word.size());
    instruction.parts.push_back(word.substr(i, dot - i));
  }
  size_t const end = std::min(text_.find(';', at_), text_.size());
  instruction.text = text_.substr(begin, std::min<size_t>(end + 1 - begin, 200));
  for (char& c : instruction.text) {
    c = std::isspace(static_cast<u8>(c)) ? ' ' : c;
  }
  if (instruction.parts[0] == "call") {
    call(instruction);
    return;
  }
  operands(instruction);
  kernel_.code.push_back(std::move(instruction));
}

void Parser::operands(Instruction& instruction) {
  if (!accept(';')) {
    do {
      instruction.operands.push_back(operand());
    } while (accept(','));
    expect(';');
  }
  int const index = static_cast<int>(kernel_.code.size());
  if (instruction.parts[0] == "bra" || instruction.parts[0] == "brx") {
    fixes_.push_back({index, instruction.operands.back().label, scope_ids()});
  } else if (inlined_ > 0 && instruction.parts[0] == "ret") {
    instruction.parts[0] = "bra";
    returns_.push_back(index);
  }
}

std::vector<std::string> Parser::names_in_parentheses() {
  std::vector<std::string> names;
  if (accept('(')) {
    while (!accept(')')) {
      names.push_back(identifier());
      accept(',');
    }
  }
  return names;
}

/// The position of a function's definition, after `.func`; npos if it is only declared.
size_t Parser::find_function(std::string const& name) const {
  for (size_t at = text_.find(".func"); at != std::string::npos; at = text_.find(".func", at + 5)) {
    size_t const end = text_.find_first_of("{;", at);
    size_t const found = text_.find(name, at);
    if (end != std::string::npos && text_[end] == '{' && found < end) {
      char const after = text_[found + name.size()];
      char const before = text_[found - 1];
      if (!std::isalnum(static_cast<u8>(after)) && after != '_' && std::isspace(static_cast<u8>(before))) {
        return at + 5;
      }
    }
  }
  return std::string::npos;
}

/// `call (result), function, (arguments);` parses the function's body in place, with the caller's .param
/// variables under the names of the formal parameters. A call of a function without a definition is an
/// instruction that is not modelled.
void Parser::call(Instruction& instruction) {
  std::vector<std::string> actual = names_in_parentheses();
  accept(',');
  std::string const name = identifier();
  accept(',');
  for (std::string const& argument : names_in_parentheses()) {
    actual.push_back(argument);
  }
  skip_past(';');
  size_t const definition = find_function(name);
  if (definition == std::string::npos || inlined_ > 16) {
    kernel_.code.push_back(std::move(instruction));
    return;
  }
  // Parse the function's text here, then return to the statement after the call.
  size_t const resume_at = at_;
  int const resume_line = line_;
  std::vector<int> const outer_returns = std::move(returns_);
  auto const outer_variables = variables_;
  returns_.clear();
  at_ = definition;
  line_ = static_cast<int>(std::count(text_.begin(), text_.begin() + static_cast<long>(at_), '\n')) + 1;
  size_t next = 0;
  auto const formals = [&] {
    if (accept('(')) {
      while (!accept(')')) {
        std::string const formal = variable().name;
        if (next >= actual.size() || outer_variables.count(actual[next]) == 0) {
          error("call of " + name);
        }
        variables_[formal] = outer_variables.at(actual[next++]);
        accept(',');
      }
    }
  };
  formals();
  identifier();
  formals();
  at_ = text_.find('{', at_);
  ++inlined_;
  body();
  --inlined_;
  // A ret of the inlined function branches to the instruction after its body.
  for (int index : returns_) {
    kernel_.code[static_cast<size_t>(index)].target = static_cast<int>(kernel_.code.size());
  }
  returns_ = outer_returns;
  variables_ = outer_variables;
  at_ = resume_at;
  line_ = resume_line;
}

std::shared_ptr<Kernel> parse_kernel(PtxFile& file, size_t position, std::string const& name) {
  auto kernel = std::make_shared<Kernel>();
  kernel->name = name;
  kernel->file = file.path;
  kernel->target = file.target;
  Parser(file, position, *kernel).parse();
  return kernel;
}

}  // namespace ptxemu
