// The epilogues for kernels without a visitor tree: a few neighbouring columns of one row of D at a time,
// with everything, the output type included, chosen at run time.
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "cutlass_evt/epilogue/swiglu.hpp"

namespace cutlass_evt::epilogue {

enum class OutputType { kBf16, kFp16, kFp32 };

/// The terms of RowCol and of SwiGlu, for the groups of rows of a grouped product or for one.
struct ColumnsArguments {
  struct Vector {
    float const* data = nullptr;  // null: absent
    bool is_vector = true;        // or one number
    int64_t group_stride = 0;     // elements
  };
  Vector alpha_row;  // indexed by the row of D, through all groups
  Vector alpha_col;
  Vector bias;
  float alpha = 1.0f;
  float const* alpha_groups = nullptr;        // in place of alpha
  Activation activation = Activation::kNone;  // gated: D has half as many columns as the product
  OutputType output = OutputType::kBf16;
  void const* c = nullptr;   // (m, n) of the output type
  int64_t c_row_stride = 0;  // elements
  float c_scale = 1.0f;
  void* d = nullptr;
  int64_t d_row_stride = 0;  // elements

  CUTLASS_HOST_DEVICE bool is_plain() const { return is_direct() && output == OutputType::kBf16; }

  /// D[i, j] is a 16-bit number that depends on the product's [i, j] and on vectors alone.
  CUTLASS_HOST_DEVICE bool is_direct() const {
    return activation == Activation::kNone && c == nullptr && output != OutputType::kFp32;
  }
};

/// The bits are those of RowCol::apply and of SwiGlu.
struct ColumnsEpilogue {
  using Arguments = ColumnsArguments;
  static constexpr int kColumns = 8;

  // Where the terms lie; null: absent.

  CUTLASS_DEVICE static float const* row_factor_at(Arguments const& args, int64_t row) {
    return args.alpha_row.data == nullptr ? nullptr
                                          : args.alpha_row.data + (args.alpha_row.is_vector ? row : 0);
  }

  CUTLASS_DEVICE static float const* by_column_at(Arguments const& args, int group, int column) {
    float const* const data = args.alpha_col.data + group * args.alpha_col.group_stride;
    return args.alpha_col.data == nullptr ? nullptr : data + (args.alpha_col.is_vector ? column : 0);
  }

  CUTLASS_DEVICE static float const* bias_at(Arguments const& args, int group, int column) {
    float const* const data = args.bias.data + group * args.bias.group_stride;
    return args.bias.data == nullptr ? nullptr : data + column;
  }

  CUTLASS_DEVICE static float alpha(Arguments const& args, int group) {
    return args.alpha_groups == nullptr ? args.alpha : __ldg(args.alpha_groups + group);
  }

  CUTLASS_DEVICE static float row_factor(Arguments const& args, int64_t row) {
    return args.alpha_row.data == nullptr ? 1.0f : __ldg(row_factor_at(args, row));
  }

  /// The multiplications of nodes::scaled.
  CUTLASS_DEVICE static float scale(float alpha, float by_column, float by_row, float z) {
    nodes::multiply_rn<float> const multiply;
    return multiply(alpha, multiply(by_column, multiply(by_row, z)));
  }

  /// For kernels that hold two columns, where is_direct().
  struct TwoColumns {
    float by_column[2];
    float bias[2];
    float alpha;

    /// The exact product z of column `which`, scaled.
    CUTLASS_DEVICE float scaled(float z, float by_row, int which) const {
      return scale(alpha, by_column[which], by_row, z);
    }

