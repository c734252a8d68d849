// Runs CUTLASS's grouped kernels with the default epilogue, for the tiles and layouts of this library's
// kernels. Usage: default_grouped N K M_0 M_1 ...
#include "default_kernels.hpp"

namespace {

using namespace calibration;
using Row = cutlass::layout::RowMajor;
using Column = cutlass::layout::ColumnMajor;
using Out = CALIBRATION_OUT;

template <class T>
struct OnDevice {
  cutlass::DeviceAllocation<T> memory;
  T* get() { return memory.get(); }
  void copy(std::vector<T> const& values) {
    memory.reset(values.size());
    memory.copy_from_host(values.data());
  }
};

template <class Case>
bool run(int n, int k, std::vector<int> const& rows) {
  using Shape3 = Shape<int, int, int>;
  std::vector<Matrices<Case>> all;
  for (size_t g = 0; g < rows.size(); ++g) {
    all.emplace_back(rows[g], n, k, 100 * static_cast<unsigned>(g) + 7);
  }
  auto const gather = [&](auto& to, auto const& get) {
    std::vector<std::decay_t<decltype(*to.get())>> values;
    for (auto& x : all) {
      values.push_back(get(x));
    }
    to.copy(values);
  };
  using CodeA = typename Case::Mainloop::ArrayElementA;
  using CodeB = typename Case::Mainloop::ArrayElementB;
  OnDevice<Shape3> shapes;
  OnDevice<CodeA const*> a;
  OnDevice<CodeB const*> b;
  OnDevice<typename Case::Scale const*> sfa, sfb;
  OnDevice<Out*> d;
  OnDevice<typename Case::StrideA> stride_a;
  OnDevice<typename Case::StrideB> stride_b;
  OnDevice<typename Case::StrideD> stride_d;
  OnDevice<typename Case::LayoutSf> layout_sfa, layout_sfb;
  gather(shapes, [](auto& x) { return Shape3{x.m, x.n, x.k}; });
  gather(a, [](auto& x) { return reinterpret_cast<CodeA const*>(x.a.device_data()); });
  gather(b, [](auto& x) { return reinterpret_cast<CodeB const*>(x.b.device_data()); });
  gather(sfa, [](auto& x) { return x.sfa.device_data(); });
  gather(sfb, [](auto& x) { return x.sfb.device_data(); });
  gather(d, [](auto& x) { return x.d.device_data(); });
  gather(stride_a, [](auto& x) { return x.stride_a; });
  gather(stride_b, [](auto& x) { return x.stride_b; });
  gather(stride_d, [](auto& x) { return x.stride_d; });
  gather(layout_sfa, [](auto& x) { return x.layout_sfa; });
  gather(layout_sfb, [](auto& x) { return x.layout_sfb; });

  float const alpha = 0.5f;
  typename Case::Gemm::Arguments arguments;
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {static_cast<int>(rows.size()), shapes.get(), nullptr};
  arguments.mainloop = {a.get(),   stride_a.get(),   b.get(),   stride_b.get(),
                        sfa.get(), layout_sfa.get(), sfb.get(), layout_sfb.get()};
  arguments.epilogue = {{}, nullptr, stride_d.get(), d.get(), stride_d.get()};
  arguments.epilogue.thread.alpha = alpha;
  arguments.epilogue.thread.beta = 0.0f;
  arguments.hw_info.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(0);
  bool passed = launch<Case>(arguments);
  for (auto& x : all) {
    passed = passed && x.verify(alpha);
  }
  return passed;
}

template <int M, int N, int ClusterM, int ClusterN, class LayoutD>
int check(char const* what, int n, int k, std::vector<int> const& rows) {
  return report(what, run<Case<M, N, ClusterM, ClusterN, Out, LayoutD, true>>(n, k, rows));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s N K M_0 M_1 ...\n", argv[0]);
    return 2;
  }
  int const n = std::atoi(argv[1]), k = std::atoi(argv[2]);
  std::vector<int> rows;
  for (int i = 3; i < argc; ++i) {
    rows.push_back(std::atoi(argv[i]));
  }
  int failed = 0;
#if defined(CALIBRATION_MXFP8) || defined(CALIBRATION_MXFP4) || defined(CALIBRATION_MXFP8_MXFP4)
  failed += check<128, 128, 1, 1, Row>("MX, 128x128, row-major D", n, k, rows);
#elif CALIBRATION_ARCH == 120
  failed += check<128, 128, 1, 1, Row>("128x128, row-major D", n, k, rows);
#else
  failed += check<128, 128, 1, 1, Row>("128x128, cluster 1x1, row-major D", n, k, rows);
  failed += check<128, 64, 1, 1, Column>("128x64, cluster 1x1, column-major D", n, k, rows);
  if constexpr (sizeof(Out) == 2) {
    failed += check<256, 256, 2, 1, Row>("256x256, cluster 2x1, row-major D", n, k, rows);
    failed += check<256, 128, 2, 1, Row>("256x128, cluster 2x1, row-major D", n, k, rows);
    failed += check<256, 128, 2, 1, Column>("256x128, cluster 2x1, column-major D", n, k, rows);
  } else {
    failed += check<256, 192, 2, 1, Row>("256x192, cluster 2x1, row-major D", n, k, rows);
  }
#endif
  std::printf("  %s\n", failed == 0 ? "All passed" : "Some failed");
  return failed;
}
