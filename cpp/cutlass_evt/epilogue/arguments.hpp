// The arguments of the epilogue. They are the same for every kernel: the C interface makes them, and they
// reach the device unchanged. The header needs neither CUTLASS nor a CUDA compiler.
#pragma once

#include <cstdint>

namespace cutlass_evt {

enum class Activation : int;  // the enumerators are in activation.hpp; 0 is none

/// The element type of C and D, numbered as in fp4gemm_dtype_t.
enum class OutputType : int { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

/// An fp32 vector with an element for each row or column of the product, or one number for all of them.
struct EpilogueVector {
  float const* data = nullptr;  // null: absent
  int64_t group_stride = 0;     // elements from the vector of a group to that of the next
  bool is_vector = true;        // false: one number

  /// The address of element i of a group's vector, which must not be absent.
  constexpr float const* at(int group, int64_t i) const {
    return data + group * group_stride + (is_vector ? i : 0);
  }
};

/// The vectors along the rows of D, by their position in EpilogueArguments::per_row.
enum RowVector : int { kAlphaRow, kNumRowVectors };

/// The vectors along the columns of the product, by their position in EpilogueArguments::per_column.
enum ColumnVector : int { kAlphaCol, kBias, kNumColumnVectors };

/// Whether a vector is added; the others are factors.
constexpr bool is_addend(RowVector) { return false; }
constexpr bool is_addend(ColumnVector v) { return v == kBias; }

/// The element of a vector that is absent. -0.0 is the only x for which y + x is y for every y, +0 and -0
/// among them.
template <class V>
constexpr float absent(V v) {
  return is_addend(v) ? -0.0f : 1.0f;
}

/// What becomes of the product; finish.hpp has the formula. Everything except alpha may be absent. A dense
/// product has one group, number 0.
///
/// The rows of groups that are ragged in m are counted through all groups, and those of groups that are
/// ragged in k within the group.
struct EpilogueArguments {
  float alpha = 1.0f;
  float const* alpha_groups = nullptr;  // (num_groups), in place of alpha
  EpilogueVector per_row[kNumRowVectors];
  EpilogueVector per_column[kNumColumnVectors];
  Activation activation{};   // gated: D has half as many columns as the product
  void const* c = nullptr;   // with the type and the shape of D
  int64_t c_row_stride = 0;  // elements
  float beta = 1.0f;
  void* d = nullptr;
  int64_t d_row_stride = 0;  // elements
  OutputType output = OutputType::kBf16;

  constexpr EpilogueVector const& vector(RowVector v) const { return per_row[v]; }
  constexpr EpilogueVector const& vector(ColumnVector v) const { return per_column[v]; }

  constexpr bool has(RowVector v) const { return per_row[v].data != nullptr; }
  constexpr bool has(ColumnVector v) const { return per_column[v].data != nullptr; }

  /// Whether a vector is added to the product.
  constexpr bool has_addends() const {
    bool present = false;
    for (int v = 0; v < kNumRowVectors; ++v) {
      present = present || (is_addend(RowVector(v)) && has(RowVector(v)));
    }
    for (int v = 0; v < kNumColumnVectors; ++v) {
      present = present || (is_addend(ColumnVector(v)) && has(ColumnVector(v)));
    }
    return present;
  }

  /// Whether D is the product times factors, without bias, activation and C.
  constexpr bool has_factors_alone() const {
    return !has_addends() && activation == Activation{} && c == nullptr;
  }
};

}  // namespace cutlass_evt
