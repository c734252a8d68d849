// The rules for the arguments of the C interface, and checks whose messages name the argument that breaks
// one.
#pragma once

#include <cstdint>

#include "error.hpp"
#include "fp4gemm/fp4gemm.h"
#include "quantize/sizes.hpp"

namespace fp4gemm {

/// Whether a format is one of the OCP Microscaling formats: an e8m0 scale for each 32 of k.
constexpr bool is_mx(fp4gemm_format_t format) {
  return format == FP4GEMM_FORMAT_MXFP8 || format == FP4GEMM_FORMAT_MXFP4;
}

/// Whether two MX formats are multiplied: A and B in one format, or MXFP8 tokens by MXFP4 weights.
constexpr bool multiplies_mx(fp4gemm_format_t a, fp4gemm_format_t b) {
  return (is_mx(a) && a == b) || (a == FP4GEMM_FORMAT_MXFP8 && b == FP4GEMM_FORMAT_MXFP4);
}

/// The limits and alignments, for the checks and their messages.
struct Rules {
  static constexpr int kPointerBytes = 16;      // of every matrix and scale buffer
  static constexpr int kRowBytes = 16;          // rows of x and D start on such boundaries
  static constexpr int kQuantizeK = 16;         // k of a quantized tensor: a multiple of a block
  static constexpr int kGemmK = 32;             // k of a GEMM: a row of codes is a multiple of 16 bytes
  static constexpr int kMxK = 32;               // k of an MX tensor: a multiple of a block
  static constexpr int kFp8K = 64;              // k of FP8 tokens, which are reordered within 64 elements
  static constexpr int kUnpackedK = 128;        // k of codes that TMA unpacks, beside values in e4m3
  static constexpr int kUnpackedBytes = 32;     // alignment of such codes
  static constexpr int kResidualChannels = 32;  // their number: k of a GEMM stays a multiple of kGemmK
  static constexpr int64_t kMaxNormK = 65536;   // a CTA keeps a normalised row in registers
  static constexpr int kWorkspaceBytes = 256;   // alignment of a workspace
  static constexpr int64_t kMaxSize = INT32_MAX;
  static constexpr int64_t kMaxK = int64_t{1} << 30;  // kernels count beyond the end of k in 32 bits
  static constexpr int64_t kMaxElements = int64_t{1}
                                          << 58;  // of a buffer: sums of their bytes fit in 64 bits

  /// The columns of a tile of block scales. In a GEMM that is ragged in k each group begins at a multiple of
  /// them in A and B, also where these are decoded, and k is a multiple of them.
  static constexpr int group_columns(fp4gemm_format_t format) {
    return is_mx(format) ? kScaleWord * kMxK : kGroupColumns;
  }
};

inline int dtype_bytes(fp4gemm_dtype_t dtype) { return dtype == FP4GEMM_FP32 ? 4 : 2; }

inline long long ll(int64_t value) { return static_cast<long long>(value); }

inline bool is_aligned(void const* pointer, int bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

/// An int that says yes or no.
inline fp4gemm_status_t check_flag(char const* name, int flag) {
  FP4GEMM_CHECK(flag == 0 || flag == 1, "%s: is %d, must be 0 or 1", name, flag);
  return FP4GEMM_SUCCESS;
}

inline fp4gemm_status_t check_dtype(char const* name, fp4gemm_dtype_t dtype) {
  FP4GEMM_CHECK(dtype == FP4GEMM_BF16 || dtype == FP4GEMM_FP16 || dtype == FP4GEMM_FP32,
                "%s: is %d, must be FP4GEMM_BF16, FP4GEMM_FP16 or FP4GEMM_FP32", name,
                static_cast<int>(dtype));
  return FP4GEMM_SUCCESS;
}

inline fp4gemm_status_t check_scaling(fp4gemm_scaling_t scaling) {
  FP4GEMM_CHECK(scaling == FP4GEMM_SCALING_TENSOR || scaling == FP4GEMM_SCALING_ROW,
                "scaling: is %d, must be FP4GEMM_SCALING_TENSOR or FP4GEMM_SCALING_ROW",
                static_cast<int>(scaling));
  return FP4GEMM_SUCCESS;
}

/// A size from `least` to `most` that is a multiple of `multiple`.
inline fp4gemm_status_t check_size(char const* name, int64_t size, int64_t least, int multiple,
                                   int64_t most = Rules::kMaxSize) {
  FP4GEMM_CHECK(size >= least && size <= most, "%s: is %lld, must be between %lld and %lld", name, ll(size),
                ll(least), ll(most));
  FP4GEMM_CHECK(size % multiple == 0, "%s: is %lld, must be a multiple of %d", name, ll(size), multiple);
  return FP4GEMM_SUCCESS;
}

/// True if a * b * c <= limit, of numbers that are not negative; no step overflows.
constexpr bool product_is_at_most(int64_t limit, int64_t a, int64_t b, int64_t c) {
  if (a == 0 || b == 0 || c == 0) {
    return true;
  }
  return a <= limit && b <= limit / a && c <= limit / a / b;
}

/// A buffer of `elems` elements; null is allowed for no elements.
inline fp4gemm_status_t check_buffer(char const* name, void const* pointer, int64_t elems,
                                     int alignment = Rules::kPointerBytes) {
  FP4GEMM_CHECK(pointer != nullptr || elems == 0, "%s: is null, must point at %lld elements", name,
                ll(elems));
  FP4GEMM_CHECK(is_aligned(pointer, alignment), "%s: is %p, must be %d-byte aligned", name, pointer,
                alignment);
  return FP4GEMM_SUCCESS;
}

inline fp4gemm_status_t check_row_stride(char const* name, int64_t stride, int64_t columns,
                                         int element_bytes) {
  FP4GEMM_CHECK(stride >= columns, "%s: is %lld, must be at least the %lld columns", name, ll(stride),
                ll(columns));
  FP4GEMM_CHECK(stride <= Rules::kMaxElements, "%s: is %lld, must be at most %lld", name, ll(stride),
                ll(Rules::kMaxElements));
  FP4GEMM_CHECK(stride * element_bytes % Rules::kRowBytes == 0,
                "%s: is %lld elements of %d bytes, must be a multiple of %d bytes", name, ll(stride),
                element_bytes, Rules::kRowBytes);
  return FP4GEMM_SUCCESS;
}

/// A workspace of `bytes` bytes for a call that needs `needed`.
inline fp4gemm_status_t check_workspace(void const* workspace, size_t bytes, size_t needed,
                                        int alignment = Rules::kWorkspaceBytes) {
  if (bytes < needed || (workspace == nullptr && needed > 0) || !is_aligned(workspace, alignment)) {
    return fail(FP4GEMM_ERROR_WORKSPACE, "workspace: has %lld bytes at %p, must have %lld, %d-byte aligned",
                ll(static_cast<int64_t>(bytes)), workspace, ll(static_cast<int64_t>(needed)), alignment);
  }
  return FP4GEMM_SUCCESS;
}

/// The struct of arguments: not null, and of the size that this library expects.
template <class Args>
fp4gemm_status_t check_args(Args const* args) {
  FP4GEMM_CHECK(args != nullptr, "args: is null, must point at the arguments");
  FP4GEMM_CHECK(args->struct_size == sizeof(Args),
                "args: struct_size is %lld, must be %lld; initialize the struct with its _INIT macro",
                ll(static_cast<int64_t>(args->struct_size)), ll(sizeof(Args)));
  return FP4GEMM_SUCCESS;
}

}  // namespace fp4gemm
