// A position in PTX text, with the functions that read white space, comments, identifiers and single
// characters.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstring>
#include <string>

#include "types.hpp"

namespace ptxemu {

/// The base class of the parser. `at_` is the position and `line_` its line, from 1.
class Cursor {
 public:
  Cursor(std::string const& path, std::string const& text, size_t position)
      : path_(path), text_(text), at_(position) {
    line_ += static_cast<int>(std::count(text.begin(), text.begin() + static_cast<long>(position), '\n'));
  }

 protected:
  [[noreturn]] void error(std::string const& message) const {
    fatal("%s:%d: cannot parse %s", path_.c_str(), line_, message.c_str());
  }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }
  char peek_next() const { return at_ + 1 < text_.size() ? text_[at_ + 1] : '\0'; }

  void skip_space() {
    for (;;) {
      if (peek() == '\n') {
        ++line_;
        ++at_;
      } else if (std::isspace(static_cast<u8>(peek()))) {
        ++at_;
      } else if (peek() == '/' && peek_next() == '/') {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else {
        return;
      }
    }
  }
  /// Skips white space and, if it is next, the character; returns whether it was.
  bool accept(char c) {
    skip_space();
    if (peek() != c) {
      return false;
    }
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!accept(c)) {
      error(std::string("'") + text_.substr(at_, 20) + "', expected " + c);
    }
  }
  /// A name, directive or opcode with its modifiers; empty if none is next.
  std::string identifier() {
    skip_space();
    size_t const begin = at_;
    while (std::isalnum(static_cast<u8>(peek())) || (peek() != '\0' && std::strchr("_$%.", peek())) ||
           (peek() == ':' && peek_next() == ':') || (peek() == ':' && at_ > begin && text_[at_ - 1] == ':')) {
      ++at_;
    }
    return text_.substr(begin, at_ - begin);
  }
  /// Skips everything up to and including the character.
  void skip_past(char c) {
    while (peek() != '\0' && peek() != c) {
      line_ += peek() == '\n';
      ++at_;
    }
    ++at_;
  }

  std::string const& path_;
  std::string const& text_;
  size_t at_;
  int line_ = 1;
};

}  // namespace ptxemu
