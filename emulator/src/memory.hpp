// Device memory is host memory: a registry of allocations with red zones and a shadow of what was written.
#pragma once

#include <map>
#include <vector>

#include "types.hpp"

namespace ptxemu {

class DeviceMemory {
 public:
  static DeviceMemory& instance();

  /// `bytes` of memory filled with 0xFF and not written yet; 1024-byte aligned, red zones on both sides.
  void* allocate(size_t bytes);
  bool free(void* pointer);  // false: not the start of an allocation

  /// Fatal, naming `what`, unless the bytes lie in one allocation.
  void check(u64 address, size_t bytes, char const* what);
  /// Whether the address lies in an allocation, or in a red zone of one.
  bool owns(u64 address) const;
  bool contains(u64 address, size_t bytes) const;

  void mark(u64 address, size_t bytes, bool written);
  /// The first of these bytes that was never written, or `bytes`.
  size_t first_unwritten(u64 address, size_t bytes);
  /// As cudaMemcpy from device to device: what was not written in the source is not in the destination.
  void copy_marks(u64 to, u64 from, size_t bytes);

 private:
  struct Allocation {
    u64 begin = 1, end = 0;
    u8* block = nullptr;
    std::vector<u8> written;  // 1 per byte
  };
  Allocation* find(u64 address, size_t bytes);

  std::map<u64, Allocation> allocations_;
  Allocation* last_ = nullptr;  // accesses come in runs
};

}  // namespace ptxemu
