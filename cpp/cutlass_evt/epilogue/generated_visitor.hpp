// The epilogue whose formula is generated, for the kernels of CUTLASS: an Op of Fusion (fusion.hpp). Each
// thread reads and writes by itself what the formula has beside the terms of EpilogueArguments, C included.
#pragma once

#include "cutlass_evt/epilogue/gated.hpp"
#include "cutlass_evt/epilogue/generated.hpp"
#include "cutlass_evt/epilogue/visitor.hpp"

namespace cutlass_evt {

/// The arguments: those of a generated epilogue, the types of its matrices, and where the rows of groups are.
struct GeneratedVisitorArguments : GeneratedArguments {
  GeneratedTypes types;
  int const* offs = nullptr;  // (num_groups) the ends of groups that are ragged in m; null: a dense product
  int m = 0;                  // the rows of all groups

  /// The first row of a group among the rows of all groups, as prepare_groups has it.
  CUTLASS_DEVICE int64_t first_row(int group) const {
    if (offs == nullptr || group == 0) {
      return 0;
    }
    int const end = load_after_wait(offs + group - 1);
    return end < 0 ? 0 : end < m ? end : m;
  }
};

namespace epilogue {

/// Element i of a matrix whose type is known at run time. A plain load: the matrix may be D, which the
/// read-only path must not see.
CUTLASS_DEVICE float generated_load(OutputType type, void const* matrix, int64_t i) {
  switch (type) {
    case OutputType::kBf16: return static_cast<float>(static_cast<cutlass::bfloat16_t const*>(matrix)[i]);
    case OutputType::kFp16: return static_cast<float>(static_cast<cutlass::half_t const*>(matrix)[i]);
    default: return static_cast<float const*>(matrix)[i];
  }
}

CUTLASS_DEVICE void generated_store(OutputType type, void* matrix, int64_t i, float value) {
  switch (type) {
    case OutputType::kBf16:
      static_cast<cutlass::bfloat16_t*>(matrix)[i] = cast<cutlass::bfloat16_t>(value);
      break;
    case OutputType::kFp16: static_cast<cutlass::half_t*>(matrix)[i] = cast<cutlass::half_t>(value); break;
    default: static_cast<float*>(matrix)[i] = value;
  }
}

/// Out is the element type of C and D, or SixteenBits. Name is a type that tells the kernels of one formula
/// from those of another, whose types would be the same. For dense products and groups that are ragged in m.
template <class Out, class Name>
struct Generated {
  static constexpr char const* kName = "generated";
  static constexpr bool kSwapped = false;
  static constexpr bool kGated = generated::kPairs && generated::kResults == 1;
  using ElementOutput = cute::conditional_t<kGated, HalfOf<Out>, StoredAs<Out>>;
  using Result = Out;
  using Arguments = GeneratedVisitorArguments;

  template <int N, class Z, class Row, class Column, class Source>
  CUTLASS_DEVICE static void finish(Arguments const& args, float alpha, Z& z, Row const& row,
                                    Column const& column, Source const& source) {
    constexpr int kStep = generated::kPairs ? 2 : 1;
    // N is 1 for groups that are ragged in k alone, which these kernels are not launched for.
    static_assert(N == 1 || N % kStep == 0, "a thread must hold whole pairs of columns");
    op::Division</*kEvery=*/true> divide;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i + kStep <= N; i += kStep) {
      Place const place = source.place(i);
      if (!place.exists) {
        continue;
      }
      int64_t const row_of_d = args.first_row(place.group) + place.row;
      int64_t const column_of_d = generated_columns(place.column);
      Terms terms = terms_of(args, alpha, place, row_of_d);
      auto const set = [&](Terms& of, int at, int column_of_c) {
        of.row = row(kAlphaRow, at);
        of.col = column(kAlphaCol, at);
        of.bias = column(kBias, at);
        if constexpr (generated::kTakesC) {
          of.c = generated_load(args.output, args.c, row_of_d * args.c_row_stride + column_of_c);
        }
      };
      set(terms, i, column_of_d);
      Results const results = [&] {
        if constexpr (generated::kPairs) {
          Terms other = terms;
          set(other, i + 1, generated_columns(place.column + 1));
          return epilogue::apply(z[i], z[i + 1], terms, other, divide);
        } else {
          return epilogue::apply(z[i], terms, divide);
        }
      }();
      CUTLASS_PRAGMA_UNROLL
      for (int r = 0; r < generated::kResults; ++r) {
        z[(kGated ? i / 2 : i) + r] = results.d[r];
        generated_for<generated::kNumAux>([&](auto v) {
          GeneratedMatrix const& aux = args.inputs.aux[v];
          generated_store(args.types.aux[v], aux.data, row_of_d * aux.row_stride + column_of_d + r,
                          results.aux[v][r]);
        });
      }
    }
  }

 private:
  /// The terms of an element or a pair that do not differ between the columns of the pair.
  CUTLASS_DEVICE static Terms terms_of(Arguments const& args, float alpha, Place const& place,
                                       int64_t row_of_d) {
    GeneratedInputs const& inputs = args.inputs;
    int64_t const column = generated_input_columns(place.column);
    Terms terms = generated_terms(inputs, alpha, place.group);
    generated_for<generated::kRowInputs>(
        [&](auto v) { terms.rows[v] = load_after_wait(inputs.rows[v].at(0, row_of_d)); });
    generated_for<generated::kColumnInputs>(
        [&](auto v) { terms.columns[v] = load_after_wait(inputs.columns[v].at(place.group, column)); });
    generated_for<generated::kMatrixInputs>([&](auto v) {
      GeneratedMatrix const& matrix = inputs.matrices[v];
      terms.matrices[v] =
          generated_load(args.types.matrices[v], matrix.data, row_of_d * matrix.row_stride + column);
    });
    return terms;
  }
};

}  // namespace epilogue
}  // namespace cutlass_evt
