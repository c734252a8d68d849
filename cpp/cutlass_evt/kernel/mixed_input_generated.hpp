// What the kernel on prepacked weights has for a generated formula: its inputs in shared memory, and the
// direct epilogue. A source that is compiled at run time includes this header.
#pragma once

#include "cutlass_evt/epilogue/generated.hpp"
#include "cutlass_evt/kernel/mixed_input_direct_epilogue.hpp"

namespace cutlass_evt {

/// Whether a formula has the direct epilogue: all matrices that it reads and writes have 16-bit elements.
/// Three warpgroups have too few registers for more than D without pairs.
template <class Config, class Types>
constexpr bool generated_is_direct() {
  bool direct = !Config::kSharesRows && epilogue::is_16_bit(Types::kTypes.output);
  for (int i = 0; i < generated::kMatrixInputs; ++i) {
    direct = direct && epilogue::is_16_bit(Types::kTypes.matrices[i]);
  }
  for (int i = 0; i < generated::kNumAux; ++i) {
    direct = direct && epilogue::is_16_bit(Types::kTypes.aux[i]);
  }
  bool const is_plain =
      !generated::kPairs && !generated::kTakesC && generated::kMatrixInputs == 0 && generated::kNumAux == 0;
  return direct && (Config::kConsumerGroups <= 2 || is_plain);
}

/// The inputs by row and by column of a formula, copied to shared memory as MixedInputEpilogueVectors copies
/// the vectors of every epilogue. They lie where the epilogue leaves room, behind the table of groups
/// otherwise, and stay in global memory where neither has room for them or where the epilogue copies no
/// vectors.
template <class Config, class Types>
struct MixedInputEpilogueInputs<Config, epilogue::GeneratedColumnsEpilogue<Types>> {
  using Epilogue = epilogue::GeneratedColumnsEpilogue<Types>;
  using Shared = MixedInputShared<Config>;
  using Vectors = MixedInputEpilogueVectors<Config>;
  static constexpr bool kIsDirect = generated_is_direct<Config, Types>();
  static constexpr int kWidth = epilogue::generated_input_columns(Config::kVectorColumns);
  static constexpr int kColumnsAt = Config::kTokens * generated::kRowInputs;
  static constexpr int kSize = kColumnsAt + kWidth * generated::kColumnInputs;
  static constexpr int kBytes = kSize * 4 * (Config::kSharesRows ? 1 : Config::kConsumerGroups);

  static constexpr int kUsedBytes =
      kIsDirect ? Config::kConsumerGroups * Config::kDirectBytes : Config::kSliceBytes;
  static constexpr bool kIsInside = kUsedBytes + kBytes <= Config::kSliceBytes;
  static constexpr int kBehind = (Config::kSharedBytes - 1024 + 15) / 16 * 16;
  static constexpr int kAt = kIsInside ? Shared::kRestAt + 1024 + kUsedBytes : kBehind;
  static constexpr bool kInShared = kSize > 0 && (Config::kSharesRows || kIsDirect) &&
                                    (kIsInside || kBehind + kBytes + 1024 <= Config::kSharedLimit);

  /// The inputs of this thread's warpgroup or, where warpgroups share rows, of all: kTokens elements of each
  /// input by row, then from kColumnsAt on kWidth elements of each input by column.
  CUTLASS_DEVICE static float* at(Shared const& shared) {
    int const group = static_cast<int>(threadIdx.x / Vectors::kThreads);
    return reinterpret_cast<float*>(shared.base + kAt) + group * kSize;
  }

