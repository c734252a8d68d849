// The epilogue's activations as a library for tests: their host code, for comparison with the reference.
#include "cutlass_evt/epilogue/activation.hpp"

/// out[i] = act(in[i]), or act(in[2i], in[2i+1]) for a gated activation, for n elements of `in`.
extern "C" __attribute__((visibility("default"))) void fp4gemm_test_activate(int kind, long n,
                                                                             float const* in, float* out) {
  auto const activation = static_cast<cutlass_evt::Activation>(kind);
  if (!cutlass_evt::is_gated(activation)) {
    for (long i = 0; i < n; ++i) {
      float one[1] = {in[i]};
      cutlass_evt::nodes::activate_all<1>(activation, one);
      out[i] = one[0];
    }
    return;
  }
  for (long i = 0; i + 1 < n; i += 2) {
    float pair[2] = {in[i], in[i + 1]};
    cutlass_evt::nodes::activate_pairs<2>(activation, pair);
    out[i / 2] = pair[0];
  }
}

extern "C" __attribute__((visibility("default"))) int fp4gemm_test_num_activations() {
  return static_cast<int>(cutlass_evt::Activation::kCount);
}
