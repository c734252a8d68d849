// The parameters of the mixed-input kernel.
#pragma once

#include "cutlass_evt/kernel/mixed_input_schedule.hpp"

namespace cutlass_evt {

/// In place of a quantizer where the tokens need none.
struct MixedInputNoQuantizer {
  struct Arguments {};
  struct Elements {};
};

/// The kernel's parameters: D[rows of group g] = epilogue(X[rows of group g] (., k) @ W[g] (n, k)^T). A dense
/// product has one group, and groups.offs is null. Epilogue is ColumnsEpilogue or a type with its interface.
template <class Epilogue, class Quantizer>
struct MixedInputParams {
  CUtensorMap tokens;  // the map of X, see MixedInputOperands; its box is what one load of a CTA fetches
  typename Quantizer::Arguments quantizer;  // of a kernel that quantizes X: in place of `tokens`
  uint8_t const* weights;                   // the prepacked matrices, one after the other
  int64_t weight_bytes;                     // bytes of one matrix
  bool weights_are_fresh;  // they may still be being written: no weight is read before the previous kernel
                           // ends
  int n;
  MixedInputGroupEnds groups;
  MixedInputOperands operands;
  cutlass::FastDivmod row_tiles;  // tiles of a cluster along the n rows of a matrix
  cutlass::FastDivmod steps;      // stages along k of one tile
  MixedInputPlan plan;            // of a dense product; that of a grouped one is made on the device
  bool splits;                    // stream-K is allowed where it balances the work
  // The workspace, see MixedInputPartials
  char* sums;
  uint64_t* flags;
  uint64_t nonce;
  MixedInputDynamicScheduler dynamic;  // for grouped products, whose tiles take different times
  typename Epilogue::Arguments epilogue;
};

}  // namespace cutlass_evt
