// A list of types that describe tiles.
#pragma once

namespace fp4gemm {

template <class... Tiles>
struct TileList {};

}  // namespace fp4gemm
