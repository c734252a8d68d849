// The registry of device allocations, and the formatting of messages.
#include "memory.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace ptxemu {

namespace {

constexpr size_t kRedZone = 1024;
constexpr size_t kAlignment = 1024;

std::string format_arguments(char const* format, va_list arguments) {
  va_list again;
  va_copy(again, arguments);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, again)) + 1, '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size(), format, arguments);
  text.pop_back();
  return text;
}

}  // namespace

std::string format_text(char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  return text;
}

void fatal(char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = format_arguments(format, arguments);
  va_end(arguments);
  throw Fatal(text);
}

DeviceMemory& DeviceMemory::instance() {
  // Never destroyed: programs free device memory in their static destructors.
  static auto* const memory = new DeviceMemory;
  return *memory;
}

void* DeviceMemory::allocate(size_t bytes) {
  size_t const padded = (bytes + kAlignment - 1) / kAlignment * kAlignment + 2 * kRedZone;
  auto* const block = static_cast<u8*>(std::aligned_alloc(kAlignment, padded));
  if (block == nullptr) {
    return nullptr;
  }
  std::memset(block, 0xCB, padded);  // red zones and allocation differ, which helps in a debugger
  std::memset(block + kRedZone, 0xFF, bytes);
  auto const begin = reinterpret_cast<u64>(block + kRedZone);
  allocations_[begin] = {begin, begin + bytes, block, std::vector<u8>(bytes)};
  return block + kRedZone;
}

bool DeviceMemory::free(void* pointer) {
  auto const found = allocations_.find(reinterpret_cast<u64>(pointer));
  if (found == allocations_.end()) {
    return false;
  }
  std::free(found->second.block);
  allocations_.erase(found);
  last_ = nullptr;
  return true;
}

DeviceMemory::Allocation* DeviceMemory::find(u64 address, size_t bytes) {
  if (last_ != nullptr && address >= last_->begin && address + bytes <= last_->end) {
    return last_;
  }
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) {
    return nullptr;
  }
  Allocation& allocation = (--next)->second;
  if (address + bytes > allocation.end || address + bytes < address) {
    return nullptr;
  }
  last_ = &allocation;
  return last_;
}

void DeviceMemory::check(u64 address, size_t bytes, char const* what) {
  if (find(address, bytes) != nullptr) {
    return;
  }
  constexpr u64 kNear = 1 << 20;  // the message names an allocation only if it is nearer than this
  auto const next = allocations_.upper_bound(address);
  u64 const ahead = next == allocations_.end() ? kNear : std::min(next->first - address, kNear);
  if (next != allocations_.begin()) {
    Allocation const& below = std::prev(next)->second;
    if (address < below.end + ahead) {
      fatal("%s of %zu bytes at 0x%llx: byte %llu of an allocation of %llu bytes", what, bytes,
            static_cast<unsigned long long>(address), static_cast<unsigned long long>(address - below.begin),
            static_cast<unsigned long long>(below.end - below.begin));
    }
  }
  if (ahead < kNear) {
    fatal("%s of %zu bytes at 0x%llx: %llu bytes before an allocation", what, bytes,
          static_cast<unsigned long long>(address), static_cast<unsigned long long>(ahead));
  }
  fatal("%s of %zu bytes at 0x%llx: no allocation there", what, bytes,
        static_cast<unsigned long long>(address));
}

// A pointer into a red zone counts as device memory, so that copies which miss an allocation are reported.
bool DeviceMemory::owns(u64 address) const {
  auto next = allocations_.upper_bound(address + kRedZone);
  return next != allocations_.begin() && address < std::prev(next)->second.end + kRedZone;
}

bool DeviceMemory::contains(u64 address, size_t bytes) const {
  return const_cast<DeviceMemory*>(this)->find(address, bytes) != nullptr;
}

void DeviceMemory::mark(u64 address, size_t bytes, bool written) {
  if (Allocation* const allocation = find(address, bytes)) {
    std::memset(allocation->written.data() + (address - allocation->begin), written ? 1 : 0, bytes);
  }
}

size_t DeviceMemory::first_unwritten(u64 address, size_t bytes) {
  Allocation const* const allocation = find(address, bytes);
  if (allocation == nullptr || bytes == 0) {
    return bytes;
  }
  u8 const* const marks = allocation->written.data() + (address - allocation->begin);
  return static_cast<size_t>(std::find(marks, marks + bytes, u8{0}) - marks);
}

void DeviceMemory::copy_marks(u64 to, u64 from, size_t bytes) {
  Allocation const* const source = find(from, bytes);
  u8 const* const marks = source == nullptr ? nullptr : source->written.data() + (from - source->begin);
  Allocation* const target = find(to, bytes);
  if (target == nullptr || bytes == 0) {
    return;
  }
  u8* const out = target->written.data() + (to - target->begin);
  if (marks == nullptr) {  // from host memory
    std::memset(out, 1, bytes);
  } else {
    std::memmove(out, marks, bytes);
  }
}

}  // namespace ptxemu
