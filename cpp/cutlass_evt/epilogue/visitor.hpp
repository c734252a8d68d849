// The epilogue as a visitor tree of CUTLASS: one node that finishes, and below it a node for each vector,
// which fetches the elements of the vector.
#pragma once

#include <utility>

#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/numeric_types.h"
#include "cutlass_evt/epilogue/finish.hpp"

namespace cutlass_evt {

/// The device tables of a grouped kernel, in which the part of a term that belongs to each group begins at
/// entry [group]. Those of absent terms are not read.
struct EpilogueTables {
  float const** per_row[kNumRowVectors] = {};
  float const** per_column[kNumColumnVectors] = {};
  void const** c = nullptr;
};

/// The place of an element of the product.
struct Place {
  int row;     // of D; in a grouped kernel within the group
  int column;  // of the product
  int group;
  bool exists;  // false: the tile extends beyond the product here
};

/// What finish gets as `source`: source(i) is the element of C that belongs to z[i], and source.place(i) is
/// the place of z[i].
template <class Elements, class Places>
struct Source {
  Elements elements;
  Places places;
  CUTLASS_DEVICE float operator()(int i) const { return elements(i); }
  CUTLASS_DEVICE Place place(int i) const { return places(i); }
};
template <class Elements, class Places>
Source(Elements, Places) -> Source<Elements, Places>;

/// The elements that a kernel of CUTLASS stores for one element of D. They are two with a gated epilogue, see
/// Gated.
template <class Op>
constexpr int kStoredElements = sizeof(typename Op::Result) / sizeof(typename Op::ElementOutput);

namespace visitor {

namespace fusion = cutlass::epilogue::fusion;

/// The arguments of the whole tree. Dense kernels do not read the tables.
template <class Op>
struct Arguments {
  typename Op::Arguments epilogue;
  EpilogueTables tables;
};

/// The nodes of the vectors, which broadcast them over a kernel's tile. A swapped kernel computes D^T: the
/// rows of D are the columns of its tile.
///
/// CtaTile is the kernel's tile. The strides are bools, which CUTLASS reads as 0 or 1: a vector or a single
/// number is chosen at run time, so that one kernel serves both. The alignment is 1: vectors may start at any
/// float.
template <class CtaTile, bool kGrouped, bool kSwapped>
struct Broadcast {
  using Element = cute::conditional_t<kGrouped, float*, float>;
  using AlongM =
      fusion::Sm90ColBroadcast<0, CtaTile, Element, float, cute::Stride<bool, cute::_0, int64_t>, 1>;
  using AlongN =
      fusion::Sm90RowBroadcast<0, CtaTile, Element, float, cute::Stride<cute::_0, bool, int64_t>, 1>;
  using PerRow = cute::conditional_t<kSwapped, AlongN, AlongM>;  // a RowVector of D
  using PerColumn = cute::conditional_t<kSwapped, AlongM, AlongN>;

  static typename PerRow::Arguments lower(EpilogueArguments const& args, EpilogueTables const& tables,
                                          RowVector v) {
    return lower<PerRow>(args.vector(v), tables.per_row[v], absent(v));
  }
  static typename PerColumn::Arguments lower(EpilogueArguments const& args, EpilogueTables const& tables,
                                             ColumnVector v) {
    return lower<PerColumn>(args.vector(v), tables.per_column[v], absent(v));
  }

 private:
  template <class Node>
  static typename Node::Arguments lower(EpilogueVector const& vector, float const* const* table,
                                        float absent) {
    auto const data = [&] {
      if constexpr (kGrouped) {
        return vector.data == nullptr ? nullptr : table;
      } else {
        return vector.data;
      }
    }();
    if constexpr (cute::is_same_v<Node, AlongM>) {
      return {data, absent, {vector.is_vector, cute::_0{}, 0}};
    } else {
      return {data, absent, {cute::_0{}, vector.is_vector, 0}};
    }
  }
};

/// The node that finishes: its children are the vectors, and it reads C itself where there is one. One kernel
/// serves calls with and without C, since no shared memory and no load warp are set aside for it. Op is an
/// epilogue, see Fusion.
template <class Op, bool kGrouped>
struct Finish : fusion::Sm90VisitorImpl<> {
  using Stored = typename Op::ElementOutput;
  using Result = typename Op::Result;
  using Stride =
      cute::conditional_t<Op::kSwapped, cute::Stride<cute::_1, int64_t, cute::_0>,
                          cute::Stride<int64_t, cute::_1, cute::_0>>;  // of C as the kernel sees it
  struct SharedStorage {};
  using Arguments = visitor::Arguments<Op>;
  using Params = Arguments;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(ProblemShape const&, Arguments const& args, void*) {
    return args;
  }
  template <class ProblemShape>
  static bool can_implement(ProblemShape const&, Arguments const&) {
    return true;
  }
  template <class ProblemShape>
  static size_t get_workspace_size(ProblemShape const&, Arguments const&) {
    return 0;
  }
  template <class ProblemShape>
  static cutlass::Status initialize_workspace(ProblemShape const&, Arguments const&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter* = nullptr) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE Finish() {}
  CUTLASS_HOST_DEVICE Finish(Params const& params, SharedStorage const&) : params(&params) {}

