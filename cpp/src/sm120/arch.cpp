// SM120 (Blackwell, compute capability 12.0 and 12.1) as data.
#include "sm120/arch.hpp"

#include "architecture.hpp"
#include "block_scale_limits.hpp"

namespace fp4gemm::sm120 {
namespace {

KernelList const* const kLists[] = {FP4GEMM_SM120_LISTS(FP4GEMM_ADDRESS_OF_LIST) nullptr};

// This project has measured none of these figures. They follow from published peaks and from counting
// instructions (bench/notes/sm120_decode.md).
constexpr Policy make_policy() {
  Policy policy;
  policy.has_fp4 = true;
  // The tensor cores and the device memory are those of an RTX 5090 (170 SMs, 2.41 GHz, 1792 GB/s, 209.5
  // TFLOP/s of fp16 with fp32 sums). An RTX PRO 6000 multiplies twice as fast; a DGX Spark reads half as
  // fast.
  policy.weight_bytes_per_clock = 4.4;
  policy.tiles.macs_per_clock = 2048;
  policy.tiles.bytes_per_element = 0.5625;
  policy.tiles.bytes_per_clock = 20;  // a guess
  policy.tiles.clocks_per_tile = 1200;
  policy.tiles.exposed = 1e-3;
  policy.prepacked.exposed = 0.2;
  policy.prepacked.derived.macs_per_clock = 256;
  policy.prepacked.derived.decoded_per_clock = 56;
  policy.prepacked.derived.decoded_bf16_per_clock = 34;
  policy.prepacked.derived.bytes_per_clock = 32;
  policy.prepacked.derived.fixed_clocks = 4000;
  policy.prepacked.derived.split_clocks = 3000;
  policy.prepacked.derived.tile_clocks = 1500;
  policy.conversions.clocks_per_launch = 5000;
  policy.conversions.bytes_per_clock = policy.weight_bytes_per_clock;
  return policy;
}
constexpr Policy kPolicy = make_policy();

}  // namespace

extern Architecture const architecture;
Architecture const architecture{kArch,
                                FP4GEMM_ARCH_DEVICES,
                                /*is_executed=*/false,
                                kLists,
                                &kPolicy,
                                &block_scale_limits::check_problem,
                                /*generated=*/nullptr};

}  // namespace fp4gemm::sm120
