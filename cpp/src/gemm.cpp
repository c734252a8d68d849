// The GEMM of the C interface: check the arguments, plan, convert operands if the kernel needs it, launch.
#include <string>

#include "activation.hpp"
#include "architecture.hpp"
#include "check.hpp"
#include "device.hpp"
#include "quantize/quantize.hpp"
#include "registry.hpp"
#include "select.hpp"

namespace fp4gemm {
namespace {

constexpr char const* kOutNames[] = {"bf16", "fp16", "fp32"};

/// Bytes of a (rows, k) fp16 operand in the workspace, rounded up to its alignment.
size_t decoded_bytes(int64_t rows, int64_t k) {
  return static_cast<size_t>(round_up(rows * k * 2, Rules::kWorkspaceBytes));
}

using Args = fp4gemm_gemm_args_t;

bool is_grouped(Args const& args) { return args.num_groups > 0; }
bool is_ragged_m(Args const& args) { return is_grouped(args) && args.ragged == FP4GEMM_RAGGED_M; }
bool is_ragged_k(Args const& args) { return is_grouped(args) && args.ragged == FP4GEMM_RAGGED_K; }
int64_t num_b(Args const& args) { return is_ragged_m(args) ? args.num_groups : 1; }
bool is_gated(Args const& args) { return fp4gemm::is_gated(args.activation); }
int64_t columns_of_d(Args const& args) { return is_gated(args) ? args.n / 2 : args.n; }
int64_t num_d(Args const& args) { return is_ragged_k(args) ? args.num_groups : 1; }

// ---- checks ----

fp4gemm_status_t check_formats(Args const& args) {
  fp4gemm_format_t const a = args.a.format;
  fp4gemm_format_t const b = args.b.format;
  FP4GEMM_CHECK(a == FP4GEMM_FORMAT_NVFP4 || a == FP4GEMM_FORMAT_FP16 || a == FP4GEMM_FORMAT_BF16,
                "a: format is %d, must be FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_FP16 or FP4GEMM_FORMAT_BF16",
                static_cast<int>(a));
  FP4GEMM_CHECK(
      b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_FP16 || b == FP4GEMM_FORMAT_PREPACKED,
      "b: format is %d, must be FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_FP16 or FP4GEMM_FORMAT_PREPACKED",
      static_cast<int>(b));
  FP4GEMM_CHECK(a != FP4GEMM_FORMAT_BF16 || b != FP4GEMM_FORMAT_FP16,
                "b: format is FP4GEMM_FORMAT_FP16, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_PREPACKED "
                "with a in FP4GEMM_FORMAT_BF16");
  FP4GEMM_CHECK(
      !is_ragged_k(args) || (a != FP4GEMM_FORMAT_BF16 && b != FP4GEMM_FORMAT_PREPACKED),
      "%s: format is %d, must be FP4GEMM_FORMAT_NVFP4 or FP4GEMM_FORMAT_FP16 for groups that are ragged in k",
      a == FP4GEMM_FORMAT_BF16 ? "a" : "b", static_cast<int>(a == FP4GEMM_FORMAT_BF16 ? a : b));
  return FP4GEMM_SUCCESS;
}

/// Checks the fields that make a GEMM dense or grouped.
fp4gemm_status_t check_groups(Args const& args) {
  FP4GEMM_CHECK(args.num_groups >= 0, "num_groups: is %d, must be 0 (dense) or more", args.num_groups);
  FP4GEMM_CHECK(args.ragged == FP4GEMM_RAGGED_M || args.ragged == FP4GEMM_RAGGED_K,
                "ragged: is %d, must be FP4GEMM_RAGGED_M or FP4GEMM_RAGGED_K", static_cast<int>(args.ragged));
  if (!is_grouped(args)) {
    FP4GEMM_CHECK(args.ragged == FP4GEMM_RAGGED_M, "ragged: is %d, must be FP4GEMM_RAGGED_M without groups",
                  static_cast<int>(args.ragged));
    FP4GEMM_CHECK(args.offs == nullptr, "offs: is %p, must be null without groups",
                  static_cast<void const*>(args.offs));
    FP4GEMM_CHECK(args.alpha_groups == nullptr, "alpha_groups: is %p, must be null without groups",
                  static_cast<void const*>(args.alpha_groups));
  }
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_activation(fp4gemm_activation_t activation) {
  if (activation_info(activation) != nullptr) {
    return FP4GEMM_SUCCESS;
  }
  std::string names;
  for (ActivationInfo const& row : kActivations) {
    names += (names.empty() ? "" : ", ") + std::to_string(row.number) + " (" + row.name + ")";
  }
  return fail(FP4GEMM_ERROR_INVALID_ARGUMENT, "activation: is %d, must be one of %s",
              static_cast<int>(activation), names.c_str());
}

char const* activation_name(Args const& args) { return activation_info(args.activation)->name; }

/// Checks the product of three sizes that are valid themselves; sums of bytes then fit in 64 bits.
fp4gemm_status_t check_elements(char const* name, int64_t matrices, int64_t rows, int64_t columns) {
  FP4GEMM_CHECK(product_is_at_most(Rules::kMaxElements, matrices, rows, columns),
                "%s: %lld matrices of (%lld, %lld) elements, must have at most %lld elements in all", name,
                ll(matrices), ll(rows), ll(columns), ll(Rules::kMaxElements));
  return FP4GEMM_SUCCESS;
}

/// Checks sizes, formats and types: all that the plan depends on. The pointers are checked later, since the
/// query of the workspace needs none.
fp4gemm_status_t check_problem(Args const& args) {
  FP4GEMM_TRY(check_groups(args));
  FP4GEMM_TRY(check_dtype("out_dtype", args.out_dtype));
  FP4GEMM_TRY(check_size("m", args.m, 0, 1));
  FP4GEMM_TRY(check_activation(args.activation));
  FP4GEMM_TRY(
      check_size("n", args.n, 0, Rules::kRowBytes / dtype_bytes(args.out_dtype) * (is_gated(args) ? 2 : 1)));
  if (is_ragged_k(args)) {
    FP4GEMM_TRY(check_size("k", args.k, 0, Rules::kGroupedK, Rules::kMaxK));
  } else {
    FP4GEMM_TRY(check_size("k", args.k, Rules::kGemmK, Rules::kGemmK, Rules::kMaxK));
  }
  FP4GEMM_CHECK(!is_gated(args) || args.c == nullptr, "c: is %p, must be null with the gated activation %s",
                args.c, activation_name(args));
  FP4GEMM_CHECK(!is_gated(args) || !is_ragged_k(args),
                "activation: is %s, must not be gated for groups that are ragged in k",
                activation_name(args));
  FP4GEMM_TRY(check_elements("a", 1, args.m, args.k));
  FP4GEMM_TRY(check_elements("b", num_b(args), args.n, args.k));
  FP4GEMM_TRY(check_elements("d", num_d(args), args.m, args.n));
  return check_formats(args);
}

fp4gemm_status_t check_operand(char const* name, char const* scale_name, fp4gemm_operand_t const& operand,
                               int64_t elems) {
  FP4GEMM_TRY(check_buffer(name, operand.data, elems));
  if (operand.format == FP4GEMM_FORMAT_NVFP4) {
    return check_buffer(scale_name, operand.scales, elems / 16);
  }
  FP4GEMM_CHECK(operand.scales == nullptr, "%s: is %p, must be null for an operand that is not nvfp4",
                scale_name, operand.scales);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t check_vector(char const* name, fp4gemm_vector_t const& vector, int64_t length,
                              bool may_be_number, bool may_differ) {
  if (vector.data == nullptr) {
    FP4GEMM_CHECK(vector.numel == 0 && vector.group_stride == 0,
                  "%s: data is null but numel is %lld and group_stride %lld, must be 0", name,
                  ll(vector.numel), ll(vector.group_stride));
    return FP4GEMM_SUCCESS;
  }
  if (may_be_number) {
    FP4GEMM_CHECK(vector.numel == 1 || vector.numel == length, "%s: numel is %lld, must be 1 or %lld", name,
                  ll(vector.numel), ll(length));
  } else {
    FP4GEMM_CHECK(vector.numel == length, "%s: numel is %lld, must be %lld", name, ll(vector.numel),
                  ll(length));
  }
  if (may_differ) {
    FP4GEMM_CHECK(vector.group_stride == 0 || vector.group_stride >= vector.numel,
                  "%s: group_stride is %lld, must be 0 or at least %lld", name, ll(vector.group_stride),
                  ll(vector.numel));
  } else {
    FP4GEMM_CHECK(vector.group_stride == 0, "%s: group_stride is %lld, must be 0", name,
                  ll(vector.group_stride));
  }
  return check_buffer(name, vector.data, vector.numel, sizeof(float));
}

fp4gemm_status_t check_pointers(Args const& args) {
  int const bytes = dtype_bytes(args.out_dtype);
  int64_t const out_elems = num_d(args) * args.m * columns_of_d(args);
  FP4GEMM_TRY(check_operand("a", "scale_a", args.a, args.m * args.k));
  FP4GEMM_TRY(check_operand("b", "scale_b", args.b, num_b(args) * args.n * args.k));
  FP4GEMM_TRY(check_vector("alpha_row", args.alpha_row, args.m, true, is_ragged_k(args)));
  FP4GEMM_TRY(check_vector("alpha_col", args.alpha_col, args.n, true, is_grouped(args)));
  FP4GEMM_TRY(check_vector("bias", args.bias, args.n, false, is_grouped(args)));
  if (is_grouped(args)) {
    FP4GEMM_TRY(check_buffer("offs", args.offs, args.num_groups, sizeof(int32_t)));
  }
  if (args.alpha_groups != nullptr) {
    FP4GEMM_TRY(check_buffer("alpha_groups", args.alpha_groups, args.num_groups, sizeof(float)));
  }
  if (args.c != nullptr) {
    FP4GEMM_TRY(check_buffer("c", args.c, out_elems));
    FP4GEMM_TRY(check_row_stride("c_row_stride", args.c_row_stride, args.n, bytes));
  } else {
    FP4GEMM_CHECK(args.c_row_stride == 0, "c_row_stride: is %lld, must be 0 without c",
                  ll(args.c_row_stride));
  }
  FP4GEMM_TRY(check_buffer("d", args.d, out_elems));
  return check_row_stride("d_row_stride", args.d_row_stride, columns_of_d(args), bytes);
}

// ---- the plan ----

/// What a call will do: the kernel, the conversions and the layout of the workspace. Offsets are in bytes.
struct Plan {
  Kernel const* kernel = nullptr;  // null: D has no elements
  DeviceProperties device;
  bool decode_a = false;
  bool decode_b = false;
  bool prepack_b = false;
  size_t b_offset = 0;
  size_t kernel_offset = 0;
  size_t total_bytes = 0;
};

constexpr char const* kFormatNames[] = {"nvfp4", "fp16", "bf16", "prepacked"};

/// The operand that is not NVFP4, for messages.
fp4gemm_operand_t const& special_operand(Args const& args) {
  return args.a.format != FP4GEMM_FORMAT_NVFP4 ? args.a : args.b;
}
char const* special_name(Args const& args) { return &special_operand(args) == &args.a ? "a" : "b"; }
char const* special_format(Args const& args) { return kFormatNames[special_operand(args).format]; }

fp4gemm_status_t select_kernel(Args const& args, int device, Plan* plan) {
  int const arch = plan->device.arch;
  Selection wanted{args.m,         args.n,        args.k,        args.num_groups,           args.ragged,
                   args.out_dtype, args.a.format, args.b.format, args.batch_invariant != 0, is_gated(args)};
  int const index = select_kernel(arch, plan->device.num_sms, wanted);
  if (index >= 0) {
    plan->kernel = kernel_at(index);
    return FP4GEMM_SUCCESS;
  }
  if (architecture_of(arch) != nullptr && is_gated(args) && args.out_dtype == FP4GEMM_FP32) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "out_dtype: is fp32, must be bf16 or fp16 with the gated activation %s",
                activation_name(args));
  }
  wanted.format_a = wanted.format_b = FP4GEMM_FORMAT_NVFP4;
  if (select_kernel(arch, plan->device.num_sms, wanted) >= 0) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "%s: format is %s, must be nvfp4 for the kernels of device %d, whose compute capability is "
                "%d.%d",
                special_name(args), special_format(args), device, arch / 10, arch % 10);
  }
  return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
              "device: %d has compute capability %d.%d, for which this build (%s) has no GEMM kernels; "
              "GEMM kernels exist for %s",
              device, arch / 10, arch % 10, fp4gemm_built_archs(), FP4GEMM_GEMM_DEVICES);
}