  Params const* params = nullptr;

  template <class Global, class Coordinates, class Shape>
  struct ConsumerStoreCallbacks : fusion::EmptyConsumerStoreCallbacks {
    typename Op::Arguments const& args;
    float alpha;
    Global source;      // C: (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    Coordinates where;  // the coordinate of each element of source
    Shape shape;        // of C

    CUTLASS_DEVICE ConsumerStoreCallbacks(typename Op::Arguments const& args, float alpha, Global source,
                                          Coordinates where, Shape shape)
        : args(args), alpha(alpha), source(source), where(where), shape(shape) {}

    /// vectors: an array of N elements for each RowVector, then for each ColumnVector.
    template <class Accumulator, int N, class... Vectors>
    CUTLASS_DEVICE cutlass::Array<Stored, N> visit(cutlass::Array<Accumulator, N> const& acc, int epi_v,
                                                   int epi_m, int epi_n, Vectors const&... vectors) {
      static_assert(sizeof...(Vectors) == kNumRowVectors + kNumColumnVectors, "a child for each vector");
      cutlass::Array<float, N> const elements[] = {vectors...};
      auto const row = [&](RowVector v, int i) { return elements[v][i]; };
      auto const column = [&](ColumnVector v, int i) { return elements[kNumRowVectors + v][i]; };
      // C is loaded as late as it is added because registers are scarce before.
      auto const from = source(cute::_, cute::_, cute::_, epi_m, epi_n);
      auto const at = where(cute::_, cute::_, cute::_, epi_m, epi_n);
      cutlass::Array<float, N> z = acc;
      auto const element = [&](int i) {
        int const of_thread = epi_v * N + i;
        return cute::elem_less(at(of_thread), shape) ? epilogue::to_float(args, Result(from(of_thread)))
                                                     : 0.0f;
      };
      auto const place = [&](int i) {
        auto const here = at(epi_v * N + i);
        constexpr int kRow = Op::kSwapped ? 1 : 0;
        return Place{static_cast<int>(cute::get<kRow>(here)), static_cast<int>(cute::get<1 - kRow>(here)),
                     static_cast<int>(cute::get<2>(here)), cute::elem_less(here, shape)};
      };
      Op::template finish<N>(args, alpha, z, row, column, Source{element, place});
      constexpr int kResults = N / kStoredElements<Op>;
      static_assert(kResults * kStoredElements<Op> == N, "a thread must hold whole pairs of columns");
      auto const results = epilogue::cast_all<Result, kResults>(args, z);
      return reinterpret_cast<cutlass::Array<Stored, N> const&>(results);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto const [M, N, K, L] = args.problem_shape_mnkl;
    int const group = cute::get<3>(args.tile_coord_mnkl);
    auto const shape = cute::make_shape(M, N, group + 1);  // coordinates include the group
    typename Op::Arguments const& epilogue = params->epilogue;
    void const* data = epilogue.c;
    if constexpr (kGrouped) {
      data = data == nullptr ? nullptr : params->tables.c[group];
    }
    Stride stride{};
    cute::get<Op::kSwapped ? 1 : 0>(stride) = epilogue.c_row_stride;
    auto const partition = [&](auto const& tensor) {
      return fusion::sm90_partition_for_epilogue<ReferenceSrc>(
          tensor, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy, args.thread_idx);
    };
    auto const source = partition(cute::make_tensor(cute::make_gmem_ptr(static_cast<Result const*>(data)),
                                                    cute::make_layout(shape, stride)));
    auto const where = partition(cute::make_identity_tensor(shape));
    return ConsumerStoreCallbacks<cute::remove_cvref_t<decltype(source)>,
                                  cute::remove_cvref_t<decltype(where)>,
                                  cute::remove_cvref_t<decltype(shape)>>(
        epilogue, epilogue::alpha_of(epilogue, group), source, where, shape);
  }
};

/// The tree of an epilogue, and how its arguments become those of the nodes.
template <class Op, class CtaTile, bool kGrouped>
struct Tree {
  using Broadcast = visitor::Broadcast<CtaTile, kGrouped, Op::kSwapped>;

  template <class Rows, class Columns>
  struct Of;
  template <int... kRows, int... kColumns>
  struct Of<std::integer_sequence<int, kRows...>, std::integer_sequence<int, kColumns...>> {
    template <class Node, int>
    using Child = Node;
    using type = fusion::Sm90EVT<Finish<Op, kGrouped>, Child<typename Broadcast::PerRow, kRows>...,
                                 Child<typename Broadcast::PerColumn, kColumns>...>;
    static typename type::Arguments lower(Arguments<Op> const& args) {
      return {Broadcast::lower(args.epilogue, args.tables, RowVector(kRows))...,
              Broadcast::lower(args.epilogue, args.tables, ColumnVector(kColumns))..., args};
    }
  };
  using Here =
      Of<std::make_integer_sequence<int, kNumRowVectors>, std::make_integer_sequence<int, kNumColumnVectors>>;
  using type = typename Here::type;

  static typename type::Arguments lower(Arguments<Op> const& args) { return Here::lower(args); }
};

}  // namespace visitor
}  // namespace cutlass_evt
