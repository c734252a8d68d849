// The epilogue whose formula is generated: what its two forms share, and the form of the kernel on prepacked
// weights. It is compiled at run time. The text "fp4gemm_generated.hpp" defines in cutlass_evt::generated the
// formula of one element, or of a pair of neighbouring columns 2 j and 2 j + 1:
//   kPairs, kResults     whether the formula takes a pair, and the values of D that it returns: 1, or for a
//                        pair 1 (D has half the columns of the product) or 2
//   kNumAux              further outputs, with as many values each
//   kRowInputs, kColumnInputs, kGroupInputs, kMatrixInputs, kScalars   inputs beside those of every epilogue
//   kTakesC, kTakesBias  whether the formula reads C and the bias
//   Terms                what belongs to one element of the product: alpha, row, col, bias, c, and the arrays
//                        rows, columns, groups, matrices and scalars. C has the columns of D. Vectors by
//                        column and matrices have one element for a pair, whatever the number of results:
//                        both elements of the pair get it
//   Results              d[kResults] and aux[kNumAux][kResults]
//   kDivides             whether apply calls divide
//   kOperations          about as many instructions as apply has
//   apply                Results of (acc, terms, divide), or of (acc0, acc1, terms0, terms1, divide), where
//                        divide is an op::Division
#pragma once

#include "cute/numeric/integral_constant.hpp"
#include "cutlass_evt/epilogue/finish.hpp"
#include "cutlass_evt/epilogue/generated_arguments.hpp"
#include "cutlass_evt/epilogue/operations.hpp"
#include "fp4gemm_generated.hpp"

namespace cutlass_evt::epilogue {

using generated::Results;
using generated::Terms;

/// The formula; as a template, so that the branch for the other number of arguments is not compiled.
template <class... Arguments>
CUTLASS_DEVICE Results apply(Arguments&&... arguments) {
  return generated::apply(arguments...);
}

/// Calls evaluate(divide), which applies the formula to all elements that a thread has at a time, and a
/// second time if a division needs it: one branch for all of them. With kWarp the lanes of a warp call it
/// together, and all evaluate again if one must.
template <bool kWarp, class Evaluate>
CUTLASS_DEVICE void generated_evaluate(Evaluate const& evaluate) {
  op::Division<false> fast;
  evaluate(fast);
  if constexpr (generated::kDivides) {
    if (kWarp ? __any_sync(0xFFFFFFFFu, fast.is_rare()) : fast.is_rare()) {
      op::Division<true> every;
      evaluate(every);
    }
  }
}

/// Columns of D, of C and of matrices for `columns` of the product.
constexpr int generated_columns(int columns) {
  return generated::kPairs && generated::kResults == 1 ? columns / 2 : columns;
}

/// Columns of the vectors by column and of the matrices of a formula.
constexpr int generated_input_columns(int columns) { return generated::kPairs ? columns / 2 : columns; }

constexpr bool is_16_bit(OutputType type) { return type != OutputType::kFp32; }

/// An element of a matrix from its bits: of a 16-bit type the low half of them.
template <OutputType kType>
CUTLASS_DEVICE float generated_element(uint32_t bits) {
  if constexpr (kType == OutputType::kFp32) {
    return __uint_as_float(bits);
  } else if constexpr (kType == OutputType::kBf16) {
    return static_cast<float>(cutlass::bfloat16_t::bitcast(static_cast<uint16_t>(bits)));
  } else {
    return static_cast<float>(cutlass::half_t::bitcast(static_cast<uint16_t>(bits)));
  }
}

/// Two elements as 16-bit numbers, the first of them in the low half.
template <OutputType kType>
CUTLASS_DEVICE uint32_t generated_pair(float first, float second) {
  if constexpr (kType == OutputType::kBf16) {
    return cast_two<cutlass::bfloat16_t>(first, second);
  } else {
    return cast_two<cutlass::half_t>(first, second);
  }
}

/// Calls f(0), f(1), .. f(Count - 1) with numbers that are known at compile time.
template <int Count, int First = 0, class F>
CUTLASS_DEVICE void generated_for(F const& f) {
  if constexpr (First < Count) {
    f(cute::Int<First>{});
    generated_for<Count, First + 1>(f);
  }
}

/// The terms that are the same for a whole tile.
CUTLASS_DEVICE Terms generated_terms(GeneratedInputs const& inputs, float alpha, int group) {
  Terms terms;
  terms.alpha = alpha;
  generated_for<generated::kGroupInputs>(
      [&](auto i) { terms.groups[i] = load_after_wait(inputs.groups[i] + group); });
  generated_for<generated::kScalars>([&](auto i) { terms.scalars[i] = inputs.scalars[i]; });
  return terms;
}

/// The epilogue of the kernel on prepacked weights, with the interface of ColumnsEpilogue (columns.hpp). A
/// thread finishes eight neighbouring columns of a row, which are pairs too, and all of which exist: n is a
/// multiple of 8, and for a D of n / 2 columns of 16. kTypes is a GeneratedTypes.
template <class Types>
struct GeneratedColumnsEpilogue {
  using Arguments = GeneratedArguments;
  static constexpr GeneratedTypes kTypes = Types::kTypes;
  static constexpr int kColumns = 8;
  static constexpr int kColumnsOfD = generated_columns(kColumns);
  static constexpr int kInputColumns = generated_input_columns(kColumns);
  static constexpr int kRowElements = generated::kRowInputs > 0 ? generated::kRowInputs : 1;

