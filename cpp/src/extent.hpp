// Where the matrices and vectors of a call lie in memory, and whether two of them overlap.
#pragma once

#include <cstdint>

namespace fp4gemm {

/// Rows of `width` bytes whose begins are `stride` bytes apart; the stride of a single row has no meaning.
struct Extent {
  uintptr_t begin;
  int64_t rows;
  int64_t width;
  int64_t stride;

  /// A matrix with `stride` elements from row to row.
  static Extent of_rows(void const* data, int64_t rows, int64_t columns, int64_t stride, int element_bytes) {
    return {reinterpret_cast<uintptr_t>(data), rows, columns * element_bytes, stride * element_bytes};
  }
  /// Adjacent bytes.
  static Extent of_bytes(void const* data, int64_t bytes) {
    return {reinterpret_cast<uintptr_t>(data), bytes > 0 ? 1 : 0, bytes, bytes};
  }

  bool is_empty() const { return begin == 0 || rows == 0 || width == 0; }
  /// The address behind the last byte, or the largest one where a stride leads beyond it.
  uintptr_t end() const {
    uintptr_t bytes = 0;
    uintptr_t result = 0;
    bool const fits = !__builtin_mul_overflow(rows - 1, stride, &bytes) &&
                      !__builtin_add_overflow(bytes, width, &bytes) &&
                      !__builtin_add_overflow(begin, bytes, &result);
    return fits ? result : UINTPTR_MAX;
  }
  /// Whether every byte is the same.
  bool is_same(Extent const& other) const {
    return begin == other.begin && rows == other.rows && width == other.width &&
           (rows == 1 || stride == other.stride);
  }
};

/// Whether two extents have a byte in common. Column ranges of one buffer that have no column in common do
/// not, although their rows alternate. Extents with different strides are taken to overlap where one begins
/// before the other ends.
inline bool overlap(Extent const& x, Extent const& y) {
  if (x.is_empty() || y.is_empty() || x.begin >= y.end() || y.begin >= x.end()) {
    return false;
  }
  if ((x.rows == 1 && y.rows == 1) || (x.rows > 1 && y.rows > 1 && x.stride != y.stride)) {
    return true;
  }
  int64_t const stride = x.rows > 1 ? x.stride : y.stride;
  int64_t const apart = static_cast<int64_t>(x.begin - y.begin) % stride;
  int64_t const distance = apart < 0 ? apart + stride : apart;
  return distance < y.width || distance + x.width > stride;
}

}  // namespace fp4gemm
