// The C interface of the dense GEMM, the kernel table and the versions.
#include "check.hpp"
#include "device.hpp"
#include "quantize/quantize.hpp"
#include "registry.hpp"
#include "select.hpp"

namespace fp4gemm {
namespace {

constexpr char const* kOutNames[] = {"bf16", "fp16", "fp32"};

size_t round_up(size_t size) {
  return (size + Rules::kWorkspaceBytes - 1) / Rules::kWorkspaceBytes * Rules::kWorkspaceBytes;
}

/// What a call will do: the kernel, and where its workspace lies. Offsets are in bytes.
struct Plan {
  Kernel const* kernel = nullptr;  // null: D has no elements
  DeviceProperties device;
  bool decode_a = false;
  bool decode_b = false;
  size_t a_offset = 0;
  size_t b_offset = 0;
  size_t kernel_offset = 0;
  size_t total_bytes = 0;
};

fp4gemm_status_t check_format(char const* name, fp4gemm_operand_t const& operand) {
  FP4GEMM_CHECK(operand.format == FP4GEMM_FORMAT_NVFP4 || operand.format == FP4GEMM_FORMAT_FP16,
                "%s: format is %d, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_FP16", name,
                static_cast<int>(operand.format));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_operand(char const* name, char const* scale_name, fp4gemm_operand_t const& operand,
                               int64_t elems) {
  FP4GEMM_TRY(check_buffer(name, operand.data, elems));
  if (operand.format == FP4GEMM_FORMAT_NVFP4) {
    return check_buffer(scale_name, operand.scales, elems / 16);
  }
  FP4GEMM_CHECK(operand.scales == nullptr, "%s: is %p, must be null for an fp16 operand", scale_name,
                operand.scales);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_vector(char const* name, fp4gemm_vector_t const& vector, int64_t length) {
  if (vector.data == nullptr) {
    FP4GEMM_CHECK(vector.numel == 0, "%s: data is null but numel is %lld, must be 0", name, ll(vector.numel));
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(vector.numel == 1 || vector.numel == length, "%s: numel is %lld, must be 1 or %lld", name,
                ll(vector.numel), ll(length));
  return check_buffer(name, vector.data, vector.numel, sizeof(float));
}

/// Sizes, formats and types: all that the plan depends on.
fp4gemm_status_t check_problem(fp4gemm_dense_args_t const& args) {
  FP4GEMM_TRY(check_dtype("out_dtype", args.out_dtype));
  FP4GEMM_TRY(check_size("m", args.m, 0, 1));
  FP4GEMM_TRY(check_size("n", args.n, 0, Rules::kRowBytes / dtype_bytes(args.out_dtype)));
  FP4GEMM_TRY(check_size("k", args.k, Rules::kGemmK, Rules::kGemmK, Rules::kMaxK));
  FP4GEMM_TRY(check_format("a", args.a));
  FP4GEMM_TRY(check_format("b", args.b));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_pointers(fp4gemm_dense_args_t const& args) {
  FP4GEMM_TRY(check_operand("a", "scale_a", args.a, args.m * args.k));
  FP4GEMM_TRY(check_operand("b", "scale_b", args.b, args.n * args.k));
  FP4GEMM_TRY(check_vector("alpha_row", args.alpha_row, args.m));
  FP4GEMM_TRY(check_vector("alpha_col", args.alpha_col, args.n));
  if (args.bias != nullptr) {
    FP4GEMM_TRY(check_buffer("bias", args.bias, args.n, sizeof(float)));
  }
  FP4GEMM_TRY(check_buffer("d", args.d, args.m * args.n));
  return check_row_stride("d_row_stride", args.d_row_stride, args.n, dtype_bytes(args.out_dtype));
}

/// FP16 if an operand is decoded already.
fp4gemm_format_t format_of(fp4gemm_dense_args_t const& args) {
  return args.a.format == FP4GEMM_FORMAT_FP16 ? args.a.format : args.b.format;
}

fp4gemm_status_t choose_kernel(fp4gemm_dense_args_t const& args, int device, Plan* plan) {
  int const arch = plan->device.arch;
  if (args.kernel == nullptr) {
    int const index =
        select_kernel(arch, plan->device.num_sms, args.m, args.n, args.k, args.out_dtype, format_of(args));
    if (index < 0 && format_of(args) == FP4GEMM_FORMAT_FP16 &&
        select_kernel(arch, plan->device.num_sms, args.m, args.n, args.k, args.out_dtype,
                      FP4GEMM_FORMAT_NVFP4) >= 0) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                  "%s: format is fp16; the kernels of device %d, whose compute capability is %d.%d, take "
                  "packed nvfp4",
                  args.a.format == FP4GEMM_FORMAT_FP16 ? "a" : "b", device, arch / 10, arch % 10);
    }
    if (index < 0) {
      return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                  "device: %d has compute capability %d.%d, for which this build (%s) has no GEMM kernels; "
                  "GEMM kernels exist for 9.0, 10.0 "
                  "and 10.3",
                  device, arch / 10, arch % 10, fp4gemm_built_archs());
    }
    plan->kernel = &kernel_at(index);
    return FP4GEMM_SUCCESS;
  }
  Kernel const* const kernel = find_kernel(args.kernel);
  FP4GEMM_CHECK(kernel != nullptr,
                "kernel: '%s' is not in this build, must be one of the kernel table's names", args.kernel);
  FP4GEMM_CHECK(kernel->info.out_dtype == args.out_dtype, "kernel: '%s' writes %s, out_dtype is %s",
                args.kernel, kOutNames[kernel->info.out_dtype], kOutNames[args.out_dtype]);
  if (!serves(kernel->info.arch, arch)) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "kernel: '%s' does not run on device %d, whose compute capability is %d.%d", args.kernel,
                device, arch / 10, arch % 10);
  }
  plan->kernel = kernel;
  return FP4GEMM_SUCCESS;
}

/// What the kernel is asked to do; operands that are decoded first lie in the workspace.
DenseProblem problem_of(fp4gemm_dense_args_t const& args, Plan const& plan, char* workspace, int device) {
  DenseProblem problem;
  problem.m = args.m;
  problem.n = args.n;
  problem.k = args.k;
  problem.a = plan.decode_a ? workspace + plan.a_offset : args.a.data;
  problem.scale_a = args.a.scales;
  problem.b = plan.decode_b ? workspace + plan.b_offset : args.b.data;
  problem.scale_b = args.b.scales;
  problem.alpha_row = args.alpha_row;
  problem.alpha_col = args.alpha_col;
  problem.alpha = args.alpha;
  problem.bias = args.bias;
  problem.d = args.d;
  problem.d_row_stride = args.d_row_stride;
  problem.device = device;
  problem.num_sms = plan.device.num_sms;
  return problem;
}

fp4gemm_status_t make_plan(fp4gemm_dense_args_t const* args, int device, Plan* plan) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_problem(*args));
  FP4GEMM_TRY(device_properties(device, &plan->device));
  FP4GEMM_TRY(choose_kernel(*args, device, plan));
  if (args->m == 0 || args->n == 0) {
    plan->kernel = nullptr;
    return FP4GEMM_SUCCESS;
  }
  if (plan->kernel->operand == FP4GEMM_FORMAT_FP16) {
    plan->decode_a = args->a.format == FP4GEMM_FORMAT_NVFP4;
    plan->decode_b = args->b.format == FP4GEMM_FORMAT_NVFP4;
  } else if (args->a.format == FP4GEMM_FORMAT_FP16 || args->b.format == FP4GEMM_FORMAT_FP16) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "%s: format is fp16, kernel %s multiplies nvfp4 operands",
                args->a.format == FP4GEMM_FORMAT_FP16 ? "a" : "b", plan->kernel->info.name);
  }
  size_t const row_bytes = static_cast<size_t>(args->k) * 2;
  plan->b_offset = plan->decode_a ? round_up(static_cast<size_t>(args->m) * row_bytes) : 0;
  plan->kernel_offset =
      plan->b_offset + (plan->decode_b ? round_up(static_cast<size_t>(args->n) * row_bytes) : 0);
  plan->total_bytes =
      plan->kernel_offset + plan->kernel->workspace_bytes(problem_of(*args, *plan, nullptr, device));
  return FP4GEMM_SUCCESS;
}

