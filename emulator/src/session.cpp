// Options from the environment, reports of findings, and statistics as JSON.
#include "session.hpp"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace ptxemu {

namespace {

void write_string(std::ostringstream& out, std::string const& text) {
  out << '"';
  for (char c : text) {
    if (c == '"' || c == '\\') {
      out << '\\';
    }
    out << c;
  }
  out << '"';
}

/// The number in an environment variable, or `otherwise` if it is not set.
u64 environment_number(char const* name, u64 otherwise) {
  char const* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 0);
}

void append_statistics_at_exit() {
  char const* const path = std::getenv("PTXEMU_STATS");
  if (path != nullptr && *path != '\0') {
    if (std::FILE* const file = std::fopen(path, "a")) {
      std::string const text = Session::instance().statistics.json() + "\n";
      std::fwrite(text.data(), 1, text.size(), file);
      std::fclose(file);
    }
  }
  Session const& session = Session::instance();
  if (session.standalone && session.num_hazards != 0) {
    std::fprintf(stderr, "ptxemu: %llu hazards at %zu places\n",
                 static_cast<unsigned long long>(session.num_hazards), session.hazards.size());
  }
}

}  // namespace

void Statistics::cover(Kernel const& kernel, std::vector<u64> const& counts) {
  auto& lines = lines_[kernel.name];
  auto& opcodes = sets_["opcode"];
  for (size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] != 0) {
      lines[kernel.code[i].line] += counts[i];
      opcodes[kernel.code[i].opcode] += counts[i];
    }
  }
  sets_["kernel"][kernel.name]++;
}

std::string Statistics::json() const {
  std::ostringstream out;
  out << "{\"launches\": " << launches << ", \"ctas\": " << ctas
      << ", \"warp_instructions\": " << warp_instructions << ", \"stolen_clusters\": " << stolen_clusters
      << ", \"unread_stores_at_exit\": " << unread_stores_at_exit << ", \"seconds\": " << seconds;
  for (auto const& [category, names] : sets_) {
    out << ", \"" << category << "\": {";
    char const* separator = "";
    for (auto const& [name, count] : names) {
      out << separator;
      write_string(out, name);
      out << ": " << count;
      separator = ", ";
    }
    out << '}';
  }
  for (auto const& [name, kernels] : {std::pair("lines", &lines_), std::pair("useful", &useful_)}) {
    out << ", \"" << name << "\": {";
    char const* separator = "";
    for (auto const& [kernel, lines] : *kernels) {
      out << separator;
      write_string(out, kernel);
      out << ": {";
      char const* comma = "";
      for (auto const& [line, count] : lines) {
        out << comma << '"' << line << "\": " << count;
        comma = ", ";
      }
      out << '}';
      separator = ", ";
    }
    out << '}';
  }
  out << '}';
  return out.str();
}

void Statistics::reset() { *this = Statistics(); }

/// Reads the options of programs that do not call the C interface from environment variables (README.md).
Session::Session() {
  ptxemu_default_options(&options);
  char const* const files = std::getenv("PTXEMU_PTX");
  standalone = files != nullptr;
  if (char const* const mode = std::getenv("PTXEMU_MODE")) {
    static std::map<std::string, int> const modes = {
        {"eager", PTXEMU_EAGER}, {"lazy", PTXEMU_LAZY}, {"random", PTXEMU_RANDOM}, {"pct", PTXEMU_PCT}};
    auto const found = modes.find(mode);
    if (found == modes.end()) {
      std::fprintf(stderr, "ptxemu: PTXEMU_MODE is %s, must be eager, lazy, random or pct\n", mode);
      std::exit(2);
    }
    options.mode = found->second;
  }
  options.seed = environment_number("PTXEMU_SEED", options.seed);
  options.resident_clusters =
      static_cast<int>(environment_number("PTXEMU_RESIDENT", static_cast<u64>(options.resident_clusters)));
  options.num_sms = static_cast<int>(environment_number("PTXEMU_SMS", static_cast<u64>(options.num_sms)));
  options.compute_capability =
      static_cast<int>(environment_number("PTXEMU_CC", static_cast<u64>(options.compute_capability)));
  options.detect_races =
      static_cast<int>(environment_number("PTXEMU_RACES", static_cast<u64>(options.detect_races)));
  options.hazards_are_fatal = static_cast<int>(environment_number("PTXEMU_HAZARDS_FATAL", 0));
  options.pdl = static_cast<int>(environment_number("PTXEMU_PDL", static_cast<u64>(options.pdl)));
  options.faulty_tensor_maps = static_cast<int>(environment_number("PTXEMU_FAULTY_TENSOR_MAPS", 0));
  options.arithmetic = static_cast<int>(environment_number("PTXEMU_ARITHMETIC", PTXEMU_ROUNDED));
  options.instruction_budget = environment_number("PTXEMU_BUDGET", options.instruction_budget);
  if (files != nullptr) {
    std::istringstream list(files);
    for (std::string path; std::getline(list, path, ':');) {
      try {
        library.load(path);
      } catch (Fatal const& error) {
        std::fprintf(stderr, "ptxemu: %s\n", error.what());
        std::exit(2);
      }
    }
  }
  std::atexit(append_statistics_at_exit);
}

Session& Session::instance() {
  // Never destroyed: programs call the runtime in their static destructors.
  static auto* const session = new Session;
  return *session;
}

void Session::report_fatal(std::string const& text) {
  last_error = text;
  if (standalone) {
    std::fprintf(stderr, "ptxemu: FATAL: %s\n", text.c_str());
  }
}

void Session::report_hazard(std::string const& text, bool fresh) {
  ++num_hazards;
  if (fresh && hazards.size() < 1000) {  // a bound on the memory of reports; num_hazards counts on
    hazards.push_back(text);
    if (standalone) {
      std::fprintf(stderr, "ptxemu: HAZARD: %s\n", text.c_str());
    }
  }
}

}  // namespace ptxemu
