// Uses fp4gemm from C++17: which kernel each device would use for a shape. Needs no GPU.
#include <fp4gemm/fp4gemm.h>

#include <iostream>
#include <string>

namespace {

std::string selected(int arch, int num_sms) {
  int const index =
      fp4gemm_select_kernel(arch, num_sms, 4096, 4096, 4096, /*num_groups=*/0, FP4GEMM_RAGGED_M, FP4GEMM_BF16,
                            FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_NVFP4,
                            /*batch_invariant=*/0, /*use_fast_accum=*/0, FP4GEMM_ACTIVATION_NONE);
  if (index < 0) {
    return "none";
  }
  fp4gemm_kernel_info_t info{};
  return fp4gemm_kernel_info(index, &info) == FP4GEMM_SUCCESS ? info.name : fp4gemm_last_error();
}

}  // namespace

int main() {
  std::string const archs = fp4gemm_built_archs();
  std::string const hopper = selected(90, 132);
  std::string const blackwell = selected(100, 148);
  std::cout << "9.0: " << hopper << "\n10.0: " << blackwell << "\n";
  // A device gets a kernel of its own family, or none where that was not built.
  bool const ok =
      (archs.find("90a") == std::string::npos ? hopper == "none" : hopper.rfind("sm90_dense_", 0) == 0) &&
      (archs.find("100f") == std::string::npos ? blackwell == "none"
                                               : blackwell.rfind("sm100_dense_", 0) == 0);
  return ok ? 0 : 1;
}