fp4gemm_status_t force_kernel(Args const& args, int device, Plan* plan) {
  int const arch = plan->device.arch;
  Kernel const* const kernel = find_kernel(args.kernel);
  FP4GEMM_CHECK(kernel != nullptr,
                "kernel: '%s' is not in this build, must be one of the kernel table's names", args.kernel);
  FP4GEMM_CHECK(kernel->is_grouped == is_grouped(args), "kernel: '%s' is %s, must be %s", args.kernel,
                kernel->info.mode, is_grouped(args) ? "grouped" : "dense");
  FP4GEMM_CHECK(kernel->is_gated == is_gated(args),
                "kernel: '%s' has the %s epilogue, must have a%s gated one for activation %s", args.kernel,
                kernel->info.epilogue, is_gated(args) ? "" : "n epilogue that is not", activation_name(args));
  FP4GEMM_CHECK(kernel->info.out_dtype == args.out_dtype, "kernel: '%s' writes %s, out_dtype is %s",
                args.kernel, kOutNames[kernel->info.out_dtype], kOutNames[args.out_dtype]);
  Architecture const* const served = architecture_of(arch);
  if (served == nullptr || served->arch != kernel->info.arch) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "kernel: '%s' does not run on device %d, whose compute capability is %d.%d", args.kernel,
                device, arch / 10, arch % 10);
  }
  plan->kernel = kernel;
  return FP4GEMM_SUCCESS;
}

