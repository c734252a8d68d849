// The epilogue of kernels that do not use CUTLASS's visitor trees. A thread finishes a few neighbouring
// columns of one row of D at a time. Everything, the output type included, is chosen at run time, so that one
// kernel serves every call.
#pragma once

#include "cutlass_evt/epilogue/finish.hpp"

namespace cutlass_evt::epilogue {

/// The epilogue's device functions, for dense products and groups that are ragged in m.
struct ColumnsEpilogue {
  using Arguments = EpilogueArguments;
  static constexpr int kColumns = 8;  // that a thread finishes at a time

  /// True if D is bf16 and there is neither an activation nor C.
  CUTLASS_HOST_DEVICE static bool is_plain(Arguments const& args) {
    return args.activation == Activation::kNone && args.c == nullptr && args.output == OutputType::kBf16;
  }

  /// True if D has 16-bit elements and there is neither an activation nor C. With
  /// takes_c_and_gated, a gated activation or C may be there.
  CUTLASS_HOST_DEVICE static bool is_direct(Arguments const& args, bool takes_c_and_gated) {
    return args.output != OutputType::kFp32 &&
           (takes_c_and_gated ? args.activation == Activation::kNone || is_gated(args.activation)
                              : args.activation == Activation::kNone && args.c == nullptr);
  }

  CUTLASS_DEVICE static float alpha(Arguments const& args, int group) { return alpha_of(args, group); }

  /// The elements of all vectors along the rows that belong to one row.
  struct RowElements {
    float of[kNumRowVectors];
  };
  CUTLASS_DEVICE static RowElements row_elements(Arguments const& args, int64_t row) {
    RowElements elements;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      elements.of[v] = element(args, RowVector(v), 0, row);
    }
    return elements;
  }

  /// For kernels whose threads hold two columns of the product. Only for calls with is_direct.
  struct TwoColumns {
    float per_column[kNumColumnVectors][2];
    float alpha;

    /// pair(i) = the elements z[2 i] and z[2 i + 1] of D as two 16-bit numbers, from elements of the product.
    /// row(v, i) is the element of a vector for z[i], and z[i] is in the first column if i / 2 is even, else
    /// in the second. With has_c, pair(i) holds the elements of C before.
    template <int Values, class Z, class Row, class Pair>
    CUTLASS_DEVICE void finish(Arguments const& args, bool has_c, Z&& z, Row const& row,
                               Pair const& pair) const {
      scale_and_add<Values>(args, alpha, z, row,
                            [&](ColumnVector v, int i) { return per_column[v][i / 2 % 2]; });
      if (args.output == OutputType::kBf16) {
        finish_as<cutlass::bfloat16_t, Values>(args, has_c, z, pair);
      } else {
        finish_as<cutlass::half_t, Values>(args, has_c, z, pair);
      }
    }

    /// packed[i] = two elements of D for the gated activation Formula as 16-bit numbers, those of z[4 i] and
    /// z[4 i + 1] and of z[4 i + 2] and z[4 i + 3]. z holds pairs of gate and up and is overwritten.
    template <class Formula, int Values>
    CUTLASS_DEVICE static void activate_and_cast(Arguments const& args, float (&z)[Values],
                                                 uint32_t (&packed)[Values / 4]) {
      nodes::activate_pairs_by<Formula, Values>(z);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values / 4; ++i) {
        packed[i] = args.output == OutputType::kBf16 ? cast_two<cutlass::bfloat16_t>(z[2 * i], z[2 * i + 1])
                                                     : cast_two<cutlass::half_t>(z[2 * i], z[2 * i + 1]);
      }
    }

