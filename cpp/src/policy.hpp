// The policy of an architecture: what selection knows of the time that its kernels need, as data. An
// architecture fills in a Policy (smNN/arch.cpp), and cost.cpp evaluates the policies of all of them.
//
// Estimates are compared within one architecture only. They are in clocks of one SM, and a factor that all of
// them have in common changes nothing.
#pragma once

namespace fp4gemm {

/// Kernels that compute whole tiles in waves, each tile as long as the slower of its tensor-core work and its
/// operand traffic.
struct TilePolicy {
  double macs_per_clock = 0;     // dense tensor-core rate of an SM on the operand type
  double bytes_per_element = 0;  // of an operand, block scales included
  double bytes_per_clock = 0;    // operand traffic from L2 that an SM sustains
  double clocks_per_tile = 0;    // prologue and epilogue, which overlap with nothing
  int two_sm_tile_m = 0;         // tiles of so many rows are shared by two SMs; 0: no tiles are
  double exposed = 0;  // the part of the work that does not overlap with reading B from device memory
};

/// Kernels that read both operands in NVFP4 and multiply without FP4 tensor cores (sm90/packed.cu). An
/// element of B takes either the clocks of loading and decoding it or those of the work on the tile's tokens,
/// whichever are more.
struct PackedPolicy {
  double clocks = 0;            // to load and decode an element; 0: the architecture has no such kernels
  double base_clocks = 0;       // of the work on an element
  double clocks_per_token = 0;  // of a tile, in addition
};

/// The operands that a kernel does not read as they are, which are converted in launches of their own.
struct ConversionPolicy {
  double clocks_per_launch = 0;  // of each launch more
  double bytes_per_clock = 0;    // read and written in device memory, for each SM
};

/// The time of kernels on prepacked weights whose figures were not measured, from the sizes of their tiles.
struct DerivedPolicy {
  double macs_per_clock = 0;     // of an SM on fp16, with fp32 sums
  double decoded_per_clock = 0;  // weights decoded to fp16
  double decoded_bf16_per_clock = 0;
  double bytes_per_clock = 0;  // from L2, of weights and tokens together
  double fixed_clocks = 0;     // of a launch: its start, the first loads and the last epilogue
  double split_clocks = 0;     // of the exchange of sums between CTAs
  double tile_clocks = 0;      // of each further tile of a CTA: its epilogue
};

/// Kernels on prepacked weights. A kernel has measured figures (Kernel::figures), or else its time follows
/// from `derived`.
struct PrepackedPolicy {
  double clocks_per_us = 0;  // of measured figures
  /// Splitting tiles along k costs so much more where CTAs share an SM: they do not advance alike.
  double shared_split_us = 0;
  /// A launch that leaves half of the SMs idle ends earlier by this: the next kernel starts on the others.
  double room_us = 0;
  double exposed = 0;  // the part of the work that does not overlap with reading the weights
  DerivedPolicy derived;
};

struct Policy {
  /// The tensor cores multiply NVFP4. Two NVFP4 operands are then never converted, and a call that quantizes
  /// A does so to NVFP4 where B is NVFP4, even if there are kernels that read fp16.
  bool has_fp4 = false;
  /// The rate at which an SM reads B from device memory, in bytes a clock: no kernel is faster. 0: no bound,
  /// where the figures of the kernels contain it.
  double weight_bytes_per_clock = 0;
  TilePolicy tiles;
  PackedPolicy packed;
  PrepackedPolicy prepacked;
  ConversionPolicy conversions;
};

}  // namespace fp4gemm
