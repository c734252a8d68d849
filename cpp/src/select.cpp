// The selection of a kernel. It has two steps: suits() drops the kernels that cannot compute the problem, and
// cheapest() takes the one of the rest that estimate_clocks() expects to need the least time by the policy of
// the device's architecture. A result is remembered, since the same problems come again and again.
#include "select.hpp"

#include <algorithm>

#include "architecture.hpp"
#include "cost.hpp"
#include "generated.hpp"

namespace fp4gemm {
namespace {

// A batch-invariant kernel is chosen as for so many rows (of each group), whatever their number is.
constexpr int64_t kInvariantRows = 256;

/// A selection and its result. A layer asks twice in each call, for the workspace and for the launch, and an
/// estimate for every kernel that suits takes half a microsecond.
struct Remembered {
  int device_arch = -1;
  int num_sms = 0;
  Selection wanted{};
  int index = -1;
};

/// The place where the result for `wanted` is remembered, if no other selection has taken it since. Each
/// thread has places of its own, so that no lock is needed. A model has few problems at a time: the sizes of
/// its layers with one number of tokens.
Remembered& remembered(Selection const& wanted) {
  constexpr size_t kPlaces = 64;
  static thread_local Remembered places[kPlaces];
  auto const hash = static_cast<uint64_t>(wanted.m) * 31 + static_cast<uint64_t>(wanted.n / 8) * 7 +
                    static_cast<uint64_t>(wanted.k / 32);
  return places[hash % kPlaces];
}

/// The index in the table of the kernel that suits and has the least estimate; of equal ones the first, so
/// that the order of the lists decides. -1: none suits, or no architecture serves the device.
int cheapest(int device_arch, int num_sms, Selection const& wanted) {
  Architecture const* const served = architecture_of(device_arch);
  if (served == nullptr) {
    return -1;
  }
  int index = 0;  // in the table, which has the kernels of the architectures one after the other
  for (Architecture const* const* arch = architectures(); *arch != served; ++arch) {
    index += (*arch)->num_kernels();
  }
  int best = -1;
  double best_clocks = 0;
  for (KernelList const* const* list = served->lists; *list != nullptr; ++list) {
    for (int i = 0; i < (*list)->size; ++i, ++index) {
      Kernel const& kernel = (*list)->data[i];
      if (!suits(kernel, wanted) ||
          (wanted.is_generated && generated_tile(*served, kernel, wanted.ragged) < 0)) {
        continue;
      }
      double const clocks = estimate_clocks(*served->policy, kernel, num_sms, wanted);
      if (best < 0 || is_cheaper(clocks, best_clocks)) {
        best = index;
        best_clocks = clocks;
      }
    }
  }
  return best;
}

}  // namespace

bool suits(Kernel const& kernel, Selection const& wanted) {
  // A prepacked weight belongs to one matrix, and groups that are ragged in k have parts of a matrix.
  bool const ragged_k = wanted.num_groups > 0 && wanted.ragged == FP4GEMM_RAGGED_K;
  // MXFP8 tokens and MXFP4 weights have kernels of their own, for which TMA unpacks whole multiples of so
  // many codes. Where k is none, the codes are expanded for those of MXFP8.
  bool const mixed = wanted.format_a == FP4GEMM_FORMAT_MXFP8 && wanted.format_b == FP4GEMM_FORMAT_MXFP4;
  Operands const other = wanted.k % Rules::kUnpackedK == 0 ? Operands::kMxfp8 : Operands::kMxfp8Mxfp4;
  return kernel.info.out_dtype == wanted.out_dtype && kernel.is_gated == wanted.is_gated &&
         kernel.is_grouped == (wanted.num_groups > 0) &&
         accepts(kernel.operands, wanted.format_a, wanted.format_b) &&
         (wanted.use_fast_accum || kernel.info.fast_accum == 0) &&
         !(ragged_k && is_prepacked(kernel.operands)) && !(mixed && kernel.operands == other);
}

int select_kernel(int device_arch, int num_sms, Selection const& asked) {
  Selection wanted = asked;
  if (wanted.batch_invariant) {  // the same kernel for every m: its order of sums is then the same, too
    wanted.m = kInvariantRows * std::max(1, wanted.num_groups);
  }
  Remembered& last = remembered(wanted);
  if (last.device_arch != device_arch || last.num_sms != num_sms || !(last.wanted == wanted)) {
    last = {device_arch, num_sms, wanted, cheapest(device_arch, num_sms, wanted)};
  }
  return last.index;
}

}  // namespace fp4gemm