   private:
    template <class Out, int Values, class Z, class Pair>
    CUTLASS_DEVICE static void finish_as(Arguments const& args, bool has_c, Z& z, Pair const& pair) {
      if (has_c) {
        add_source<Values>(args, z, [&](int i) {
          uint32_t const bits = pair(i / 2);
          return static_cast<float>(reinterpret_cast<cutlass::Array<Out, 2> const&>(bits)[i % 2]);
        });
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values / 2; ++i) {
        pair(i) = cast_two<Out>(z[2 * i], z[2 * i + 1]);
      }
    }
  };

  /// The vectors of kColumns neighbouring columns, in registers.
  class Columns {
   public:
    /// Loads the vectors for the columns from `column` on. n is the number of columns of the product.
    CUTLASS_DEVICE void load(Arguments const& args, int group, int column, int n) {
      column_ = column;
      valid_ = n - column;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kNumColumnVectors; ++v) {
          per_column_[v][i] = element(args, ColumnVector(v), group, column + i, i < valid_);
        }
      }
      alpha_ = alpha(args, group);
    }

    /// The same from copies of the vectors, which are `stride` elements apart: per_column points at the
    /// element of `column` of the first and is 16-byte aligned. Elements beyond column n - 1 may hold
    /// anything.
    CUTLASS_DEVICE void load(float const* per_column, int stride, float alpha, int column, int n) {
      column_ = column;
      valid_ = n - column;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kNumColumnVectors; ++v) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kColumns; i += 4) {
          *reinterpret_cast<float4*>(per_column_[v] + i) =
              *reinterpret_cast<float4 const*>(per_column + v * stride + i);
        }
      }
      alpha_ = alpha;
    }

    /// True if at least one of the columns exists.
    CUTLASS_DEVICE bool any() const { return valid_ > 0; }

    /// Stores these columns of the rows rows[i] of D for which present[i], from elements z[i] of the product
    /// and the elements per_row[i] of the rows. z is overwritten.
    template <int Rows>
    CUTLASS_DEVICE void store(Arguments const& args, int64_t const (&rows)[Rows], bool const (&present)[Rows],
                              RowElements const (&per_row)[Rows], float (&z)[Rows][kColumns]) const {
      scale_and_add<Rows * kColumns>(
          args, alpha_, AllRows<Rows>{z}, [&](RowVector v, int i) { return per_row[i / kColumns].of[v]; },
          [&](ColumnVector v, int i) { return per_column_[v][i % kColumns]; });
      if (is_plain(args)) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < Rows; ++r) {
          if (present[r]) {
            write_16_bytes(static_cast<cutlass::bfloat16_t*>(args.d) + rows[r] * args.d_row_stride + column_,
                           z[r]);
          }
        }
        return;
      }
      if (args.activation != Activation::kNone) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < Rows; ++r) {
          activate<kColumns>(args, z[r]);
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < Rows; ++r) {
        if (present[r]) {
          switch (args.output) {
            case OutputType::kBf16: write<cutlass::bfloat16_t>(args, rows[r], z[r]); break;
            case OutputType::kFp16: write<cutlass::half_t>(args, rows[r], z[r]); break;
            case OutputType::kFp32: write<float>(args, rows[r], z[r]); break;
          }
        }
      }
    }

   private:
    /// The columns of several rows, one row after the other.
    template <int Rows>
    struct AllRows {
      float (&z)[Rows][kColumns];
      CUTLASS_DEVICE float& operator[](int i) const { return z[i / kColumns][i % kColumns]; }
    };

    template <class Out>
    CUTLASS_DEVICE void write(Arguments const& args, int64_t row, float (&z)[kColumns]) const {
      constexpr int kPer16 = 16 / sizeof(Out);
      Out* const d = static_cast<Out*>(args.d) + row * args.d_row_stride;
      if (is_gated(args.activation)) {  // half as many columns, so 8 bytes; fp32 is refused
        if constexpr (sizeof(Out) == 2) {
          cutlass::Array<Out, kColumns / 2> out;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kColumns / 2; ++i) {
            out[i] = cast<Out>(z[i]);
          }
          *reinterpret_cast<uint2*>(d + column_ / 2) = reinterpret_cast<uint2 const&>(out);
        }
        return;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; i += kPer16) {
        if (i >= valid_) {  // n is a multiple of 16 bytes, so that a step is whole or absent
          continue;
        }
        if (args.c != nullptr) {
          Out const* const from = static_cast<Out const*>(args.c) + row * args.c_row_stride + column_ + i;
          // A plain load: C may be D, which the read-only path must not see.
          uint4 const bits = *reinterpret_cast<uint4 const*>(from);
          auto const& c = reinterpret_cast<cutlass::Array<Out, kPer16> const&>(bits);
          add_source<kPer16>(args, z + i, [&](int j) { return static_cast<float>(c[j]); });
        }
        write_16_bytes(d + column_ + i, z + i);
      }
    }

    template <class Out>
    CUTLASS_DEVICE static void write_16_bytes(Out* to, float const* z) {
      cutlass::Array<Out, 16 / sizeof(Out)> out;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < static_cast<int>(16 / sizeof(Out)); ++i) {
        out[i] = cast<Out>(z[i]);
      }
      *reinterpret_cast<uint4*>(to) = reinterpret_cast<uint4 const&>(out);
    }

    alignas(16) float per_column_[kNumColumnVectors][kColumns];
    float alpha_;
    int column_;
    int valid_;
  };
};

}  // namespace cutlass_evt::epilogue
