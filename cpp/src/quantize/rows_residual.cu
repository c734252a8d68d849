// The casts along rows that append the errors of chosen columns: residual channels.
#include "quantize/launch.cuh"

namespace fp4gemm {
namespace {

template <class Loader, class Cast, Cover kCover, bool kLooped, int kThreadsPerRow, int kBlocksPerThread>
bool launch_shape(RowLaunch const& launch) {
  using Shape = RowShape<Amax::kEither, kCover, false, kLooped, kThreadsPerRow, kBlocksPerThread, true>;
  return launch_rows<Loader, Cast, Shape>(launch);
}

/// As launch_dense does, for few and for many rows.
template <class Loader>
void launch_te(RowLaunch const& launch) {
  using Cast = TeCast<Range::kRegular>;
  constexpr int kDeep = kPlainDepth<Loader>;
  constexpr Cover kSingles = Cover::kSingles;
  constexpr Cover kQuads = Cover::kQuads;
  if (launch.params.m < 8 * launch.device.num_sms) {
    (void)(launch_shape<Loader, Cast, kSingles, false, 32, 1>(launch) ||
           launch_shape<Loader, Cast, kSingles, false, 128, 1>(launch) ||
           launch_shape<Loader, Cast, kSingles, false, 512, 1>(launch) ||
           launch_shape<Loader, Cast, kSingles, true, 1024, 1>(launch));
  } else {
    (void)(launch_shape<Loader, Cast, kQuads, false, 32, kDeep>(launch) ||
           launch_shape<Loader, Cast, kQuads, false, 128, kDeep>(launch) ||
           launch_shape<Loader, Cast, kQuads, true, 256, 2>(launch));
  }
}

template <class Loader, class Cast>
void launch_any(RowLaunch const& launch) {
  constexpr Cover kQuads = Cover::kQuads;
  (void)(launch_shape<Loader, Cast, kQuads, false, 32, 2>(launch) ||
         launch_shape<Loader, Cast, kQuads, false, 256, 2>(launch) ||
         launch_shape<Loader, Cast, kQuads, true, 256, 2>(launch));
}

}  // namespace

void launch_rows_residual(RowLaunch const& launch, bool four_over_six) {
  for_type(launch.dtype, [&](auto type) {
    using Loader = PlainLoader<decltype(type)>;
    if (four_over_six) {
      launch_any<Loader, FourOverSixCast<Range::kRegular>>(launch);
    } else if (launch.params.cast.te_per_token) {
      launch_any<Loader, VariantCast<Range::kRegular>>(launch);
    } else {
      launch_te<Loader>(launch);
    }
  });
}

}  // namespace fp4gemm
