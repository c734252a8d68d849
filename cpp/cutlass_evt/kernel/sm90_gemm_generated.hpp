// The epilogue of SM90's GEMM of two operands that the tensor cores read as they are, for a generated
// formula.
#pragma once

#include "cutlass_evt/epilogue/generated.hpp"
#include "cutlass_evt/kernel/sm90_gemm_epilogue.hpp"
#include "cutlass_evt/kernel/sm90_gemm_generated_params.hpp"

namespace cutlass_evt {

/// As Sm90GemmEpilogue, whose ring of slots stores D and the further outputs one after the other. Outputs
/// whose elements have 2 bytes are finished in one pass over the sums and those of 4 bytes in another one,
/// since a slice has a different number of columns. Types::kTypes is a GeneratedTypes.
template <class Config, class Types>
class Sm90GemmGeneratedEpilogue : public Sm90GemmEpilogue<Config> {
  using Base = Sm90GemmEpilogue<Config>;

 public:
  using Shared = typename Config::Shared;
  using Params = Sm90GemmGeneratedParams;
  using WorkItem = typename Config::WorkItem;

  CUTLASS_DEVICE Sm90GemmGeneratedEpilogue(Params const& p, Shared& shared) : Base(p, shared), params_(p) {}

  /// Stores this warp's rows of a tile, as that of Sm90GemmEpilogue.
  template <class Accumulators>
  CUTLASS_DEVICE void store(WorkItem const& item, Accumulators const& accumulators) {
    int const row = item.tile.row + this->first_row();
    int const present = item.tile.end - row;
    if (present <= 0) {
      return;
    }
    typename Base::Place const place{item.tile.plane, row, item.tile.column, present};
    OfTile const of_tile(*this, item, place);
    if constexpr (has_outputs(2)) {
      pass<2>(of_tile, place, accumulators);
    }
    if constexpr (has_outputs(4)) {
      pass<4>(of_tile, place, accumulators);
    }
  }

 private:
  static constexpr GeneratedTypes kTypes = Types::kTypes;
  static constexpr int kOutputs = 1 + generated::kNumAux;                         // D, then the others
  static constexpr bool kHalves = generated::kPairs && generated::kResults == 1;  // D has n / 2 columns
  static constexpr int kAtLeast1(int count) { return count > 0 ? count : 1; }

  static constexpr int bytes_of(OutputType type) { return type == OutputType::kFp32 ? 4 : 2; }
  static constexpr OutputType type_of(int output) {
    return output == 0 ? kTypes.output : kTypes.aux[output - 1];
  }
  static constexpr bool has_outputs(int bytes) {
    for (int i = 0; i < kOutputs; ++i) {
      if (bytes_of(type_of(i)) == bytes) {
        return true;
      }
    }
    return false;
  }

  /// What the sums of a thread in one tile share: the terms of a group, and those of its two rows.
  struct OfTile {
    CUTLASS_DEVICE OfTile(Sm90GemmGeneratedEpilogue const& epilogue, WorkItem const& item,
                          typename Base::Place const& place)
        : item(item), group(item.tile.group) {
      GeneratedInputs const& inputs = epilogue.params_.inputs;
      common = epilogue::generated_terms(inputs, item.alpha, group);
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        int const row = epilogue.lane_ / 4 + half * 8;
        alpha_row[half] = item.per_row[kAlphaRow][epilogue.first_row() + row];
        epilogue::generated_for<generated::kRowInputs>([&](auto v) {
          float const* const from = inputs.rows[v].at(group, place.row + row);
          rows[half][v] = row < place.present ? load_after_wait(from) : 0.0f;
        });
      }
    }

    WorkItem const& item;
    int group;
    epilogue::Terms common;
    float alpha_row[2];
    float rows[2][kAtLeast1(generated::kRowInputs)];
  };

  /// A further output, as ToD of Sm90GemmEpilogue.
  template <int I>
  struct ToAux {
    Params const& params;
    CUTLASS_DEVICE CUtensorMap const* map() const { return &params.aux[I]; }
    CUTLASS_DEVICE void* data() const { return params.inputs.aux[I].data; }
    CUTLASS_DEVICE int64_t row_stride() const { return params.inputs.aux[I].row_stride; }
  };