/// The problem that the kernel solves; operands that are converted first are in the workspace.
Problem problem_of(Args const& args, Plan const& plan, char* workspace, int device) {
  Problem problem;
  problem.ragged = args.ragged;
  problem.m = args.m;
  problem.n = args.n;
  problem.k = args.k;
  problem.num_groups = args.num_groups;
  problem.offs = args.offs;
  problem.a = plan.decode_a ? workspace : args.a.data;
  problem.scale_a = args.a.scales;
  problem.b = plan.decode_b || plan.prepack_b ? workspace + plan.b_offset : args.b.data;
  problem.b_is_fresh = b_is_fresh(args.b_is_constant != 0, plan.decode_b || plan.prepack_b);
  problem.scale_b = args.b.scales;
  problem.alpha_row = args.alpha_row;
  problem.alpha_col = args.alpha_col;
  problem.alpha = args.alpha;
  problem.alpha_groups = args.alpha_groups;
  problem.bias = args.bias;
  problem.activation = args.activation;
  problem.c = args.c;
  problem.c_row_stride = args.c_row_stride;
  problem.beta = args.beta;
  problem.d = args.d;
  problem.d_row_stride = args.d_row_stride;
  problem.batch_invariant = args.batch_invariant != 0;
  problem.device = device;
  problem.num_sms = plan.device.num_sms;
  return problem;
}

