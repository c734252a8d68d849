// TransformerEngine's cast along rows, the most common one, with shapes for few and for many rows.
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

using Te = TeCast<Range::kRegular>;

template <class T, Amax kAmax, Cover kCover, bool kLooped, int kThreadsPerRow, int kBlocksPerThread>
bool dense(RowLaunch const& launch) {
  using Shape = RowShape<kAmax, kCover, false, kLooped, kThreadsPerRow, kBlocksPerThread>;
  return launch_rows<PlainLoader<T>, Te, Shape>(launch);
}

/// With few rows the latency of one row matters, and all its loads should be in flight at once. With many
/// rows, fewer threads with more blocks each spend less time in the reduction, and scales are written 16
/// bytes at a time.
template <class T, Amax kAmax>
void launch_dense(RowLaunch const& launch) {
  constexpr int kDeep = kPlainDepth<PlainLoader<T>>;
  constexpr Cover kSingles = Cover::kSingles;
  constexpr Cover kQuads = Cover::kQuads;
  if (launch.params.m < 8 * launch.device.num_sms) {
    (void)(dense<T, kAmax, kSingles, false, 32, 1>(launch) ||
           dense<T, kAmax, kSingles, false, 128, 1>(launch) ||
           dense<T, kAmax, kSingles, false, 512, 1>(launch) ||
           dense<T, kAmax, kSingles, true, 1024, 1>(launch));
  } else {
    (void)(dense<T, kAmax, kQuads, false, 32, kDeep>(launch) ||
           dense<T, kAmax, kQuads, false, 128, kDeep / 2>(launch) ||
           dense<T, kAmax, kQuads, false, 128, kDeep>(launch) ||
           dense<T, kAmax, kQuads, false, 256, kDeep>(launch) ||
           dense<T, kAmax, kQuads, true, 256, kDeep>(launch));
  }
}

}  // namespace

void launch_rows_te(RowLaunch const& launch) {
  for_type(launch.dtype, [&](auto type) {
    using T = decltype(type);
    if (launch.params.groups.offs != nullptr) {
      launch_rows_any<PlainLoader<T>, Te, kPlainDepth<PlainLoader<T>>>(launch);
    } else if (launch.params.amax_in == nullptr) {
      launch_dense<T, Amax::kRow>(launch);
    } else {
      launch_dense<T, Amax::kGiven>(launch);
    }
  });
}

}  // namespace fp4gemm
