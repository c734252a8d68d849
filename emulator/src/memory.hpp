// Device memory, which is host memory: a registry of allocations with red zones and a mark for each written
// byte.
#pragma once

#include <map>
#include <vector>

#include "types.hpp"

namespace ptxemu {

/// The device memory of the process. A device pointer is a host pointer. Each allocation has a red zone on
/// both sides and one mark for each byte that tells whether the byte has been written.
class DeviceMemory {
 public:
  static DeviceMemory& instance();

  /// Memory that is aligned to 1024 bytes, filled with 0xFF and marked as not written; null if the host has
  /// none.
  void* allocate(size_t bytes);
  /// False if the pointer is not the start of an allocation.
  bool free(void* pointer);

  /// Throws Fatal, with `what` as the name of the access, unless the bytes lie in one allocation.
  void check(u64 address, size_t bytes, char const* what);
  /// Whether the address lies in an allocation, or in a red zone of one.
  bool owns(u64 address) const;
  /// Whether the bytes lie in one allocation.
  bool contains(u64 address, size_t bytes) const;

  /// Marks the bytes as written, or as not written; bytes that lie in no allocation are ignored.
  void mark(u64 address, size_t bytes, bool written);
  /// The offset of the first byte that was never written, or `bytes` if all were.
  size_t first_unwritten(u64 address, size_t bytes);
  /// Copies the marks of a copy of memory, so that bytes which were never written stay so; host memory counts
  /// as written.
  void copy_marks(u64 to, u64 from, size_t bytes);

 private:
  struct Allocation {
    u64 begin = 1, end = 0;
    u8* block = nullptr;
    std::vector<u8> written;  // 1 per byte
  };
  Allocation* find(u64 address, size_t bytes);

  std::map<u64, Allocation> allocations_;
  Allocation* last_ =
      nullptr;  // the allocation that was found last: successive accesses mostly hit the same one
};

}  // namespace ptxemu