/// Plans a call whose sizes, formats and types are valid (check_problem).
fp4gemm_status_t make_plan(Args const& args, int device, Plan* plan) {
  FP4GEMM_TRY(device_properties(device, &plan->device));
  FP4GEMM_TRY(args.kernel == nullptr ? select_kernel(args, device, plan) : force_kernel(args, device, plan));
  if (args.m == 0 || args.n == 0) {
    plan->kernel = nullptr;
    return FP4GEMM_SUCCESS;
  }
  Operands const operands = plan->kernel->operands;
  if (!accepts(operands, args.a.format, args.b.format)) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s reads %s operands, a is %s and b %s",
                plan->kernel->info.name, plan->kernel->info.operand, kFormatNames[args.a.format],
                kFormatNames[args.b.format]);
  }
  if (is_ragged_k(args) && operands == Operands::kPrepacked) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s does not support groups that are ragged in k",
                plan->kernel->info.name);
  }
  if (auto const check = architecture_of(plan->device.arch)->check_problem; check != nullptr) {
    FP4GEMM_TRY(check(problem_of(args, *plan, nullptr, device)));
  }
  bool const quantized_b = args.b.format == FP4GEMM_FORMAT_NVFP4;
  plan->decode_a = args.a.format == FP4GEMM_FORMAT_NVFP4 && operands != Operands::kNvfp4;
  plan->decode_b = quantized_b && operands == Operands::kFp16;
  plan->prepack_b = quantized_b && is_prepacked(operands);
  plan->b_offset = plan->decode_a ? decoded_bytes(args.m, args.k) : 0;
  plan->kernel_offset = plan->b_offset;
  if (plan->decode_b) {
    plan->kernel_offset += decoded_bytes(num_b(args) * args.n, args.k);
  } else if (plan->prepack_b) {
    plan->kernel_offset +=
        round_up(num_b(args) * fp4gemm_prepacked_bytes(args.n, args.k), Rules::kWorkspaceBytes);
  }
  plan->total_bytes =
      plan->kernel_offset + plan->kernel->workspace_bytes(problem_of(args, *plan, nullptr, device));
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t convert_operands(Args const& args, Plan const& plan, char* workspace,
                                  fp4gemm_stream_t stream) {
  DecodeJob a, b;
  if (plan.decode_a) {
    a = {args.m, static_cast<uint8_t const*>(args.a.data), static_cast<uint8_t const*>(args.a.scales),
         workspace};
    if (is_ragged_m(args)) {
      a.offs = args.offs;
      a.num_groups = args.num_groups;
    }
  }
  if (plan.decode_b) {
    b = {num_b(args) * args.n, static_cast<uint8_t const*>(args.b.data),
         static_cast<uint8_t const*>(args.b.scales), workspace + plan.b_offset};
    b.rows_per_matrix = is_ragged_m(args) ? args.n : 0;
  }
  if (args.k > 0 && (plan.decode_a || plan.decode_b)) {
    FP4GEMM_TRY(launch_decode(a, b, args.k, stream));
  }
  if (plan.prepack_b) {
    return launch_prepack(static_cast<int>(num_b(args)), args.n, args.k, args.b.data, args.b.scales,
                          workspace + plan.b_offset, stream);
  }
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t workspace_bytes(Args const* args, int device, size_t* bytes) {
  FP4GEMM_CHECK(bytes != nullptr, "bytes: is null, must point at the result");
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_problem(*args));
  Plan plan;
  FP4GEMM_TRY(make_plan(*args, device, &plan));
  *bytes = plan.total_bytes;
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t run(Args const* args, void* workspace, size_t workspace_bytes, int device,
                     fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_TRY(check_problem(*args));
  FP4GEMM_TRY(check_pointers(*args));
  Plan plan;
  FP4GEMM_TRY(make_plan(*args, device, &plan));
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
  FP4GEMM_TRY(convert_operands(*args, plan, bytes, stream));
  return plan.kernel->launch(problem_of(*args, plan, bytes, device), bytes + plan.kernel_offset, stream);
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_gemm_workspace_bytes(fp4gemm_gemm_args_t const* args, int device, size_t* bytes) {
  return fp4gemm::workspace_bytes(args, device, bytes);
}

fp4gemm_status_t fp4gemm_gemm(fp4gemm_gemm_args_t const* args, void* workspace, size_t workspace_bytes,
                              int device, fp4gemm_stream_t stream) {
  return fp4gemm::run(args, workspace, workspace_bytes, device, stream);
}

}  // extern "C"
