// Declarations: the header of an entry, parameters, registers, variables and labels.
#include <cstdlib>

#include "ptx_parser.hpp"

namespace ptxemu {

Type parse_type(std::string const& name) {
  static std::map<std::string, Type> const types = {
      {"pred", Type::kPred}, {"b8", Type::kB8},       {"u8", Type::kU8},         {"s8", Type::kS8},
      {"b16", Type::kB16},   {"u16", Type::kU16},     {"s16", Type::kS16},       {"f16", Type::kF16},
      {"bf16", Type::kBf16}, {"b32", Type::kB32},     {"u32", Type::kU32},       {"s32", Type::kS32},
      {"f32", Type::kF32},   {"f16x2", Type::kF16x2}, {"bf16x2", Type::kBf16x2}, {"b64", Type::kB64},
      {"u64", Type::kU64},   {"s64", Type::kS64},     {"f64", Type::kF64},       {"b128", Type::kB128}};
  auto const found = types.find(name);
  return found == types.end() ? Type::kNone : found->second;
}

/// `name(parameters) .maxntid 128 .reqnctapercluster 2, 1, 1`, up to the opening brace.
void Parser::header() {
  identifier();  // the entry's name
  if (accept('(')) {
    while (!accept(')')) {
      parameter();
      accept(',');
    }
  }
  for (skip_space(); peek() != '{'; skip_space()) {
    std::string const word = identifier();
    if (word == ".maxntid" || word == ".reqntid") {
      kernel_.max_threads = 1;
      do {
        kernel_.max_threads *= static_cast<u32>(number().value);
      } while (accept(','));
    } else if (word == ".reqnctapercluster") {
      int i = 0;
      do {
        kernel_.required_cluster[i++] = static_cast<u32>(number().value);
      } while (i < 3 && accept(','));
    } else if (word.empty()) {
      ++at_;
    }
  }
}

Parser::Variable Parser::variable() {
  Variable result;
  u32 element = 0;
  bool is_pointer = false;
  for (;;) {
    std::string const word = identifier();
    if (word == ".align") {
      // Behind .ptr it is the alignment of what the pointer points at.
      u32 const align = static_cast<u32>(number().value);
      result.align = is_pointer ? result.align : align;
    } else if (word == ".ptr") {
      is_pointer = true;
    } else if (word == ".attribute" || word == ".managed") {
    } else if (!word.empty() && word[0] == '.') {
      if (Type const type = parse_type(word.substr(1)); type != Type::kNone) {
        element = static_cast<u32>(bytes_of(type));
        result.align = std::max(result.align, element);
      }
    } else {
      result.name = word;
      break;
    }
  }
  result.bytes = element;
  if (accept('[')) {
    result.open = accept(']');
    if (!result.open) {
      result.bytes *= static_cast<u32>(number().value);
      expect(']');
    }
  }
  return result;
}

void Parser::parameter() {
  Variable const v = variable();
  if (v.name.empty()) {
    error("parameter '" + text_.substr(at_, 30) + "'");
  }
  u32 const offset = (kernel_.param_bytes + v.align - 1) / v.align * v.align;
  kernel_.parameters.push_back({v.name, offset, v.bytes});
  kernel_.param_bytes = offset + v.bytes;
}

/// Appends a variable to a space of `total` bytes; returns its offset.
u32 Parser::allocate(u32& total, Variable const& v) {
  u32 const offset = (total + v.align - 1) / v.align * v.align;
  total = offset + v.bytes;
  return offset;
}

/// The index of a new register. A .b128 register is two consecutive ones, its low half first.
int Parser::new_register(Type type) {
  kernel_.registers.push_back(type);
  if (type == Type::kB128) {
    kernel_.registers.push_back(Type::kB64);  // its high half
  }
  return static_cast<int>(kernel_.registers.size()) - (type == Type::kB128 ? 2 : 1);
}

void Parser::declare_registers() {
  std::string const type_name = identifier();
  Type const type = parse_type(type_name.substr(1));
  if (type == Type::kNone) {
    error("register type " + type_name);
  }
  do {
    std::string const name = identifier();
    if (accept('<')) {
      int const count = static_cast<int>(number().value);
      int const stride = type == Type::kB128 ? 2 : 1;
      int const first = new_register(type);
      for (int i = 1; i < count; ++i) {
        new_register(type);
      }
      scopes_.back().ranges[name] = first << 1 | (stride - 1);
      expect('>');
    } else {
      scopes_.back().registers[name] = new_register(type);
    }
  } while (accept(','));
  expect(';');
}

/// The index of a register by its name; -1 if there is none.
int Parser::find_register(std::string const& name) const {
  size_t digits = name.size();
  while (digits > 0 && std::isdigit(static_cast<u8>(name[digits - 1]))) {
    --digits;
  }
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    if (auto const found = scope->registers.find(name); found != scope->registers.end()) {
      return found->second;
    }
    if (digits < name.size()) {
      if (auto const found = scope->ranges.find(name.substr(0, digits)); found != scope->ranges.end()) {
        return (found->second >> 1) + (std::atoi(name.c_str() + digits) << (found->second & 1));
      }
    }
  }
  return -1;
}

int Parser::find_label(std::string const& label, std::vector<int> const& scopes) const {
  for (auto id = scopes.rbegin(); id != scopes.rend(); ++id) {
    if (auto const found = labels_.find(std::to_string(*id) + ":" + label); found != labels_.end()) {
      return found->second;
    }
  }
  error("branch to unknown label " + label);
}

void Parser::directive(std::string const& word) {
  if (word == ".reg") {
    declare_registers();
  } else if (word == ".shared" || word == ".local" || word == ".param") {
    // The .param variables that pass the arguments of a call are allocated in local memory.
    Variable const v = variable();
    bool const shared = word == ".shared";
    u32& total = shared ? kernel_.static_shared_bytes : kernel_.local_bytes;
    variables_[v.name] = {shared ? Space::kShared : Space::kLocal, allocate(total, v)};
    expect(';');
  } else if (word == ".loc" || word == ".file") {
    skip_past('\n');
    ++line_;
  } else {  // .pragma and others that have no effect
    skip_past(';');
  }
}

}  // namespace ptxemu