  CUTLASS_DEVICE static void fetch(GeneratedArguments const& args, Shared const& shared,
                                   MixedInputTileCoord const& coord, int first_chunk, int n) {
    if constexpr (kInShared) {
      int const thread = static_cast<int>(threadIdx.x % Vectors::kThreads);
      float* const to = at(shared);
      epilogue::generated_for<generated::kRowInputs>([&](auto v) {
        EpilogueVector const& vector = args.inputs.rows[v];
        for (int token = thread; token < Config::kTokens; token += Vectors::kThreads) {
          int64_t const row = int64_t{coord.rows.begin} + coord.token + token;
          bool const present = coord.token + token < coord.rows.size;
          Vectors::copy(to + v * Config::kTokens + token, present ? vector.at(0, row) : nullptr, 0.0f);
        }
      });
      int const first = (first_chunk + static_cast<int>(threadIdx.x / Vectors::kThreads)) * 64;
      epilogue::generated_for<generated::kColumnInputs>([&](auto v) {
        EpilogueVector const& vector = args.inputs.columns[v];
        for (int i = thread; i < kWidth; i += Vectors::kThreads) {
          int const column = epilogue::generated_input_columns(first) + i;
          bool const present = column < epilogue::generated_input_columns(n);
          Vectors::copy(to + kColumnsAt + v * kWidth + i, present ? vector.at(coord.group, column) : nullptr,
                        0.0f);
        }
      });
    }
  }

  /// Elements of the inputs by row for two neighbouring tokens of the tile, from an even one on.
  CUTLASS_DEVICE static void of_two_rows(GeneratedArguments const& args, Shared const& shared,
                                         MixedInputTileCoord const& coord, int token,
                                         float (&of)[2][Epilogue::kRowElements]) {
    epilogue::generated_for<generated::kRowInputs>([&](auto v) {
      if constexpr (kInShared) {
        float2 const two = *reinterpret_cast<float2 const*>(at(shared) + v * Config::kTokens + token);
        of[0][v] = two.x;
        of[1][v] = two.y;
      } else {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < 2; ++i) {
          of[i][v] = of_row(args, coord, token + i, v);
        }
      }
    });
  }

  /// Element `column` of an input by column, counted from the first of the warpgroup.
  template <class V>
  CUTLASS_DEVICE static float of_column(GeneratedArguments const& args, Shared const& shared, int group,
                                        int first_chunk, int column, int n, V v) {
    if constexpr (kInShared) {
      return at(shared)[kColumnsAt + v * kWidth + column];
    } else {
      int const first = (first_chunk + static_cast<int>(threadIdx.x / Vectors::kThreads)) * 64;
      int const from = epilogue::generated_input_columns(first) + column;
      return from < epilogue::generated_input_columns(n)
                 ? load_after_wait(args.inputs.columns[v].at(group, from))
                 : 0.0f;
    }
  }

  // Of the staged epilogue where warpgroups share rows.
  CUTLASS_DEVICE static void begin(GeneratedArguments const& args, int group, int column, int n,
                                   typename Epilogue::Columns& columns) {
    columns.template begin<!kInShared>(args, group, column, n);
  }
  CUTLASS_DEVICE static void of_columns(Shared const& shared, int column,
                                        typename Epilogue::Columns& columns) {
    if constexpr (kInShared) {
      columns.load_inputs(at(shared) + kColumnsAt + epilogue::generated_input_columns(column), kWidth);
    }
  }
  CUTLASS_DEVICE static void of_row(GeneratedArguments const& args, Shared const& shared,
                                    MixedInputTileCoord const& coord, int token,
                                    typename Epilogue::RowElements& elements) {
    epilogue::generated_for<generated::kRowInputs>([&](auto v) {
      if constexpr (kInShared) {
        elements.inputs[v] = at(shared)[v * Config::kTokens + token];
      } else {
        elements.inputs[v] = of_row(args, coord, token, v);
      }
    });
  }

 private:
  template <class V>
  CUTLASS_DEVICE static float of_row(GeneratedArguments const& args, MixedInputTileCoord const& coord,
                                     int token, V v) {
    int const row = coord.token + token;
    return row < coord.rows.size ? load_after_wait(args.inputs.rows[v].at(0, int64_t{coord.rows.begin} + row))
                                 : 0.0f;
  }
};

