// The library of PTX files: finds entries and variables of module scope without parsing the kernels.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "memory.hpp"
#include "ptx.hpp"

namespace ptxemu {

namespace {

bool is_name(char c) { return std::isalnum(static_cast<u8>(c)) || c == '_' || c == '$'; }

/// Writes the values of a list such as `{1, 0f3F800000, 0xFF}` as elements of the type.
void write_initial_values(std::string const& list, Type type, u8* out, size_t bytes) {
  size_t const width = static_cast<size_t>(bytes_of(type));
  for (size_t at = 0, written = 0; at < list.size() && written + width <= bytes; ++at) {
    char const c = list[at];
    if (std::isalpha(static_cast<u8>(c)) || c == '_' || c == '%') {
      fatal("the initial value %s of a variable is not modelled", list.substr(at, 40).c_str());
    }
    if (!std::isdigit(static_cast<u8>(c)) && c != '-') {
      continue;
    }
    bool const is_float_bits = c == '0' && at + 1 < list.size() && std::strchr("fFdD", list[at + 1]);
    char* end = nullptr;
    u64 const value = is_float_bits ? std::strtoull(list.c_str() + at + 2, &end, 16)
                                    : static_cast<u64>(std::strtoll(list.c_str() + at, &end, 0));
    std::memcpy(out + written, &value, std::min<size_t>(width, 8));
    written += width;
    at = static_cast<size_t>(end - list.c_str());
  }
}

/// Declares the variable of one statement, e.g. `.visible .const .align 4 .b8 name[16] = {...};`. A shared
/// variable gets its offset in each kernel that uses it; until then its address is alignment << 32 | bytes.
void declare(PtxFile& file, std::string const& line) {
  Space space = Space::kGeneric;
  u32 align = 1;
  Type type = Type::kNone;
  std::string name;
  std::string const head = line.substr(0, line.find_first_of("=;"));
  std::istringstream words(head);
  for (std::string word; words >> word;) {
    if (word == ".shared") {
      space = Space::kShared;
    } else if (word == ".global") {
      space = Space::kGlobal;
    } else if (word == ".const") {
      space = Space::kConst;
    } else if (word == ".align") {
      words >> align;
    } else if (word[0] == '.') {
      Type const t = parse_type(word.substr(1));
      type = t == Type::kNone ? type : t;
    } else {
      name = word;
      break;
    }
  }
  if (space == Space::kGeneric || name.empty()) {
    return;
  }
  u32 bytes = static_cast<u32>(bytes_of(type));
  align = std::max(align, bytes);
  if (size_t const bracket = name.find('['); bracket != std::string::npos) {
    bytes *= static_cast<u32>(std::strtoul(name.c_str() + bracket + 1, nullptr, 10));
    name.resize(bracket);
  }
  if (space == Space::kShared) {
    file.symbols[name] = {space, static_cast<u64>(align) << 32 | bytes};
    return;
  }
  void* const memory = DeviceMemory::instance().allocate(std::max<u32>(bytes, 1));
  std::memset(memory, 0, bytes);
  if (size_t const equals = line.find('='); equals != std::string::npos) {
    write_initial_values(line.substr(equals + 1), type, static_cast<u8*>(memory), bytes);
  }
  // Variables without initial values are zero, so all bytes count as written.
  DeviceMemory::instance().mark(reinterpret_cast<u64>(memory), bytes, true);
  file.allocations.push_back(memory);
  file.symbols[name] = {space, reinterpret_cast<u64>(memory)};
}

}  // namespace

/// Relies on the format that nvcc writes: statements of module scope start with a dot in the first column.
void scan_module(PtxFile& file) {
  std::string const& text = file.text;
  for (size_t at = 0; at != std::string::npos && at < text.size();) {
    size_t end = text.find('\n', at);
    if (text[at] == '.' && text.compare(at, 5, ".func") != 0) {
      std::string const first = text.substr(at, std::min(end, text.size()) - at);
      bool const is_variable =
          first.find(".entry") == std::string::npos && first.find(".func") == std::string::npos &&
          (first.find(".shared") != std::string::npos || first.find(".global") != std::string::npos ||
           first.find(".const") != std::string::npos);
      if (is_variable) {
        size_t const semicolon = text.find(';', at);
        declare(file, text.substr(at, semicolon - at));
        end = text.find('\n', semicolon);
      }
    }
    at = end == std::string::npos ? end : end + 1;
  }
  file.scanned = true;
}

void PtxLibrary::load(std::string const& path) {
  namespace fs = std::filesystem;
  if (!fs::is_directory(path)) {
    load_file(path);
    return;
  }
  std::vector<std::string> files;
  for (auto const& entry : fs::directory_iterator(path)) {
    if (entry.path().extension() == ".ptx") {
      files.push_back(entry.path().string());
    }
  }
  std::sort(files.begin(), files.end());
  if (files.empty()) {
    fatal("no .ptx file in %s", path.c_str());
  }
  for (std::string const& file : files) {
    load_file(file);
  }
}

void PtxLibrary::load_file(std::string const& path) {
  std::ifstream stream(path, std::ios::binary);
  if (!stream) {
    fatal("cannot open %s", path.c_str());
  }
  std::ostringstream buffer;
  buffer << stream.rdbuf();
  auto file = std::make_unique<PtxFile>();
  file->path = path;
  file->text = buffer.str();
  std::string const& text = file->text;
  file->target = Target::parse(text);
  // Other targets are skipped silently: a library may have PTX of several architectures.
  if (int const family = file->target.number / 10; family != 10 && family != 12) {
    return;
  }
  for (size_t at = text.find(".entry"); at != std::string::npos; at = text.find(".entry", at + 6)) {
    size_t begin = at + 6;
    if (!std::isspace(static_cast<u8>(text[begin]))) {  // part of a longer word
      continue;
    }
    while (std::isspace(static_cast<u8>(text[begin]))) {
      ++begin;
    }
    size_t end = begin;
    while (is_name(text[end])) {
      ++end;
    }
    entries_[text.substr(begin, end - begin)].push_back({file.get(), begin, nullptr});
  }
  files_.push_back(std::move(file));
}

std::shared_ptr<Kernel> PtxLibrary::find(std::string const& name, int compute_capability) {
  Entry* best = nullptr;
  if (auto const found = entries_.find(name); found != entries_.end()) {
    for (Entry& entry : found->second) {
      if (entry.file->target.runs_on(compute_capability) &&
          (best == nullptr || entry.file->target.number > best->file->target.number)) {
        best = &entry;
      }
    }
  }
  if (best == nullptr) {
    return nullptr;
  }
  if (best->kernel == nullptr) {
    if (!best->file->scanned) {
      scan_module(*best->file);
    }
    best->kernel = parse_kernel(*best->file, best->position, name);
  }
  return best->kernel;
}

void PtxLibrary::clear() {
  for (auto const& file : files_) {
    for (void* allocation : file->allocations) {
      DeviceMemory::instance().free(allocation);
    }
  }
  entries_.clear();
  files_.clear();
}

}  // namespace ptxemu