    /// pair(i) = z(2 i) and z(2 i + 1), which are scaled, to be finished: i even the first column, odd the
    /// second.
    template <int Values, class Z, class Pair>
    CUTLASS_DEVICE void finish(Arguments const& args, Z const& z, Pair const& pair) const {
      if (args.bias.data != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Values; ++i) {
          z(i) = nodes::add_rn<float>{}(z(i), bias[i / 2 % 2]);
        }
      }
      if (args.output == OutputType::kBf16) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Values / 2; ++i) {
          pair(i) = two<cutlass::bfloat16_t>(z(2 * i), z(2 * i + 1));
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Values / 2; ++i) {
          pair(i) = two<cutlass::half_t>(z(2 * i), z(2 * i + 1));
        }
      }
    }

   private:
    template <class Out>
    CUTLASS_DEVICE static uint32_t two(float low, float high) {
      cutlass::Array<float, 2> const from{low, high};
      auto const to = cutlass::NumericArrayConverter<Out, float, 2, nodes::kRoundToNearest>::convert(from);
      return reinterpret_cast<uint32_t const&>(to);
    }
  };

  class Columns {
   public:
    /// The vectors at the product's columns from `column` on.
    CUTLASS_DEVICE void load(Arguments const& args, int group, int column, int n) {
      column_ = column;
      valid_ = n - column;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        bool const present = i < valid_;
        by_column_[i] =
            present && args.alpha_col.data != nullptr ? __ldg(by_column_at(args, group, column + i)) : 1.0f;
        bias_[i] =
            present && args.bias.data != nullptr ? __ldg(bias_at(args, group, column + i)) : nodes::kNoBias;
      }
      alpha_ = alpha(args, group);
    }

    /// The same from terms that are at hand, by_column and bias those of `column`, 16-byte aligned; what is
    /// beyond n is arbitrary.
    CUTLASS_DEVICE void load(float const* by_column, float const* bias, float alpha, int column, int n) {
      column_ = column;
      valid_ = n - column;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; i += 4) {
        *reinterpret_cast<float4*>(by_column_ + i) = *reinterpret_cast<float4 const*>(by_column + i);
        *reinterpret_cast<float4*>(bias_ + i) = *reinterpret_cast<float4 const*>(bias + i);
      }
      alpha_ = alpha;
    }

    /// True if one of them is a column of the product.
    CUTLASS_DEVICE bool any() const { return valid_ > 0; }

    /// Writes these columns of D[rows[i]], where present[i], from the exact products and the rows' factors.
    template <int Rows>
    CUTLASS_DEVICE void store(Arguments const& args, int64_t const (&rows)[Rows], bool const (&present)[Rows],
                              float const (&by_row)[Rows], float (&z)[Rows][kColumns]) const {
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < Rows; ++r) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kColumns; ++i) {
          z[r][i] = scale(alpha_, by_column_[i], by_row[r], z[r][i]);
        }
      }
      if (args.bias.data != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int r = 0; r < Rows; ++r) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kColumns; ++i) {
            z[r][i] = nodes::add_rn<float>{}(z[r][i], bias_[i]);
          }
        }
      }
      if (args.is_plain()) {  // the usual call, which looks at nothing more
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
          if (is_gated(args.activation)) {
            nodes::activate_pairs<kColumns>(args.activation, z[r]);
          } else {
            nodes::activate_all<kColumns, 2>(args.activation, z[r]);
          }
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
    template <class Out>
    CUTLASS_DEVICE void write(Arguments const& args, int64_t row, float (&z)[kColumns]) const {
      constexpr int kPer16 = 16 / sizeof(Out);
      Out* const d = static_cast<Out*>(args.d) + row * args.d_row_stride;
      if (is_gated(args.activation)) {  // half as many, in eight bytes; never fp32
        if constexpr (sizeof(Out) == 2) {
          cutlass::Array<Out, kColumns / 2> out;
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kColumns / 2; ++i) {
            out[i] = round_to<Out>(z[i]);
          }
          *reinterpret_cast<uint2*>(d + column_ / 2) = reinterpret_cast<uint2 const&>(out);
        }
        return;
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; i += kPer16) {
        if (i >= valid_) {  // rows of D are whole steps of 16 bytes
          continue;
        }
        if (args.c != nullptr) {
          Out const* const from = static_cast<Out const*>(args.c) + row * args.c_row_stride + column_ + i;
          uint4 const bits =
              *reinterpret_cast<uint4 const*>(from);  // C may be D: not through the read-only path
          auto const& c = reinterpret_cast<cutlass::Array<Out, kPer16> const&>(bits);
          CUTLASS_PRAGMA_UNROLL
          for (int j = 0; j < kPer16; ++j) {
            z[i + j] = nodes::add_rn<float>{}(
                z[i + j], nodes::multiply_rn<float>{}(args.c_scale, static_cast<float>(c[j])));
          }
        }
        write_16_bytes(d + column_ + i, z + i);
      }
    }

    template <class Out>
    CUTLASS_DEVICE static void write_16_bytes(Out* to, float const* z) {
      cutlass::Array<Out, 16 / sizeof(Out)> out;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < static_cast<int>(16 / sizeof(Out)); ++i) {
        out[i] = round_to<Out>(z[i]);
      }
      *reinterpret_cast<uint4*>(to) = reinterpret_cast<uint4 const&>(out);
    }

    template <class Out>
    CUTLASS_DEVICE static Out round_to(float y) {
      return cutlass::NumericConverter<Out, float, nodes::kRoundToNearest>::convert(y);
    }

    alignas(16) float by_column_[kColumns];
    alignas(16) float bias_[kColumns];
    float alpha_;
    int column_;
    int valid_;
  };
};

}  // namespace cutlass_evt::epilogue