/// The direct epilogue of a formula: the arithmetic is where the accumulators are, and all matrices go
/// through shared memory, C and the formula's matrices on the way of D backwards. Pairs are neighbouring
/// columns of the product, which lanes 4 apart exchange as in store_pairs of the general template. The loop
/// over slices is unrolled for formulas of few operations: registers cannot be indexed at run time, so that a
/// loop selects the sums of a slice among all. With more operations the code would not fit in the
/// instruction cache.
template <class Config, class Types>
struct MixedInputDirectEpilogue<Config, epilogue::GeneratedColumnsEpilogue<Types>> {
  using Epilogue = epilogue::GeneratedColumnsEpilogue<Types>;
  using Shared = MixedInputShared<Config>;
  using TileCoord = typename MixedInputGroups<Config>::TileCoord;
  using Vectors = MixedInputEpilogueVectors<Config>;
  using Inputs = MixedInputEpilogueInputs<Config, Epilogue>;

  CUTLASS_DEVICE static constexpr bool serves(GeneratedArguments const&) { return Inputs::kIsDirect; }

  /// Writes the tile to D and the further outputs.
  template <class Accumulators>
  CUTLASS_DEVICE static void store_tile(GeneratedArguments const& args, Shared const& shared,
                                        TileCoord const& coord, int first_chunk, int n,
                                        Accumulators& accumulators) {
    if constexpr (Inputs::kIsDirect) {
      store(args, shared, coord, first_chunk, n, accumulators);
    }
  }

 private:
  static constexpr GeneratedTypes kTypes = Types::kTypes;
  static constexpr bool kPairs = generated::kPairs;
  static constexpr bool kHalves = kPairs && generated::kResults == 1;  // D has n / 2 columns
  static constexpr int kAtLeast1(int count) { return count > 0 ? count : 1; }
  static constexpr int kOutputs = 1 + generated::kNumAux;
  static constexpr int kSliceTokens = cute::min(32, int{Config::kDirectTokens});
  static constexpr int kSlices = Config::kTokens / kSliceTokens;
  static constexpr int kBlocks = kSliceTokens / 8;
  // Matrices that go through shared memory for a slice, one after the other, each in the next of these
  // buffers. With two or more one barrier for each suffices: a thread that writes one has passed the barrier
  // of the one before, and before that every thread had read the one before it.
  static constexpr int kTransfers = kOutputs + generated::kMatrixInputs + (generated::kTakesC ? 1 : 0);
  static constexpr int kBufferBytes = kSliceTokens * 128;
  static constexpr int kBuffers = Config::kStagedResultsBytes / kBufferBytes;
  static constexpr float kScale = static_cast<float>(1 << Config::Packing::kExponent);

  /// A thread's elements of a matrix in a slice, as two tokens of a column in a register: in each block those
  /// of two columns or, where the matrix has one column for two of the product, of one.
  template <bool kOfPairs>
  using Registers = uint32_t[kBlocks][kOfPairs ? 1 : 2];

  /// A matrix, and the buffers that its slices go through.
  template <bool kOfPairs>
  struct Path {
    using Rows = MixedInputDirectRows<Config, kOfPairs>;
    static constexpr int kRowsAtATime = cute::min(int{Rows::kRowsAtATime}, kSliceTokens);
    static constexpr int kPieces = kSliceTokens / kRowsAtATime;
    static constexpr uint32_t kStep = Rows::kRowBytes * kRowsAtATime;
    struct Pieces {
      uint4 of[kPieces];
    };

    Rows rows;
    int present;
    int64_t row;

    CUTLASS_DEVICE Path(Shared const& shared, TileCoord const& coord, int first_chunk, int n)
        : rows(shared, static_cast<int>(threadIdx.x % 128), first_chunk),
          present(has_piece() ? rows.present(n, coord.rows.size - coord.token) : 0),
          row(int64_t{coord.rows.begin} + coord.token + rows.row) {}

