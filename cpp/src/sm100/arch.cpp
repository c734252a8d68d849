// SM100 (Blackwell, compute capability 10.0 and 10.3) as data.
#include "sm100/arch.hpp"

#include "architecture.hpp"
#include "block_scale_limits.hpp"

namespace fp4gemm::sm100 {
namespace {

KernelList const* const kLists[] = {FP4GEMM_SM100_LISTS(FP4GEMM_ADDRESS_OF_LIST) nullptr};

// These figures follow from published peaks; this project has not measured them.
constexpr Policy make_policy() {
  Policy policy;
  policy.has_fp4 = true;
  policy.tiles.macs_per_clock = 16384;
  policy.tiles.bytes_per_element = 0.5625;
  policy.tiles.bytes_per_clock = 80;
  policy.tiles.clocks_per_tile = 1500;
  policy.tiles.two_sm_tile_m = 256;
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

}  // namespace fp4gemm::sm100