  CUTLASS_DEVICE static float alpha(Arguments const& args, int group) { return alpha_of(args, group); }

  /// The elements of all vectors along the rows that belong to one row.
  struct RowElements {
    float of[kNumRowVectors];
    float inputs[kRowElements];
  };
  CUTLASS_DEVICE static RowElements row_elements(Arguments const& args, int64_t row) {
    RowElements elements;
    CUTLASS_PRAGMA_UNROLL
    for (int v = 0; v < kNumRowVectors; ++v) {
      elements.of[v] = element(args, RowVector(v), 0, row);
    }
    generated_for<generated::kRowInputs>(
        [&](auto v) { elements.inputs[v] = load_after_wait(args.inputs.rows[v].at(0, row)); });
    return elements;
  }

  /// The vectors of kColumns neighbouring columns, in registers.
  class Columns {
   public:
    /// What a thread has beside the vectors that ColumnsEpilogue::Columns loads: with loads_inputs the inputs
    /// by column, which load_inputs reads from shared memory otherwise.
    template <bool loads_inputs>
    CUTLASS_DEVICE void begin(Arguments const& args, int group, int column, int n) {
      column_ = column;
      any_ = column < n;
      common_ = generated_terms(args.inputs, 1.0f, group);
      if constexpr (loads_inputs) {
        generated_for<generated::kColumnInputs>([&](auto v) {
          EpilogueVector const& vector = args.inputs.columns[v];
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < kInputColumns; ++i) {
            int const from = generated_input_columns(column) + i;
            of_columns_[v][i] = any_ ? load_after_wait(vector.at(group, from)) : 0.0f;
          }
        });
      }
    }
    CUTLASS_DEVICE void load_inputs(float const* from, int stride) {
      generated_for<generated::kColumnInputs>([&](auto v) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kInputColumns; i += 4) {
          *reinterpret_cast<float4*>(of_columns_[v] + i) =
              *reinterpret_cast<float4 const*>(from + v * stride + i);
        }
      });
    }
    /// As those of ColumnsEpilogue::Columns.
    CUTLASS_DEVICE void load(Arguments const& args, int group, int column, int n) {
      begin<true>(args, group, column, n);
      common_.alpha = alpha(args, group);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kColumns; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kNumColumnVectors; ++v) {
          per_column_[v][i] = element(args, ColumnVector(v), group, column + i, any_);
        }
      }
    }
    CUTLASS_DEVICE void load(float const* per_column, int stride, float alpha, int, int) {
      common_.alpha = alpha;
      CUTLASS_PRAGMA_UNROLL
      for (int v = 0; v < kNumColumnVectors; ++v) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kColumns; i += 4) {
          *reinterpret_cast<float4*>(per_column_[v] + i) =
              *reinterpret_cast<float4 const*>(per_column + v * stride + i);
        }
      }
    }

    CUTLASS_DEVICE bool any() const { return any_; }

    /// Stores these columns of the rows rows[i] of D for which present[i], from elements z[i] of the product
    /// and the elements per_row[i] of the rows.
    template <int Rows>
    CUTLASS_DEVICE void store(Arguments const& args, int64_t const (&rows)[Rows], bool const (&present)[Rows],
                              RowElements const (&per_row)[Rows], float (&z)[Rows][kColumns]) const {
      GeneratedInputs const& inputs = args.inputs;
      int const column_of_d = generated_columns(column_);
      // All loads come before the first use of one, so that their latencies overlap.
      Words<kColumnsOfD> c[Rows];
      Words<kInputColumns> matrices[Rows][kAtLeast1(generated::kMatrixInputs)];
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < Rows; ++r) {
        if (present[r]) {
          if constexpr (generated::kTakesC) {
            read<kTypes.output>(c[r], args.c, rows[r] * args.c_row_stride + column_of_d);
          }
          generated_for<generated::kMatrixInputs>([&](auto i) {
            GeneratedMatrix const& matrix = inputs.matrices[i];
            int64_t const element = rows[r] * matrix.row_stride + generated_input_columns(column_);
            read<kTypes.matrices[i]>(matrices[r][i], matrix.data, element);
          });
        }
      }
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < Rows; ++r) {
        if (!present[r]) {
          continue;
        }
        auto const terms_of = [&](int i) {
          Terms terms = common_;
          terms.row = per_row[r].of[kAlphaRow];
          terms.col = per_column_[kAlphaCol][i];
          terms.bias = per_column_[kBias][i];
          int const of_d = generated_columns(2) == 1 ? i / 2 : i;
          int const input = generated::kPairs ? i / 2 : i;
          if constexpr (generated::kTakesC) {
            terms.c = get<kTypes.output>(c[r], of_d);
          }
          generated_for<generated::kRowInputs>([&](auto v) { terms.rows[v] = per_row[r].inputs[v]; });
          generated_for<generated::kColumnInputs>([&](auto v) { terms.columns[v] = of_columns_[v][input]; });
          generated_for<generated::kMatrixInputs>(
              [&](auto v) { terms.matrices[v] = get<kTypes.matrices[v]>(matrices[r][v], input); });
          return terms;
        };
        float d[kColumnsOfD];
        float aux[kAtLeast1(generated::kNumAux)][kColumnsOfD];
        auto const put = [&](int at, Results const& results) {
          CUTLASS_PRAGMA_UNROLL
          for (int i = 0; i < generated::kResults; ++i) {
            d[at + i] = results.d[i];
            generated_for<generated::kNumAux>([&](auto v) { aux[v][at + i] = results.aux[v][i]; });
          }
        };
        generated_evaluate</*kWarp=*/false>([&](auto& divide) {
          if constexpr (generated::kPairs) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kColumns; i += 2) {
              put(generated::kResults == 1 ? i / 2 : i,
                  epilogue::apply(z[r][i], z[r][i + 1], terms_of(i), terms_of(i + 1), divide));
            }
          } else {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < kColumns; ++i) {
              put(i, epilogue::apply(z[r][i], terms_of(i), divide));
            }
          }
        });
        write<kTypes.output>(args.d, rows[r] * args.d_row_stride + column_of_d, d);
        generated_for<generated::kNumAux>([&](auto v) {
          GeneratedMatrix const& matrix = inputs.aux[v];
          write<kTypes.aux[v]>(matrix.data, rows[r] * matrix.row_stride + column_of_d, aux[v]);
        });
      }
    }

   private:
    static constexpr int kAtLeast1(int count) { return count > 0 ? count : 1; }

    /// Count neighbouring elements of a matrix, as words of memory: two 16-bit elements in a word, or one of
    /// 32 bits.
    template <int Count>
    struct Words {
      alignas(16) uint32_t at[Count];
    };
    template <OutputType kType, int Count>
    static constexpr int kWords = Count / (is_16_bit(kType) ? 2 : 1);  // 2, 4 or 8

    template <int Words>
    CUTLASS_DEVICE static void copy(char* to, char const* from) {
      using Piece = cute::conditional_t<Words == 2, uint2, uint4>;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < Words * 4; i += static_cast<int>(sizeof(Piece))) {
        *reinterpret_cast<Piece*>(to + i) = *reinterpret_cast<Piece const*>(from + i);
      }
    }

    template <OutputType kType, int Count>
    CUTLASS_DEVICE static void read(Words<Count>& words, void const* matrix, int64_t element) {
      // A plain load: a matrix may be D, which the read-only path must not see.
      copy<kWords<kType, Count>>(reinterpret_cast<char*>(words.at),
                                 static_cast<char const*>(matrix) + element * (is_16_bit(kType) ? 2 : 4));
    }

    template <OutputType kType, int Count>
    CUTLASS_DEVICE static float get(Words<Count> const& words, int i) {
      return is_16_bit(kType) ? generated_element<kType>(words.at[i / 2] >> (i % 2 * 16))
                              : generated_element<kType>(words.at[i]);
    }

    template <OutputType kType>
    CUTLASS_DEVICE static void write(void* matrix, int64_t element, float const (&z)[kColumnsOfD]) {
      Words<kColumnsOfD> words;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kWords<kType, kColumnsOfD>; ++i) {
        if constexpr (is_16_bit(kType)) {
          words.at[i] = generated_pair<kType>(z[2 * i], z[2 * i + 1]);
        } else {
          words.at[i] = __float_as_uint(z[i]);
        }
      }
      copy<kWords<kType, kColumnsOfD>>(static_cast<char*>(matrix) + element * (is_16_bit(kType) ? 2 : 4),
                                       reinterpret_cast<char const*>(words.at));
    }

    alignas(16) float per_column_[kNumColumnVectors][kColumns];
    alignas(16) float of_columns_[kAtLeast1(generated::kColumnInputs)][kInputColumns];
    Terms common_;
    int column_;
    bool any_;
  };
};

}  // namespace cutlass_evt::epilogue
