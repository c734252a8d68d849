// The epilogue of kernels that do not use CUTLASS's visitor trees. A thread finishes a few neighbouring
// columns of one row of D at a time. Everything, the output type included, is chosen at run time, so that one
// kernel serves every call.
#pragma once

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "cutlass_evt/epilogue/gated.hpp"
#include "cutlass_evt/epilogue/rowcol.hpp"
#include "cutlass_evt/load_after_wait.hpp"

namespace cutlass_evt::epilogue {

enum class OutputType { kBf16, kFp16, kFp32 };

/// The arguments of RowCol and of Gated, for a grouped product or for a dense one, which has one group.
struct ColumnsArguments {
  struct Vector {
    float const* data = nullptr;  // null: absent
    bool is_vector = true;        // false: one number
    int64_t group_stride = 0;     // elements
  };
  Vector alpha_row;  // indexed by the row of D, counted through all groups
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

  /// True for the usual call: bf16, no activation, no C.
  CUTLASS_HOST_DEVICE bool is_plain() const {
    return activation == Activation::kNone && c == nullptr && output == OutputType::kBf16;
  }

  /// True if D has 16-bit elements and there is neither an activation nor C. With takes_more, a gated
  /// activation or C may be there.
  CUTLASS_HOST_DEVICE bool is_direct(bool takes_more) const {
    return output != OutputType::kFp32 &&
           (takes_more ? activation == Activation::kNone || is_gated(activation)
                       : activation == Activation::kNone && c == nullptr);
  }
};

/// The epilogue's device functions. The bits are those of RowCol::apply and of Gated.
struct ColumnsEpilogue {
  using Arguments = ColumnsArguments;
  static constexpr int kColumns = 8;  // that a thread finishes at a time

  // The addresses of the elements of vectors; null: absent. A column is counted in the product.

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
    return args.alpha_groups == nullptr ? args.alpha : load_after_wait(args.alpha_groups + group);
  }

  CUTLASS_DEVICE static float row_factor(Arguments const& args, int64_t row) {
    return args.alpha_row.data == nullptr ? 1.0f : load_after_wait(row_factor_at(args, row));
  }

  /// The multiplications of nodes::scaled.
  CUTLASS_DEVICE static float scale(float alpha, float by_column, float by_row, float z) {
    nodes::multiply_rn<float> const multiply;
    return multiply(alpha, multiply(by_column, multiply(by_row, z)));
  }

  /// For kernels whose threads hold two columns of the product. Only for calls with is_direct.
  struct TwoColumns {
    float by_column[2];
    float bias[2];
    float alpha;

    /// The element z of the product in column `which`, multiplied by all factors.
    CUTLASS_DEVICE float scaled(float z, float by_row, int which) const {
      return scale(alpha, by_column[which], by_row, z);
    }

    /// pair(i) = the elements z(2 i) and z(2 i + 1) of D as two 16-bit numbers, from elements that have been
    /// scaled. An even i is in the first column, an odd one in the second. With has_c, pair(i) holds the
    /// elements of C before.
    template <int Values, class Z, class Pair>
    CUTLASS_DEVICE void finish(Arguments const& args, bool has_c, Z const& z, Pair const& pair) const {
      if (args.bias.data != nullptr) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Values; ++i) {
          z(i) = nodes::add_rn<float>{}(z(i), bias[i / 2 % 2]);
        }
      }
      if (args.output == OutputType::kBf16) {
        finish_as<cutlass::bfloat16_t, Values>(args, has_c, z, pair);
      } else {
        finish_as<cutlass::half_t, Values>(args, has_c, z, pair);
      }
    }

    /// The element z of the product in column `which`, multiplied by all factors, plus the bias.
    CUTLASS_DEVICE float with_bias(float z, float by_row, int which) const {
      return nodes::add_rn<float>{}(scaled(z, by_row, which), bias[which]);
    }

    /// packed[i] = two elements of D for the gated activation Formula as 16-bit numbers, those of z[4 i] and
    /// z[4 i + 1] and of z[4 i + 2] and z[4 i + 3]. z holds pairs of gate and up and is overwritten.
    template <class Formula, int Values>
    CUTLASS_DEVICE static void finish_pairs(Arguments const& args, float (&z)[Values],
                                            uint32_t (&packed)[Values / 4]) {
      // All pairs at once, so that their latencies overlap.
      float gate[Values / 2];
      float inner[Values / 2];
      float factor[Values / 2];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values / 2; ++i) {
        gate[i] = Formula::gate(z[2 * i]);
        inner[i] = Formula::inner(gate[i]);
        factor[i] = Formula::factor(z[2 * i + 1]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values / 2; ++i) {
        z[i] = nodes::multiply_rn<float>{}(nodes::times_logistic(gate[i], inner[i]), factor[i]);
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values / 4; ++i) {
        packed[i] = args.output == OutputType::kBf16 ? two<cutlass::bfloat16_t>(z[2 * i], z[2 * i + 1])
                                                     : two<cutlass::half_t>(z[2 * i], z[2 * i + 1]);
      }
    }

   private:
    template <class Out, int Values, class Z, class Pair>
    CUTLASS_DEVICE static void finish_as(Arguments const& args, bool has_c, Z const& z, Pair const& pair) {
      if (has_c) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < Values; ++i) {
          uint32_t const bits = pair(i / 2);
          Out const c = reinterpret_cast<cutlass::Array<Out, 2> const&>(bits)[i % 2];
          z(i) =
              nodes::add_rn<float>{}(z(i), nodes::multiply_rn<float>{}(args.c_scale, static_cast<float>(c)));
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Values / 2; ++i) {
        pair(i) = two<Out>(z(2 * i), z(2 * i + 1));
      }
    }

    template <class Out>
    CUTLASS_DEVICE static uint32_t two(float low, float high) {
      cutlass::Array<float, 2> const from{low, high};
      auto const to = cutlass::NumericArrayConverter<Out, float, 2, nodes::kRoundToNearest>::convert(from);
      return reinterpret_cast<uint32_t const&>(to);
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
        bool const present = i < valid_;
        by_column_[i] = present && args.alpha_col.data != nullptr
                            ? load_after_wait(by_column_at(args, group, column + i))
                            : 1.0f;
        bias_[i] = present && args.bias.data != nullptr ? load_after_wait(bias_at(args, group, column + i))
                                                        : nodes::kNoBias;
      }
      alpha_ = alpha(args, group);
    }

    /// The same from copies of the vectors: by_column and bias point at the elements of `column` and are
    /// 16-byte aligned. Elements beyond column n - 1 may hold anything.
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

    /// True if at least one of the columns exists.
    CUTLASS_DEVICE bool any() const { return valid_ > 0; }

    /// Stores these columns of the rows rows[i] of D for which present[i], from elements z[i] of the product
    /// and the factors by_row[i] of the rows. z is overwritten.
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
      if (args.is_plain()) {
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
            nodes::activate_all<kColumns>(args.activation, z[r]);
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
      if (is_gated(args.activation)) {  // half as many columns, so 8 bytes; fp32 is refused
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
        if (i >= valid_) {  // n is a multiple of 16 bytes, so that a step is whole or absent
          continue;
        }
        if (args.c != nullptr) {
          Out const* const from = static_cast<Out const*>(args.c) + row * args.c_row_stride + column_ + i;
          // A plain load: C may be D, which the read-only path must not see.
          uint4 const bits = *reinterpret_cast<uint4 const*>(from);
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
