// Limits of the devices, and the targets of PTX files.
#include "device.hpp"

#include <cctype>
#include <cstdlib>

#include "ptx.hpp"

namespace ptxemu {

Device const& device_of(int compute_capability) {
  static Device const sm100 = {232448, 233472, 2048, 32, 126 << 20, 16};  // B200
  static Device const sm120 = {101376, 102400, 1536, 24, 96 << 20, 1};    // GeForce RTX 5090
  static Device const sm121 = {101376, 102400, 1536, 24, 24 << 20, 1};    // DGX Spark
  return !is_sm120(compute_capability) ? sm100 : compute_capability == 120 ? sm120 : sm121;
}

Target Target::parse(std::string const& ptx) {
  static char const prefix[] = ".target sm_";
  size_t const at = ptx.find(prefix);
  if (at == std::string::npos) {
    return {};
  }
  char* end = nullptr;
  Target target;
  target.number = static_cast<int>(std::strtol(ptx.c_str() + at + sizeof prefix - 1, &end, 10));
  target.suffix = *end == 'a' || *end == 'f' ? *end : '\0';
  return target;
}

std::string Target::name() const {
  std::string text = "sm_" + std::to_string(number);
  return suffix == 0 ? text : text + suffix;
}

bool Target::runs_on(int compute_capability) const {
  switch (suffix) {
    case 'a': return compute_capability == number;
    case 'f': return compute_capability / 10 == number / 10 && compute_capability >= number;
    default: return number != 0 && compute_capability >= number;
  }
}

bool Target::has(Instruction const& in) const {
  if (is_sm120(number)) {
    return in.parts[0] != "tcgen05" && !(in.parts[0] == "cp" && in.has("multicast::cluster")) &&
           !in.has("cta_group::2");
  }
  return !(in.parts[0] == "mma" && in.has("block_scale"));
}

}  // namespace ptxemu