DecodeJob decode_job(bool wanted, int64_t rows, fp4gemm_operand_t const& operand, void* y) {
  if (!wanted) {
    return {};
  }
  return {rows, static_cast<uint8_t const*>(operand.data), static_cast<uint8_t const*>(operand.scales), y};
}

fp4gemm_status_t dense(fp4gemm_dense_args_t const* args, void* workspace, size_t workspace_bytes, int device,
                       fp4gemm_stream_t stream) {
  Plan plan;
  FP4GEMM_TRY(make_plan(args, device, &plan));
  FP4GEMM_TRY(check_pointers(*args));
  if (plan.kernel == nullptr) {
    return FP4GEMM_SUCCESS;
  }
  if (workspace_bytes < plan.total_bytes || (workspace == nullptr && plan.total_bytes > 0)) {
    return fail(FP4GEMM_ERROR_WORKSPACE, "workspace: has %lld bytes at %p, must have %lld",
                ll(static_cast<int64_t>(workspace_bytes)), workspace,
                ll(static_cast<int64_t>(plan.total_bytes)));
  }
  if (!is_aligned(workspace, Rules::kWorkspaceBytes)) {
    return fail(FP4GEMM_ERROR_WORKSPACE, "workspace: is %p, must be %d-byte aligned", workspace,
                Rules::kWorkspaceBytes);
  }
  DeviceGuard const guard(device);
  FP4GEMM_TRY(guard.status());
  char* const bytes = static_cast<char*>(workspace);
  if (plan.decode_a || plan.decode_b) {
    FP4GEMM_TRY(launch_decode(decode_job(plan.decode_a, args->m, args->a, bytes + plan.a_offset),
                              decode_job(plan.decode_b, args->n, args->b, bytes + plan.b_offset), args->k,
                              stream));
  }
  return plan.kernel->launch(problem_of(*args, plan, bytes, device), bytes + plan.kernel_offset, stream);
}

}  // namespace
}  // namespace fp4gemm

