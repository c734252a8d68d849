// SM90 (Hopper, compute capability 9.0) as data.
#include "sm90/arch.hpp"

#include "architecture.hpp"

namespace fp4gemm::sm90 {
namespace {

KernelList const* const kLists[] = {FP4GEMM_SM90_LISTS(FP4GEMM_ADDRESS_OF_LIST) nullptr};

// These figures were fitted to an H200. Those of the kernels on prepacked weights are in sm90/tiles.hpp.
constexpr Policy make_policy() {
  Policy policy;
  policy.tiles.macs_per_clock = 2048;
  policy.tiles.bytes_per_element = 2.0;
  policy.tiles.bytes_per_clock = 42;
  policy.tiles.clocks_per_tile = 1200;
  policy.packed.clocks = 0.058;
  policy.packed.base_clocks = 0.025;
  policy.packed.clocks_per_token = 0.0025;
  policy.prepacked.clocks_per_us = 1755;  // of an H200 under load
  policy.prepacked.shared_split_us = 1.0;
  policy.prepacked.room_us = 0.8;
  policy.conversions.clocks_per_launch = 5000;
  policy.conversions.bytes_per_clock = 17;
  return policy;
}
constexpr Policy kPolicy = make_policy();

}  // namespace

extern Architecture const architecture;
Architecture const architecture{kArch,   FP4GEMM_ARCH_DEVICES, /*is_executed=*/true, kLists, &kPolicy,
                                nullptr, &generated_kernels};

}  // namespace fp4gemm::sm90
