// Runs CUTLASS's dense kernels with the default epilogue, for the tiles and layouts of this library's
// kernels. Usage: default_dense M N K
#include "default_kernels.hpp"

namespace {

using namespace calibration;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Out = CALIBRATION_OUT;

template <class Case>
bool run(int m, int n, int k) {
  Matrices<Case> x(m, n, k, 2026);
  float const alpha = 0.5f;
  typename Case::Gemm::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {m, n, k, 1},
      {x.a.device_data(), x.stride_a, x.b.device_data(), x.stride_b, x.sfa.device_data(), x.layout_sfa,
       x.sfb.device_data(), x.layout_sfb},
      {{}, nullptr, x.stride_d, x.d.device_data(), x.stride_d}};
  arguments.epilogue.thread.alpha = alpha;
  arguments.epilogue.thread.beta = 0.0f;
  arguments.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
  return launch<Case>(arguments) && x.verify(alpha);
}

template <int M, int N, int ClusterM, int ClusterN, class LayoutD>
int check(char const* what, int m, int n, int k) {
  return report(what, run<Case<M, N, ClusterM, ClusterN, Out, LayoutD, false>>(m, n, k));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: %s M N K\n", argv[0]);
    return 2;
  }
  int const m = std::atoi(argv[1]), n = std::atoi(argv[2]), k = std::atoi(argv[3]);
  int failed = 0;
#if defined(CALIBRATION_MXFP8) || defined(CALIBRATION_MXFP4)
  failed += check<128, 128, 1, 1, Row>("MX, 128x128, row-major D", m, n, k);
#elif CALIBRATION_ARCH == 120
  failed += check<128, 128, 1, 1, Row>("128x128, row-major D", m, n, k);
  if constexpr (sizeof(Out) == 2) {
    failed += check<256, 128, 1, 1, Row>("256x128, row-major D", m, n, k);
  }
#else
  failed += check<256, 192, 2, 1, Row>("256x192, cluster 2x1, row-major D", m, n, k);
  failed += check<256, 128, 2, 1, Row>("256x128, cluster 2x1, row-major D", m, n, k);
  failed += check<128, 128, 1, 1, Row>("128x128, cluster 1x1, row-major D", m, n, k);
  failed += check<128, 64, 1, 1, Column>("128x64, cluster 1x1, column-major D", m, n, k);
  if constexpr (sizeof(Out) == 2) {
    failed += check<256, 256, 2, 1, Row>("256x256, cluster 2x1, row-major D", m, n, k);
    failed += check<128, 256, 1, 1, Row>("128x256, cluster 1x1, row-major D", m, n, k);
    failed += check<128, 64, 1, 1, Row>("128x64, cluster 1x1, row-major D", m, n, k);
    failed += check<256, 64, 2, 1, Column>("256x64, cluster 2x1, column-major D", m, n, k);
  }
#endif
  std::printf("  %s\n", failed == 0 ? "All passed" : "Some failed");
  return failed;
}