#define FP4GEMM_TEXT_OF(x) #x
#define FP4GEMM_TEXT(x) FP4GEMM_TEXT_OF(x)

extern "C" {

int fp4gemm_version(void) { return FP4GEMM_VERSION; }

char const* fp4gemm_version_string(void) {
  return FP4GEMM_TEXT(FP4GEMM_VERSION_MAJOR) "." FP4GEMM_TEXT(FP4GEMM_VERSION_MINOR) "." FP4GEMM_TEXT(
      FP4GEMM_VERSION_PATCH);
}

// The build passes these three.
int fp4gemm_cuda_version(void) { return FP4GEMM_CUDA_VERSION; }
char const* fp4gemm_cutlass_version(void) { return FP4GEMM_CUTLASS_VERSION; }
char const* fp4gemm_built_archs(void) { return FP4GEMM_BUILT_ARCHS; }

fp4gemm_status_t fp4gemm_dense_workspace_bytes(fp4gemm_dense_args_t const* args, int device, size_t* bytes) {
  FP4GEMM_CHECK(bytes != nullptr, "bytes: is null, must point at the result");
  fp4gemm::Plan plan;
  FP4GEMM_TRY(fp4gemm::make_plan(args, device, &plan));
  *bytes = plan.total_bytes;
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t fp4gemm_dense(fp4gemm_dense_args_t const* args, void* workspace, size_t workspace_bytes,
                               int device, fp4gemm_stream_t stream) {
  return fp4gemm::dense(args, workspace, workspace_bytes, device, stream);
}

int fp4gemm_kernel_count(void) { return fp4gemm::kernel_count(); }

fp4gemm_status_t fp4gemm_kernel_info(int index, fp4gemm_kernel_info_t* info) {
  FP4GEMM_CHECK(info != nullptr, "info: is null, must point at the result");
  FP4GEMM_CHECK(index >= 0 && index < fp4gemm::kernel_count(),
                "index: is %d, must be at least 0 and below %d", index, fp4gemm::kernel_count());
  *info = fp4gemm::kernel_at(index).info;
  return FP4GEMM_SUCCESS;
}

int fp4gemm_select_kernel(int arch, int num_sms, int64_t m, int64_t n, int64_t k, fp4gemm_dtype_t out_dtype,
                          fp4gemm_format_t format) {
  bool const sound = num_sms > 0 && m >= 0 && n >= 0 && k > 0;
  return sound ? fp4gemm::select_kernel(arch, num_sms, m, n, k, out_dtype, format) : -1;
}

}  // extern "C"
