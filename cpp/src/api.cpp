// The queries of the C interface: versions, activations, architectures, the kernel table and the selection.
#include "activation.hpp"
#include "architecture.hpp"
#include "check.hpp"
#include "error.hpp"
#include "registry.hpp"
#include "select.hpp"

#define FP4GEMM_TEXT_OF(x) #x
#define FP4GEMM_TEXT(x) FP4GEMM_TEXT_OF(x)

extern "C" {

int fp4gemm_version(void) { return FP4GEMM_VERSION; }

char const* fp4gemm_version_string(void) {
  return FP4GEMM_TEXT(FP4GEMM_VERSION_MAJOR) "." FP4GEMM_TEXT(FP4GEMM_VERSION_MINOR) "." FP4GEMM_TEXT(
      FP4GEMM_VERSION_PATCH);
}

// The build defines these three macros.
int fp4gemm_cuda_version(void) { return FP4GEMM_CUDA_VERSION; }
char const* fp4gemm_cutlass_version(void) { return FP4GEMM_CUTLASS_VERSION; }
char const* fp4gemm_built_archs(void) { return FP4GEMM_BUILT_ARCHS; }

int fp4gemm_activation_count(void) { return fp4gemm::kNumActivations; }

fp4gemm_status_t fp4gemm_activation_info(int index, fp4gemm_activation_info_t* info) {
  FP4GEMM_CHECK(info != nullptr, "info: is null, must point at the result");
  FP4GEMM_CHECK(index >= 0 && index < fp4gemm::kNumActivations,
                "index: is %d, must be at least 0 and below %d", index, fp4gemm::kNumActivations);
  fp4gemm::ActivationInfo const& row = fp4gemm::kActivations[index];
  *info = {row.number, row.name, row.is_gated ? 1 : 0};
  return FP4GEMM_SUCCESS;
}

int fp4gemm_architecture_count(void) {
  int count = 0;
  while (fp4gemm::architectures()[count] != nullptr) {
    ++count;
  }
  return count;
}

fp4gemm_status_t fp4gemm_architecture_info(int index, fp4gemm_architecture_info_t* info) {
  FP4GEMM_CHECK(info != nullptr, "info: is null, must point at the result");
  FP4GEMM_CHECK(index >= 0 && index < fp4gemm_architecture_count(),
                "index: is %d, must be at least 0 and below %d", index, fp4gemm_architecture_count());
  fp4gemm::Architecture const& arch = *fp4gemm::architectures()[index];
  *info = {arch.arch, arch.devices, arch.is_executed ? 1 : 0};
  return FP4GEMM_SUCCESS;
}

int fp4gemm_kernel_arch(int device_arch) {
  fp4gemm::Architecture const* const arch = fp4gemm::architecture_of(device_arch);
  return arch == nullptr ? -1 : arch->arch;
}

int fp4gemm_kernel_count(void) { return fp4gemm::kernel_count(); }

fp4gemm_status_t fp4gemm_kernel_info(int index, fp4gemm_kernel_info_t* info) {
  FP4GEMM_CHECK(info != nullptr, "info: is null, must point at the result");
  fp4gemm::Kernel const* const kernel = fp4gemm::kernel_at(index);
  FP4GEMM_CHECK(kernel != nullptr, "index: is %d, must be at least 0 and below %d", index,
                fp4gemm::kernel_count());
  *info = kernel->info;
  return FP4GEMM_SUCCESS;
}

int fp4gemm_select_kernel(int arch, int num_sms, int64_t m, int64_t n, int64_t k, int num_groups,
                          fp4gemm_ragged_t ragged, fp4gemm_dtype_t out_dtype, fp4gemm_format_t format_a,
                          fp4gemm_format_t format_b, int batch_invariant, int use_fast_accum,
                          fp4gemm_activation_t activation) {
  bool const ragged_k = num_groups > 0 && ragged == FP4GEMM_RAGGED_K;
  using fp4gemm::Rules;
  bool const sound = num_sms > 0 && m >= 0 && m <= Rules::kMaxSize && n >= 0 && n <= Rules::kMaxSize &&
                     num_groups >= 0 && (k > 0 || (ragged_k && k == 0)) && k <= Rules::kMaxK;
  fp4gemm::Selection const wanted{m,
                                  n,
                                  k,
                                  num_groups,
                                  ragged,
                                  out_dtype,
                                  format_a,
                                  format_b,
                                  batch_invariant != 0,
                                  fp4gemm::is_gated(activation),
                                  use_fast_accum != 0};
  return sound ? fp4gemm::select_kernel(arch, num_sms, wanted) : -1;
}

}  // extern "C"