  /// Finishes and stores all outputs whose elements have kBytes.
  template <int kBytes, class Accumulators>
  CUTLASS_DEVICE void pass(OfTile const& of_tile, typename Base::Place const& place,
                           Accumulators const& accumulators) {
    constexpr int kColumnsOfD = Config::kSliceRowBytes / kBytes;  // of a slice
    constexpr int kColumns = kHalves ? 2 * kColumnsOfD : kColumnsOfD;
    static_assert(Config::kColumns % kColumns == 0, "a tile has whole slices");
    constexpr int kSums = kColumns / 2;
    constexpr int kResults = kColumnsOfD / 2;
    CUTLASS_PRAGMA_UNROLL
    for (int slice = 0; slice < Config::kColumns / kColumns; ++slice) {
      float results[kOutputs][kResults];
      finish<kSums>(of_tile, place, slice * kColumns, accumulators, results);
      int const column = epilogue::generated_columns(place.column) + slice * kColumnsOfD;
      epilogue::generated_for<kOutputs>([&](auto output) {
        if constexpr (bytes_of(type_of(output)) == kBytes) {
          put<type_of(output)>(this->acquire(), results[output]);
          if constexpr (output == 0) {
            this->template issue<kBytes>(place, column);
          } else {
            this->template issue<kBytes>(ToAux<output - 1>{params_}, place, column);
          }
        }
      });
    }
  }

