// The last node of an epilogue: cast(y + beta * C). C is read directly from global memory where it is given.
#pragma once

#include "cutlass/numeric_conversion.h"
#include "cutlass_evt/epilogue/nodes.hpp"

namespace cutlass_evt::nodes {

template <class Out, bool kGrouped>
struct SourceArguments {
  PointerOf<Out, kGrouped> c = nullptr;
  int64_t row_stride = 0;  // elements
  float beta = 1.0f;
};

/// The node. One kernel serves calls with and without C, since no shared memory and no load warp are set
/// aside for it. Out is the element type of C and D.
template <class Out, bool kGrouped, bool kSwapped>
struct AddSource : Node<SourceArguments<Out, kGrouped>> {
  using Node<SourceArguments<Out, kGrouped>>::Node;
  using Stride =
      cute::conditional_t<kSwapped, cute::Stride<cute::_1, int64_t, cute::_0>,
                          cute::Stride<int64_t, cute::_1, cute::_0>>;  // of C as the kernel sees it

  template <class Global, class Coordinates, class Shape>
  struct ConsumerStoreCallbacks : fusion::EmptyConsumerStoreCallbacks {
    Global source;      // (CPY, CPY_M, CPY_N, EPI_M, EPI_N)
    Coordinates where;  // the coordinate of each element of source
    Shape shape;        // of C
    bool present;
    float beta;

    CUTLASS_DEVICE ConsumerStoreCallbacks(Global source, Coordinates where, Shape shape, bool present,
                                          float beta)
        : source(source), where(where), shape(shape), present(present), beta(beta) {}

    /// C is loaded as late as here because registers are scarce before.
    template <class Accumulator, int N>
    CUTLASS_DEVICE cutlass::Array<Out, N> visit(cutlass::Array<Accumulator, N> const&, int epi_v, int epi_m,
                                                int epi_n, cutlass::Array<float, N> const& y) {
      cutlass::Array<float, N> sum = y;
      if (present) {
        auto const from = source(cute::_, cute::_, cute::_, epi_m, epi_n);
        auto const at = where(cute::_, cute::_, cute::_, epi_m, epi_n);
        CUTLASS_PRAGMA_UNROLL
        for (int i = 0; i < N; ++i) {
          if (cute::elem_less(at(epi_v * N + i), shape)) {
            float const c = static_cast<float>(from(epi_v * N + i));
            sum[i] = add_rn<float>{}(y[i], multiply_rn<float>{}(beta, c));
          }
        }
      }
      return cutlass::NumericArrayConverter<Out, float, N, kRoundToNearest>{}(sum);
    }
  };

  template <bool ReferenceSrc, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(fusion::ConsumerStoreArgs<Args...> const& args) {
    auto const [M, N, K, L] = args.problem_shape_mnkl;
    int const group = cute::get<3>(args.tile_coord_mnkl);
    auto const shape = cute::make_shape(M, N, group + 1);  // coordinates include the group
    bool const present = this->params->c != nullptr;
    Out const* data = nullptr;
    if constexpr (kGrouped) {
      data = present ? this->params->c[group] : nullptr;
    } else {
      data = this->params->c;
    }
    Stride stride{};
    cute::get<kSwapped ? 1 : 0>(stride) = this->params->row_stride;
    auto const partition = [&](auto const& tensor) {
      return fusion::sm90_partition_for_epilogue<ReferenceSrc>(
          tensor, args.tile_shape_mnk, args.tile_coord_mnkl, args.epi_tile, args.tiled_copy, args.thread_idx);
    };
    auto const source =
        partition(cute::make_tensor(cute::make_gmem_ptr(data), cute::make_layout(shape, stride)));
    auto const where = partition(cute::make_identity_tensor(shape));
    return ConsumerStoreCallbacks<cute::remove_cvref_t<decltype(source)>,
                                  cute::remove_cvref_t<decltype(where)>,
                                  cute::remove_cvref_t<decltype(shape)>>(source, where, shape, present,
                                                                         this->params->beta);
  }
};

}  // namespace cutlass_evt::nodes