    /// False for the threads that a slice of few tokens has no piece for.
    CUTLASS_DEVICE bool has_piece() const {
      return kSliceTokens >= Rows::kRowsAtATime || rows.row < kSliceTokens;
    }
    CUTLASS_DEVICE int64_t offset(int slice, int64_t row_stride) const {
      return ((row + slice * kSliceTokens) * row_stride + rows.column) * 2;
    }

    /// Loads a slice; zeros where D has no row.
    CUTLASS_DEVICE void load(int slice, void const* matrix, int64_t row_stride, Pieces& pieces) const {
      char const* const from = static_cast<char const*>(matrix) + offset(slice, row_stride);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        // A plain load: the matrix may be D, which the read-only path must not see.
        pieces.of[i] = slice * kSliceTokens + i * kRowsAtATime < present
                           ? *reinterpret_cast<uint4 const*>(from + i * row_stride * (kRowsAtATime * 2))
                           : uint4{0, 0, 0, 0};
      }
    }
    CUTLASS_DEVICE void to_registers(uint32_t buffer, Pieces const& pieces,
                                     Registers<kOfPairs>& registers) const {
      if (has_piece()) {
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < kPieces; ++i) {
          Rows::put_piece(rows.get_at + buffer + i * kStep,
                          kOfPairs ? Rows::by_lane(pieces.of[i]) : pieces.of[i]);
        }
      }
      Rows::sync();
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; block += 2) {
        Rows::get(rows.put_at + buffer + static_cast<uint32_t>(block * 8 * Rows::kRowBytes), registers[block],
                  registers[block + 1]);
      }
    }
    CUTLASS_DEVICE void store(int slice, uint32_t buffer, Registers<kOfPairs> const& registers, void* matrix,
                              int64_t row_stride) const {
      CUTLASS_PRAGMA_UNROLL
      for (int block = 0; block < kBlocks; block += 2) {
        Rows::put(rows.put_at + buffer + static_cast<uint32_t>(block * 8 * Rows::kRowBytes), registers[block],
                  registers[block + 1]);
      }
      Rows::sync();
      char* const to = static_cast<char*>(matrix) + offset(slice, row_stride);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kPieces; ++i) {
        uint4 const bits =
            has_piece() ? Rows::get_piece(rows.get_at + buffer + i * kStep) : uint4{0, 0, 0, 0};
        Rows::store_if(slice * kSliceTokens + i * kRowsAtATime < present,
                       to + i * row_stride * (kRowsAtATime * 2), kOfPairs ? Rows::in_order(bits) : bits);
      }
    }
  };

  /// What the two columns of a thread have: without pairs the columns r and r + 8 of its warp, with pairs the
  /// two of a pair.
  struct TwoColumns {
    epilogue::Terms common;
    float per_column[kNumColumnVectors][2];
    float inputs[kAtLeast1(generated::kColumnInputs)][2];

    CUTLASS_DEVICE TwoColumns(GeneratedArguments const& args, Shared const& shared, TileCoord const& coord,
                              int first_chunk, int n)
        : common(epilogue::generated_terms(args.inputs, Epilogue::alpha(args, coord.group), coord.group)) {
      int const thread = static_cast<int>(threadIdx.x % 128);
      int const r = thread % 32 / 4;
      int const first = thread / 32 * 16 + (kPairs ? r / 2 * 2 + r % 2 * 8 : r);
      constexpr int kStep = kPairs ? 1 : 8;
      float const* const vectors = shared.vectors(static_cast<int>(threadIdx.x / 128)) + Vectors::kColumnsAt;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < 2; ++i) {
        CUTLASS_PRAGMA_UNROLL
        for (int v = 0; v < kNumColumnVectors; ++v) {
          per_column[v][i] = vectors[v * Config::kVectorColumns + first + i * kStep];
        }
        int const column = epilogue::generated_input_columns(first + i * kStep);
        epilogue::generated_for<generated::kColumnInputs>([&](auto v) {
          inputs[v][i] = Inputs::of_column(args, shared, coord.group, first_chunk, column, n, v);
        });
      }
    }
  };

  /// The lanes of a pair exchange: of the column that a lane has of the other's pair, and of its own. With
  /// the elements of a thread's columns r and r + 8 it returns those of its pair, and the other way round.
  template <class T>
  CUTLASS_DEVICE static void exchange(bool has_up, T& first, T& second) {
    T const other = __shfl_xor_sync(0xFFFFFFFFu, has_up ? first : second, 4);
    T const kept = has_up ? second : first;
    first = has_up ? other : kept;
    second = has_up ? kept : other;
  }

  template <class Accumulators>
  CUTLASS_DEVICE static void store(GeneratedArguments const& args, Shared const& shared,
                                   TileCoord const& coord, int first_chunk, int n,
                                   Accumulators& accumulators) {
    constexpr int kSums = kSliceTokens / 2;  // of a thread, in a slice
    GeneratedInputs const& inputs = args.inputs;
    int const tokens = coord.rows.size - coord.token;
    int const lane = static_cast<int>(threadIdx.x % 32);
    bool const has_up = lane / 4 % 2 != 0;
    float const* const vectors = shared.vectors(static_cast<int>(threadIdx.x / 128));
    Path<kHalves> const outputs(shared, coord, first_chunk, n);
    Path<kPairs> const matrices(shared, coord, first_chunk, n);
    typename Path<kHalves>::Pieces c_pieces;
    typename Path<kPairs>::Pieces pieces[kAtLeast1(generated::kMatrixInputs)];
    auto const load = [&](int slice) {
      if constexpr (generated::kTakesC) {
        outputs.load(slice, args.c, args.c_row_stride, c_pieces);
      }
      epilogue::generated_for<generated::kMatrixInputs>([&](auto v) {
        matrices.load(slice, inputs.matrices[v].data, inputs.matrices[v].row_stride, pieces[v]);
      });
    };
    load(0);
    // After the barrier the vectors that every thread of the warpgroup copied are visible, and the buffers of
    // the previous tile have been read.
    Vectors::wait();
    MixedInputDirectRows<Config, false>::sync();
    TwoColumns const columns(args, shared, coord, first_chunk, n);

    constexpr int kEvaluations = Config::kTokens / (kPairs ? 4 : 2);  // of a thread
#pragma unroll(generated::kOperations* kEvaluations <= 4096 ? kSlices : 1)
    for (int slice = 0; slice < kSlices; ++slice) {
      if (slice > 0 && slice * kSliceTokens >= tokens) {
        return;
      }
      float sums[kSums];
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < kSlices; ++i) {
        if (i == slice) {
          CUTLASS_PRAGMA_UNROLL
          for (int v = 0; v < kSums; ++v) {
            sums[v] = accumulators[i * kSums + v];
          }
        }
      }
      uint32_t transfer = static_cast<uint32_t>(slice * kTransfers);
      auto const next_buffer = [&] {
        if constexpr (kBuffers == 1) {
          MixedInputDirectRows<Config, false>::sync();  // every thread has read it
        }
        return transfer++ % kBuffers * kBufferBytes;
      };
      Registers<kHalves> c;
      Registers<kPairs> of_matrices[kAtLeast1(generated::kMatrixInputs)];
      if constexpr (generated::kTakesC) {
        outputs.to_registers(next_buffer(), c_pieces, c);
      }
      epilogue::generated_for<generated::kMatrixInputs>(
          [&](auto v) { matrices.to_registers(next_buffer(), pieces[v], of_matrices[v]); });
      if (slice + 1 < kSlices) {
        load(slice + 1);
      }

      if constexpr (generated::kTakesC && kPairs && !kHalves) {
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          exchange(has_up, c[block][0], c[block][1]);
        }
      }
      Registers<kHalves> results[kOutputs];
      epilogue::generated_evaluate</*kWarp=*/true>([&](auto& divide) {
        CUTLASS_PRAGMA_UNROLL
        for (int block = 0; block < kBlocks; ++block) {
          int const token = slice * kSliceTokens + block * 8 + lane % 4 * 2;
          float2 const alpha_rows =
              *reinterpret_cast<float2 const*>(vectors + kAlphaRow * Config::kTokens + token);
          float row_inputs[2][Epilogue::kRowElements];
          Inputs::of_two_rows(args, shared, coord, token, row_inputs);
          // The terms of an element of one of the two columns: of token 0 or 1 of the two.
          auto const terms_of = [&](int column, int of_token) {
            epilogue::Terms terms = columns.common;
            terms.row = of_token == 0 ? alpha_rows.x : alpha_rows.y;
            terms.col = columns.per_column[kAlphaCol][column];
            terms.bias = columns.per_column[kBias][column];
            if constexpr (generated::kTakesC) {
              terms.c =
                  epilogue::generated_element<kTypes.output>(c[block][kHalves ? 0 : column] >> of_token * 16);
            }
            epilogue::generated_for<generated::kRowInputs>(
                [&](auto v) { terms.rows[v] = row_inputs[of_token][v]; });
            epilogue::generated_for<generated::kColumnInputs>(
                [&](auto v) { terms.columns[v] = columns.inputs[v][column]; });
            epilogue::generated_for<generated::kMatrixInputs>([&](auto v) {
              uint32_t const bits = of_matrices[v][block][kPairs ? 0 : column];
              terms.matrices[v] = epilogue::generated_element<kTypes.matrices[v]>(bits >> of_token * 16);
            });
            return terms;
          };
          float values[kOutputs][2][2];  // of the two columns, or of the first if D has one for both
          auto const keep = [&](int column, int of_token, epilogue::Results const& of) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < generated::kResults; ++i) {
              values[0][column + i][of_token] = of.d[i];
              epilogue::generated_for<generated::kNumAux>(
                  [&](auto v) { values[1 + v][column + i][of_token] = of.aux[v][i]; });
            }
          };
          CUTLASS_PRAGMA_UNROLL
          for (int of_token = 0; of_token < 2; ++of_token) {
            float first = sums[block * 4 + of_token] * kScale;
            float second = sums[block * 4 + 2 + of_token] * kScale;
            if constexpr (kPairs) {
              exchange(has_up, first, second);
              keep(0, of_token,
                   epilogue::apply(first, second, terms_of(0, of_token), terms_of(1, of_token), divide));
            } else {
              keep(0, of_token, epilogue::apply(first, terms_of(0, of_token), divide));
              keep(1, of_token, epilogue::apply(second, terms_of(1, of_token), divide));
            }
          }
          epilogue::generated_for<kOutputs>([&](auto o) {
            CUTLASS_PRAGMA_UNROLL
            for (int i = 0; i < (kHalves ? 1 : 2); ++i) {
              results[o][block][i] = epilogue::generated_pair<type_of(o)>(values[o][i][0], values[o][i][1]);
            }
            if constexpr (kPairs && !kHalves) {
              exchange(has_up, results[o][block][0], results[o][block][1]);
            }
          });
        }
      });
      epilogue::generated_for<kOutputs>([&](auto o) {
        if constexpr (o == 0) {
          outputs.store(slice, next_buffer(), results[o], args.d, args.d_row_stride);
        } else {
          GeneratedMatrix const& matrix = inputs.aux[o - 1];
          outputs.store(slice, next_buffer(), results[o], matrix.data, matrix.row_stride);
        }
      });
    }
  }

  static constexpr OutputType type_of(int output) {
    return output == 0 ? kTypes.output : kTypes.aux[output - 1];
  }
};

}  // namespace cutlass_evt