  /// results[o] = output o for this thread's sums from column `first` of the tile on. Those of a D of n
  /// columns lie as the sums do; those of a D of n / 2 columns are of rows r and r + 8 of one block of 8
  /// columns of the product, then of the next.
  template <int kSums, class Accumulators, int kResults>
  CUTLASS_DEVICE void finish(OfTile const& of_tile, typename Base::Place const& place, int first,
                             Accumulators const& accumulators, float (&results)[kOutputs][kResults]) const {
    GeneratedInputs const& inputs = params_.inputs;
    float z[kSums];
    this->take(first, accumulators, z);
    float c[kAtLeast1(generated::kTakesC ? kResults : 0)];
    if constexpr (generated::kTakesC) {
      load<kTypes.output, kHalves>(this->args_.c, this->args_.c_row_stride, place, first, c);
    }
    constexpr int kPerPair = generated::kPairs ? 1 : 2;  // elements of inputs for two columns
    float matrices[kAtLeast1(generated::kMatrixInputs)][kSums / 2 * kPerPair];
    epilogue::generated_for<generated::kMatrixInputs>([&](auto v) {
      load<kTypes.matrices[v], generated::kPairs>(inputs.matrices[v].data, inputs.matrices[v].row_stride,
                                                  place, first, matrices[v]);
    });
    float columns[kAtLeast1(generated::kColumnInputs)][kSums / 4 * kPerPair];  // of each block of 8
    epilogue::generated_for<generated::kColumnInputs>([&](auto v) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSums / 4 * kPerPair; ++i) {
        int const column = place.column + column_of(first, i / kPerPair) + i % kPerPair;
        int64_t const at = epilogue::generated_input_columns(column);
        bool const exists = column < this->p_.n;
        columns[v][i] = exists ? load_after_wait(inputs.columns[v].at(of_tile.group, at)) : 0.0f;
      }
    });
    auto const terms_of = [&](int i) {  // of z[i]
      int const half = i / 2 % 2;
      int const block = i / 4;
      int const of_pair = generated::kPairs ? 0 : i % 2;
      epilogue::Terms terms = of_tile.common;
      terms.row = of_tile.alpha_row[half];
      terms.col = of_tile.item.per_column[kAlphaCol][column_of(first, block) + i % 2];
      terms.bias = of_tile.item.per_column[kBias][column_of(first, block) + i % 2];
      if constexpr (generated::kTakesC) {
        terms.c = c[kHalves ? i / 2 : i];
      }
      epilogue::generated_for<generated::kRowInputs>([&](auto v) { terms.rows[v] = of_tile.rows[half][v]; });
      epilogue::generated_for<generated::kColumnInputs>(
          [&](auto v) { terms.columns[v] = columns[v][block * kPerPair + of_pair]; });
      epilogue::generated_for<generated::kMatrixInputs>(
          [&](auto v) { terms.matrices[v] = matrices[v][i / 2 * kPerPair + of_pair]; });
      return terms;
    };
    auto const keep = [&](int at, epilogue::Results const& of) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < generated::kResults; ++i) {
        results[0][at + i] = of.d[i];
        epilogue::generated_for<generated::kNumAux>([&](auto v) { results[1 + v][at + i] = of.aux[v][i]; });
      }
    };
    epilogue::generated_evaluate</*kWarp=*/false>([&](auto& divide) {
      if constexpr (generated::kPairs) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSums; i += 2) {
          keep(kHalves ? i / 2 : i, epilogue::apply(z[i], z[i + 1], terms_of(i), terms_of(i + 1), divide));
        }
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kSums; ++i) {
          keep(i, epilogue::apply(z[i], terms_of(i), divide));
        }
      }
    });
  }

  /// This thread's first column of a block of 8 of the product, counted from that of the tile.
  CUTLASS_DEVICE int column_of(int first, int block) const { return first + block * 8 + this->lane_ % 4 * 2; }

  /// to[i] = the elements of C or of a matrix that belong to the sums of a thread, or with kOfPairs to the
  /// pairs of two sums, 0 where there are none.
  template <OutputType kType, bool kOfPairs, int kElements>
  CUTLASS_DEVICE void load(void const* matrix, int64_t row_stride, typename Base::Place const& place,
                           int first, float (&to)[kElements]) const {
    constexpr int kBytes = bytes_of(kType);
    constexpr int kAtATime = kOfPairs ? 1 : 2;  // neighbouring columns of a row
    int64_t const first_row = int64_t{place.plane} * this->p_.m + place.row;
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kElements; i += kAtATime) {
      int const row = i / kAtATime % 2 * 8 + this->lane_ / 4;
      int const block = i / kAtATime / 2;
      int const of_product = place.column + column_of(first, block);
      int const column = kOfPairs ? of_product / 2 : of_product;
      bool const exists = row < place.present && of_product < this->p_.n;
      char const* const from =
          static_cast<char const*>(matrix) + ((first_row + row) * row_stride + column) * kBytes;
      // Plain loads: a matrix may be D, which the read-only path must not see.
      if constexpr (kOfPairs && kBytes == 2) {
        to[i] = epilogue::generated_element<kType>(exists ? *reinterpret_cast<uint16_t const*>(from) : 0);
      } else if constexpr (kOfPairs) {
        to[i] = exists ? *reinterpret_cast<float const*>(from) : 0.0f;
      } else if constexpr (kBytes == 2) {
        uint32_t const bits = exists ? *reinterpret_cast<uint32_t const*>(from) : 0;
        to[i] = epilogue::generated_element<kType>(bits);
        to[i + 1] = epilogue::generated_element<kType>(bits >> 16);
      } else {
        float2 const pair = exists ? *reinterpret_cast<float2 const*>(from) : float2{0.0f, 0.0f};
        to[i] = pair.x;
        to[i + 1] = pair.y;
      }
    }
  }

  /// Writes the results of a slice to a slot.
  template <OutputType kType, int kResults>
  CUTLASS_DEVICE void put(char* slot, float const (&results)[kResults]) const {
    if constexpr (kHalves && kType == OutputType::kFp32) {
      uint32_t const lane = static_cast<uint32_t>(this->lane_);
      CUTLASS_PRAGMA_UNROLL
      for (uint32_t i = 0; i < kResults; ++i) {  // a block of the product is a piece of four columns
        uint32_t const to =
            cute::cast_smem_ptr_to_uint(slot) + Base::offset(i % 2 * 8 + lane / 4, i / 2) + lane % 4 * 4;
        asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(results[i]) : "memory");
      }
    } else if constexpr (kHalves) {
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kResults; i += 8) {  // of four blocks of the product, which are two pieces
        float pairs[8];
        this->exchange(results + i, pairs);
        uint32_t packed[4];
        pack<kType>(pairs, packed);
        this->put_packed_pairs(slot, static_cast<uint32_t>(i / 4), packed);
      }
    } else if constexpr (kType == OutputType::kFp32) {
      this->put_32(slot, results);
    } else {
      uint32_t packed[kResults / 2];
      pack<kType>(results, packed);
      this->put_packed(slot, packed);
    }
  }
  template <OutputType kType, int kValues>
  CUTLASS_DEVICE static void pack(float const (&z)[kValues], uint32_t (&to)[kValues / 2]) {
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < kValues / 2; ++i) {
      to[i] = epilogue::generated_pair<kType>(z[2 * i], z[2 * i + 1]);
    }
  }

  Params const& params_;
};

}  // namespace cutlass_evt
