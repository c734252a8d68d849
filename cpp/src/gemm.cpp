// The GEMM of the C interface: check the arguments, plan, convert operands if the kernel needs it, launch.
#include "architecture.hpp"
#include "figures.hpp"
#include "gemm_plan.hpp"
#include "generated.hpp"
#include "quantize/prepacked_order.hpp"
#include "registry.hpp"
#include "select.hpp"

namespace fp4gemm {
namespace {

constexpr char const* kOutNames[] = {"bf16", "fp16", "fp32"};

/// Bytes of a (rows, k) fp16 operand in the workspace, rounded up to its alignment.
size_t decoded_bytes(int64_t rows, int64_t k) {
  return static_cast<size_t>(round_up(rows * k * 2, Rules::kWorkspaceBytes));
}

// ---- the plan ----

constexpr char const* kFormatNames[] = {"nvfp4", "fp16",          "bf16",  "prepacked", "fp32",
                                        "e4m3",  "prepacked_fp8", "mxfp8", "mxfp4"};

/// The operand that is not NVFP4, for messages.
fp4gemm_operand_t const& special_operand(GemmArgs const& args) {
  return args.a.format != FP4GEMM_FORMAT_NVFP4 && !quantizes_a(args) ? args.a : args.b;
}
char const* special_name(GemmArgs const& args) { return &special_operand(args) == &args.a ? "a" : "b"; }
char const* special_format(GemmArgs const& args) { return kFormatNames[special_operand(args).format]; }

/// The format in which a kernel gets A. An A that the call quantizes becomes e4m3, or NVFP4 for a kernel that
/// reads NVFP4, or else fp16.
fp4gemm_format_t format_of_a(GemmArgs const& args, bool reads_nvfp4) {
  return !quantizes_a(args)         ? args.a.format
         : quantizes_a_to_fp8(args) ? FP4GEMM_FORMAT_E4M3
         : reads_nvfp4              ? FP4GEMM_FORMAT_NVFP4
                                    : FP4GEMM_FORMAT_FP16;
}

/// The order of B for kernels that read prepacked weights.
PrepackedOrder const& order_of(Operands operands) {
  return operands == Operands::kPrepackedFp8 ? kOrderForFp8 : kOrderForFp16;
}

/// Sets plan->kernel to the one that the cost model selects. Where none suits, the error names the reason
/// that the caller can change: the output type, the format of an operand, or the device.
fp4gemm_status_t select_kernel(GemmArgs const& args, int device, GemmPlan* plan) {
  int const arch = plan->device.arch;
  // Where tensor cores read NVFP4, kernels that read NVFP4 are preferred for an NVFP4 B.
  Architecture const* const served = architecture_of(arch);
  bool const as_nvfp4 = served != nullptr && served->policy->has_fp4 && args.b.format == FP4GEMM_FORMAT_NVFP4;
  Selection wanted{args.m,
                   args.n,
                   args.k,
                   args.num_groups,
                   args.ragged,
                   args.out_dtype,
                   format_of_a(args, as_nvfp4),
                   args.b.format,
                   args.batch_invariant != 0,
                   is_gated(args),
                   args.use_fast_accum != 0,
                   args.generated != nullptr};
  int index = select_kernel(arch, plan->device.num_sms, wanted);
  if (index < 0 && !as_nvfp4) {
    wanted.format_a = format_of_a(args, /*reads_nvfp4=*/true);
    index = select_kernel(arch, plan->device.num_sms, wanted);
  }
  if (index >= 0) {
    plan->kernel = kernel_at(index);
    return FP4GEMM_SUCCESS;
  }
  if (served != nullptr && served->generated == nullptr && args.generated != nullptr) {
    return fail(
        FP4GEMM_ERROR_NOT_SUPPORTED,
        "device: %d has compute capability %d.%d, must be 9.0 for an epilogue that is compiled at run "
        "time",
        device, arch / 10, arch % 10);
  }
  if (served != nullptr && is_gated(args) && args.out_dtype == FP4GEMM_FP32) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "out_dtype: is fp32, must be bf16 or fp16 with the gated activation %s",
                activation_name(args));
  }
  bool const is_fp8 = wanted.format_a == FP4GEMM_FORMAT_E4M3;
  wanted.format_a = wanted.format_b = FP4GEMM_FORMAT_NVFP4;
  if (is_fp8 && select_kernel(arch, plan->device.num_sms, wanted) >= 0) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "a: is e4m3, must be nvfp4 for the kernels of device %d, whose compute capability is %d.%d; "
                "only kernels for 9.0 multiply FP8 tokens by NVFP4 weights",
                device, arch / 10, arch % 10);
  }
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

/// Sets plan->kernel to the one that args.kernel names, if it computes the problem on this device at all. The
/// cost model is not asked; plan_gemm checks the formats of the operands.
fp4gemm_status_t force_kernel(GemmArgs const& args, int device, GemmPlan* plan) {
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
  FP4GEMM_CHECK(
      args.use_fast_accum != 0 || kernel->info.fast_accum == 0,
      "use_fast_accum: is 0, must be 1 with kernel '%s', which keeps sums in the accumulators of the "
      "tensor cores",
      args.kernel);
  Architecture const* const served = architecture_of(arch);
  if (served == nullptr || served->arch != kernel->info.arch) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "kernel: '%s' does not run on device %d, whose compute capability is %d.%d", args.kernel,
                device, arch / 10, arch % 10);
  }
  if (args.generated != nullptr && generated_tile(*served, *kernel, args.ragged) < 0) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED,
                "kernel: '%s' has no form with an epilogue that is compiled at run time", args.kernel);
  }
  plan->kernel = kernel;
  return FP4GEMM_SUCCESS;
}

/// The amaxes of an A that the call quantizes: those of groups are repeated for their rows.
int64_t num_amaxes(GemmArgs const& args) {
  return args.quantize_a == FP4GEMM_QUANTIZE_A_TENSOR && !is_grouped(args) ? 1 : args.m;
}

/// The factors of the rows of an MX operand that is decoded: those of `given` times the powers of two by
/// which the rows were decoded. `rows` are those of one matrix, of which there are `matrices`. Where `given`
/// differs between groups that are ragged in k, so does the result.
struct DecodedFactors {
  int64_t rows;
  int64_t matrices;
  cutlass_evt::EpilogueVector given;
  int num_given;

  DecodedFactors(GemmArgs const& args, bool of_a)
      : rows(of_a ? args.m : args.n),
        matrices(of_a ? 1 : num_b(args)),
        given(of_a ? epilogue_of(args).per_row[cutlass_evt::kAlphaRow]
                   : epilogue_of(args).per_column[cutlass_evt::kAlphaCol]),
        num_given(is_ragged_k(args) && given.data != nullptr && given.group_stride > 0 ? args.num_groups
                                                                                       : 1) {}

  int64_t size() const { return num_given * matrices * rows; }
  cutlass_evt::EpilogueVector in(float const* factors) const {
    return {factors, num_given > 1 || matrices > 1 ? rows : 0, true};
  }
};

/// The problem that the kernel solves; operands that are converted first are in the workspace.
Problem problem_of(GemmArgs const& args, GemmPlan const& plan, char* workspace, int device) {
  Problem problem;
  problem.ragged = args.ragged;
  problem.m = args.m;
  problem.n = args.n;
  problem.k = args.k;
  problem.num_groups = args.num_groups;
  problem.offs = args.offs;
  problem.group_columns = Rules::group_columns(args.a.format);
  problem.a = plan.decode_a || plan.quantize_a ? workspace : args.a.data;
  problem.scale_a = args.a.scales;
  problem.epilogue = epilogue_of(args);
  if (plan.quantize_a) {
    problem.scale_a = plan.format_a == FP4GEMM_FORMAT_NVFP4 ? workspace + plan.scale_a_offset : nullptr;
    problem.epilogue.per_row[cutlass_evt::kAlphaRow] = {
        reinterpret_cast<float const*>(workspace + plan.amax_offset), 0, num_amaxes(args) != 1};
  } else if (quantizes_a(args)) {
    problem.quantizes_a = true;
    problem.a_dtype = a_dtype(args);
    problem.a_row_stride = a_row_stride(args);
  }
  bool const converts_b = plan.decode_b || plan.prepack_b || plan.expand_b;
  problem.b = converts_b ? workspace + plan.b_offset : args.b.data;
  problem.b_is_fresh = b_is_fresh(args.b_is_constant != 0, converts_b);
  problem.scale_b = args.b.scales;
  if (plan.decode_mx) {
    auto const at = [&](size_t offset) { return reinterpret_cast<float const*>(workspace + offset); };
    problem.a = workspace;
    problem.b = workspace + plan.b_offset;
    problem.scale_a = problem.scale_b = nullptr;
    problem.b_is_fresh = true;
    problem.epilogue.per_row[cutlass_evt::kAlphaRow] =
        DecodedFactors(args, true).in(at(plan.row_factors_offset));
    problem.epilogue.per_column[cutlass_evt::kAlphaCol] =
        DecodedFactors(args, false).in(at(plan.column_factors_offset));
  }
  problem.batch_invariant = args.batch_invariant != 0;
  problem.device = device;
  problem.num_sms = plan.device.num_sms;
  return problem;
}

/// Whether the selected kernel quantizes A itself (Problem::quantizes_a), which saves the launch of a
/// quantizer: if it can (MeasuredFigures::most_quantized), if all tokens are in one tile, and if they are so
/// few that the launch would take longer.
bool kernel_quantizes_a(Kernel const& kernel, Problem const& p) {
  return kernel.figures != nullptr && !kernel.is_grouped && p.a_dtype != FP4GEMM_FP32 &&
         p.m <= kernel.info.tile_m && p.m * round_up(p.k, kPrepackedChunk) <= kernel.figures->most_quantized;
}

/// Plans the conversion of A, which lies at the begin of the workspace: its values or codes, then its scales
/// and amaxes.
void plan_a(GemmArgs const& args, int device, GemmPlan* plan) {
  plan->quantize_a =
      quantizes_a(args) && (args.quantize_a != FP4GEMM_QUANTIZE_A_ROW || args.a_rows != nullptr ||
                            !is_default(plan->cast) || args.generated != nullptr ||
                            !kernel_quantizes_a(*plan->kernel, problem_of(args, *plan, nullptr, device)));
  plan->decode_a = args.a.format == FP4GEMM_FORMAT_NVFP4 && plan->kernel->operands != Operands::kNvfp4;
  plan->decode_mx = is_mx(args.a.format) && plan->kernel->operands == Operands::kFp16;
  size_t bytes = 0;
  auto const take = [&](int64_t more) {
    bytes += static_cast<size_t>(round_up(more, Rules::kWorkspaceBytes));
    return bytes;
  };
  bool const codes = plan->quantize_a && plan->format_a == FP4GEMM_FORMAT_NVFP4;
  bool const fp8 = plan->quantize_a && plan->format_a == FP4GEMM_FORMAT_E4M3;
  if (plan->decode_mx) {
    take(args.m * args.k * 2);
    plan->row_factors_offset = bytes;
    take(DecodedFactors(args, true).size() * static_cast<int64_t>(sizeof(float)));
    plan->column_factors_offset = bytes;
    take(DecodedFactors(args, false).size() * static_cast<int64_t>(sizeof(float)));
  }
  if (plan->decode_a || plan->quantize_a) {
    plan->scale_a_offset = take(args.m * args.k * 2 / (codes ? 4 : fp8 ? 2 : 1));
  }
  if (plan->quantize_a) {
    int64_t const scale_rows =
        is_grouped(args) ? fp4gemm_grouped_scale_rows(args.m, args.num_groups) : scale_rows_of(args.m);
    plan->amax_offset = take(codes ? scale_rows * num_words_of(args.k / kBlock) * kScaleWord : 0);
    take(num_amaxes(args) * static_cast<int64_t>(sizeof(float)));
  }
  plan->b_offset = bytes;
}

}  // namespace

bool is_default(fp4gemm_cast_t const& cast) {
  return cast.encode == FP4GEMM_ENCODE_TE && cast.four_over_six == FP4GEMM_FOUR_OVER_SIX_NONE &&
         cast.num_residual_channels == 0;
}

fp4gemm_status_t check_cast(char const* prefix, fp4gemm_cast_t const& cast, fp4gemm_quantize_a_t quantize_a,
                            bool gathers) {
  FP4GEMM_CHECK(cast.encode == FP4GEMM_ENCODE_TE || cast.encode == FP4GEMM_ENCODE_TE_PER_TOKEN,
                "%sencode: is %d, must be a fp4gemm_encode_t", prefix, static_cast<int>(cast.encode));
  FP4GEMM_CHECK(
      cast.four_over_six >= FP4GEMM_FOUR_OVER_SIX_NONE && cast.four_over_six <= FP4GEMM_FOUR_OVER_SIX_MSE,
      "%sfour_over_six: is %d, must be a fp4gemm_four_over_six_t", prefix,
      static_cast<int>(cast.four_over_six));
  bool const four_over_six = cast.four_over_six != FP4GEMM_FOUR_OVER_SIX_NONE;
  FP4GEMM_CHECK(cast.e4m3_max == 448 || (cast.e4m3_max == 256 && four_over_six),
                "%se4m3_max: is %d, must be 448, or 256 with four_over_six", prefix, cast.e4m3_max);
  FP4GEMM_CHECK(cast.fast_error == 0 || (cast.fast_error == 1 && four_over_six),
                "%sfast_error: is %d, must be 0, or 1 with four_over_six", prefix, cast.fast_error);
  FP4GEMM_CHECK(!four_over_six || cast.encode == FP4GEMM_ENCODE_TE,
                "%sencode: is %d, must be FP4GEMM_ENCODE_TE with four_over_six", prefix,
                static_cast<int>(cast.encode));
  if (is_default(cast)) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(quantize_a == FP4GEMM_QUANTIZE_A_ROW || quantize_a == FP4GEMM_QUANTIZE_A_TENSOR,
                "quantize_a: is %d, must be FP4GEMM_QUANTIZE_A_ROW or FP4GEMM_QUANTIZE_A_TENSOR with a cast",
                static_cast<int>(quantize_a));
  FP4GEMM_CHECK(!gathers,
                "a_rows: is given, must be null with %sencode, %sfour_over_six or %sresidual_channels",
                prefix, prefix, prefix);
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t plan_gemm(GemmArgs const& args, int device, GemmPlan* plan) {
  FP4GEMM_TRY(device_properties(device, &plan->device));
  FP4GEMM_TRY(args.kernel == nullptr ? select_kernel(args, device, plan) : force_kernel(args, device, plan));
  if (args.m == 0 || args.n == 0) {
    plan->kernel = nullptr;
    return FP4GEMM_SUCCESS;
  }
  Operands const operands = plan->kernel->operands;
  plan->format_a = format_of_a(args, operands == Operands::kNvfp4);
  if (!accepts(operands, plan->format_a, args.b.format)) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s reads %s operands, a is %s and b %s",
                plan->kernel->info.name, plan->kernel->info.operand, kFormatNames[plan->format_a],
                kFormatNames[args.b.format]);
  }
  if (is_ragged_k(args) && is_prepacked(operands)) {
    return fail(FP4GEMM_ERROR_NOT_SUPPORTED, "kernel: %s does not support groups that are ragged in k",
                plan->kernel->info.name);
  }
  FP4GEMM_CHECK(operands != Operands::kMxfp8Mxfp4 || args.k % Rules::kUnpackedK == 0,
                "k: is %lld, must be a multiple of %d for %s, or the kernel must be another: its "
                "tensor maps have no other rows of b",
                ll(args.k), Rules::kUnpackedK, plan->kernel->info.name);
  if (auto const check = architecture_of(plan->device.arch)->check_problem; check != nullptr) {
    FP4GEMM_TRY(check(problem_of(args, *plan, nullptr, device)));
  }
  plan_a(args, device, plan);
  bool const quantized_b = args.b.format == FP4GEMM_FORMAT_NVFP4;
  plan->decode_b = quantized_b && operands == Operands::kFp16;
  plan->prepack_b = quantized_b && is_prepacked(operands);
  plan->expand_b = operands == Operands::kMxfp8 && args.b.format == FP4GEMM_FORMAT_MXFP4;
  plan->kernel_offset = plan->b_offset;
  if (plan->decode_b || plan->decode_mx) {
    plan->kernel_offset += decoded_bytes(num_b(args) * args.n, args.k);
  } else if (plan->expand_b) {
    plan->kernel_offset += round_up(num_b(args) * args.n * args.k, Rules::kWorkspaceBytes);
  } else if (plan->prepack_b) {
    int64_t const bytes = order_of(operands).bytes(args.n, args.k);
    plan->kernel_offset += round_up(num_b(args) * bytes, Rules::kWorkspaceBytes);
  }
  plan->total_bytes =
      plan->kernel_offset + plan->kernel->workspace_bytes(problem_of(args, *plan, nullptr, device));
  return FP4GEMM_SUCCESS;
}

namespace {

/// Quantizes A into the workspace.
fp4gemm_status_t quantize_a(GemmArgs const& args, GemmPlan const& plan, char* workspace,
                            fp4gemm_stream_t stream) {
  fp4gemm_quantize_args_t quantize = FP4GEMM_QUANTIZE_ARGS_INIT;
  quantize.m = args.m;
  quantize.k = columns_of_a(args);
  quantize.residual_channels = plan.cast.residual_channels;
  quantize.num_residual_channels = plan.cast.num_residual_channels;
  quantize.x = args.a.data;
  quantize.x_row_stride = a_row_stride(args);
  quantize.x_dtype = a_dtype(args);
  quantize.scaling =
      args.quantize_a == FP4GEMM_QUANTIZE_A_TENSOR ? FP4GEMM_SCALING_TENSOR : FP4GEMM_SCALING_ROW;
  quantize.encode = plan.cast.encode;
  quantize.four_over_six = plan.cast.four_over_six;
  quantize.fast_error = plan.cast.fast_error;
  quantize.e4m3_max = plan.cast.e4m3_max;
  if (plan.format_a == FP4GEMM_FORMAT_FP16) {
    quantize.row.decoded = workspace;
  } else if (plan.format_a == FP4GEMM_FORMAT_E4M3) {
    quantize.row.fp8 = reinterpret_cast<uint8_t*>(workspace);
  } else {
    quantize.row.codes = reinterpret_cast<uint8_t*>(workspace);
    quantize.row.scales = reinterpret_cast<uint8_t*>(workspace + plan.scale_a_offset);
  }
  quantize.row.amax = reinterpret_cast<float*>(workspace + plan.amax_offset);
  quantize.offs = args.offs;
  quantize.num_groups = args.num_groups;
  quantize.x_rows = args.a_rows;
  quantize.x_num_rows = args.a_num_rows;
  return launch_quantize(quantize, plan.device, stream);
}

/// Decodes both operands, which have an MX format, into the workspace, with the factors of their rows.
fp4gemm_status_t decode_mx(GemmArgs const& args, GemmPlan const& plan, char* workspace,
                           fp4gemm_stream_t stream) {
  auto const job_of = [&](bool of_a) {
    fp4gemm_operand_t const& operand = of_a ? args.a : args.b;
    DecodedFactors const factors(args, of_a);
    MxDecodeJob job;
    job.element = operand.format == FP4GEMM_FORMAT_MXFP8 ? MxElement::kE4m3 : MxElement::kE2m1;
    job.rows = factors.matrices * factors.rows;
    job.k = args.k;
    job.values = static_cast<uint8_t const*>(operand.data);
    job.scales = static_cast<uint8_t const*>(operand.scales);
    job.y = workspace + (of_a ? 0 : plan.b_offset);
    job.rows_per_matrix = factors.rows;
    if (of_a && is_ragged_m(args)) {
      job.offs = args.offs;
      job.num_groups = args.num_groups;
    }
    job.given = factors.given;
    job.num_given = factors.num_given;
    job.factors =
        reinterpret_cast<float*>(workspace + (of_a ? plan.row_factors_offset : plan.column_factors_offset));
    return job;
  };
  FP4GEMM_TRY(launch_mx_decode(job_of(true), stream));
  return launch_mx_decode(job_of(false), stream);
}

/// Launches what comes before the kernel, into the workspace: the quantizer of A, one decoder for both
/// operands, and the prepacking of B, each only if the plan has it.
fp4gemm_status_t convert_operands(GemmArgs const& args, GemmPlan const& plan, char* workspace,
                                  fp4gemm_stream_t stream) {
  if (plan.quantize_a) {
    FP4GEMM_TRY(quantize_a(args, plan, workspace, stream));
  }
  if (plan.decode_mx) {
    return decode_mx(args, plan, workspace, stream);
  }
  if (plan.expand_b) {
    return launch_expand_codes(num_b(args) * args.n * args.k, args.b.data, workspace + plan.b_offset, stream);
  }
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
    FP4GEMM_TRY(launch_decode(a, b, args.k, plan.device, stream));
  }
  if (plan.prepack_b) {
    return order_of(plan.kernel->operands)
        .prepack(static_cast<int>(num_b(args)), args.n, args.k, args.b.data, args.b.scales,
                 workspace + plan.b_offset, stream);
  }
  return FP4GEMM_SUCCESS;
}

/// What the kernel of a plan is compiled for.
GeneratedForm generated_form_of(GemmArgs const& args, GemmPlan const& plan, int device) {
  Architecture const& served = *architecture_of(plan.device.arch);
  return {served.arch,
          device,
          generated_tile(served, *plan.kernel, args.ragged),
          generated_types_of(args),
          args.generated->num_matrices,
          args.generated->num_aux};
}

}  // namespace

fp4gemm_status_t launch_gemm(GemmArgs const& args, GemmPlan const& plan, void* workspace, int device,
                             fp4gemm_stream_t stream) {
  if (plan.kernel == nullptr) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_CHECK(
      plan.kernel->operands != Operands::kMxfp8Mxfp4 || is_aligned(args.b.data, Rules::kUnpackedBytes),
      "b: data is %p, must be at a multiple of %d bytes for %s", args.b.data, Rules::kUnpackedBytes,
      plan.kernel->info.name);
  char* const bytes = static_cast<char*>(workspace);
  if (args.generated == nullptr) {
    FP4GEMM_TRY(convert_operands(args, plan, bytes, stream));
    return plan.kernel->launch(problem_of(args, plan, bytes, device), bytes + plan.kernel_offset, stream);
  }
  FP4GEMM_CHECK(args.generated->formula != nullptr,
                "generated.formula: is null, must be one of fp4gemm_formula_create");
  GeneratedForm const form = generated_form_of(args, plan, device);
  GeneratedKernel const* const kernel = args.generated->formula->find(form);
  if (kernel == nullptr) {
    return fail(
        FP4GEMM_ERROR_NOT_LOADED,
        "generated.formula: has no kernel for %s on device %d with these types of elements, must have "
        "one of fp4gemm_generated_load",
        plan.kernel->info.name, device);
  }
  FP4GEMM_TRY(convert_operands(args, plan, bytes, stream));
  GeneratedProblem const problem{problem_of(args, plan, bytes, device), static_cast<int>(columns_of_d(args)),
                                 form.num_aux, form.types, generated_inputs_of(args)};
  return architecture_of(plan.device.arch)
      ->generated->launch(*kernel, plan.kernel->info.name, problem, bytes + plan.kernel_offset, stream);
}

namespace {

/// Sets the residual channels of the arguments to those of the cast, whose number must be valid for them.
fp4gemm_status_t set_residual_channels(fp4gemm_cast_t const* cast, GemmArgs* args) {
  FP4GEMM_CHECK(cast != nullptr, "cast: is null, must point at the options");
  int const count = cast->num_residual_channels;
  FP4GEMM_CHECK(count >= 0 && count % Rules::kResidualChannels == 0 && count <= args->k - count,
                "cast.num_residual_channels: is %d, must be a multiple of %d and at most half of k, %lld",
                count, Rules::kResidualChannels, ll(args->k));
  FP4GEMM_CHECK(count == 0 || !is_grouped(*args),
                "cast.num_residual_channels: is %d, must be 0 in a grouped GEMM", count);
  args->num_residual_channels = count;
  return FP4GEMM_SUCCESS;
}

/// Sets the cast of a plan, which must be valid for these arguments.
fp4gemm_status_t set_cast(GemmArgs const& args, fp4gemm_cast_t const& cast, GemmPlan* plan) {
  plan->cast = cast;
  return check_cast("cast.", cast, args.quantize_a, args.a_rows != nullptr);
}

/// Checks the arguments without pointers, and makes the plan of the call. Sets their residual channels.
fp4gemm_status_t plan_call(GemmArgs* args, fp4gemm_cast_t const* cast, int device, GemmPlan* plan) {
  FP4GEMM_TRY(set_residual_channels(cast, args));
  FP4GEMM_TRY(check_gemm_problem(*args));
  FP4GEMM_TRY(set_cast(*args, *cast, plan));
  return plan_gemm(*args, device, plan);
}

/// The query of the workspace. It makes the plan of the call, without pointers, which the checks therefore
/// leave out.
fp4gemm_status_t workspace_bytes(GemmArgs args, fp4gemm_cast_t const* cast, int device, size_t* bytes) {
  FP4GEMM_CHECK(bytes != nullptr, "bytes: is null, must point at the result");
  GemmPlan plan;
  FP4GEMM_TRY(plan_call(&args, cast, device, &plan));
  *bytes = plan.total_bytes;
  return FP4GEMM_SUCCESS;
}

/// The GEMM: all checks that need no kernel, the plan, the conversions, the kernel. What a kernel refuses
/// itself it refuses after the conversions, which write to the workspace alone.
fp4gemm_status_t run(GemmArgs args, fp4gemm_cast_t const* cast, void* workspace, size_t workspace_bytes,
                     int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(set_residual_channels(cast, &args));
  FP4GEMM_TRY(check_gemm_problem(args));
  FP4GEMM_TRY(check_gemm_pointers(args));
  FP4GEMM_TRY(check_buffer("cast.residual_channels", cast->residual_channels, cast->num_residual_channels,
                           sizeof(int32_t)));
  GemmPlan plan;
  FP4GEMM_TRY(set_cast(args, *cast, &plan));
  FP4GEMM_TRY(plan_gemm(args, device, &plan));
  if (plan.kernel == nullptr) {
    return FP4GEMM_SUCCESS;
  }
  FP4GEMM_TRY(check_workspace(workspace, workspace_bytes, plan.total_bytes));
  DeviceGuard const guard(device);
  FP4GEMM_TRY(guard.status());
  return launch_gemm(args, plan, workspace, device, stream);
}

/// The arguments of a call with a formula, and the plan of it, for the functions that compile its kernel.
fp4gemm_status_t plan_generated(fp4gemm_gemm_args_t const* args, fp4gemm_generated_t const* generated,
                                int device, GemmArgs* call, GemmPlan* plan) {
  FP4GEMM_TRY(check_args(args));
  FP4GEMM_CHECK(generated != nullptr, "generated: is null, must point at the formula's inputs");
  *call = GemmArgs(*args, generated);
  // No cast changes the kernel, but for its format of A, which quantize_a says.
  fp4gemm_cast_t const cast = FP4GEMM_CAST_INIT;
  return plan_call(call, &cast, device, plan);
}

fp4gemm_status_t write_source(Architecture const& arch, fp4gemm_kernel_info_t const& kernel,
                              GeneratedForm const& form, fp4gemm_generated_t const& generated, char* source,
                              size_t bytes) {
  FP4GEMM_CHECK(source != nullptr || bytes == 0, "source: is null, must have %lld bytes",
                ll(static_cast<int64_t>(bytes)));
  SourceText to{source, bytes};
  write_generated_source(*arch.generated, kernel, form, generated, to);
  FP4GEMM_CHECK(to.length < bytes, "bytes: is %lld, must be more than %lld", ll(static_cast<int64_t>(bytes)),
                ll(static_cast<int64_t>(to.length)));
  return FP4GEMM_SUCCESS;
}

/// The source of the kernel that a call needs.
fp4gemm_status_t write_source_for(fp4gemm_gemm_args_t const* args, fp4gemm_generated_t const* generated,
                                  int device, char* source, size_t bytes) {
  GemmArgs call;
  GemmPlan plan;
  FP4GEMM_TRY(plan_generated(args, generated, device, &call, &plan));
  if (plan.kernel == nullptr) {
    FP4GEMM_CHECK(source != nullptr && bytes > 0, "source: must have 1 byte or more");
    source[0] = '\0';
    return FP4GEMM_SUCCESS;
  }
  return write_source(*architecture_of(plan.device.arch), plan.kernel->info,
                      generated_form_of(call, plan, device), *generated, source, bytes);
}

/// The source of a kernel of the table.
fp4gemm_status_t write_source_of(char const* name, fp4gemm_ragged_t ragged,
                                 fp4gemm_generated_t const* generated, char* source, size_t bytes) {
  Kernel const* const kernel = name == nullptr ? nullptr : find_kernel(name);
  FP4GEMM_CHECK(kernel != nullptr,
                "kernel: '%s' is not in this build, must be one of the kernel table's names",
                name == nullptr ? "(null)" : name);
  FP4GEMM_CHECK(generated != nullptr, "generated: is null, must point at the formula's inputs");
  Architecture const* const* arch = architectures();
  while ((*arch)->arch != kernel->info.arch) {
    ++arch;
  }
  int const tile = kernel->is_gated ? -1 : generated_tile(**arch, *kernel, ragged);
  FP4GEMM_CHECK(tile >= 0, "kernel: '%s' has no form with an epilogue that is compiled at run time", name);
  GemmArgs args(FP4GEMM_GEMM_ARGS_INIT, generated);
  args.out_dtype = kernel->info.out_dtype;
  args.num_groups = kernel->is_grouped ? 1 : 0;
  args.ragged = ragged;
  args.c = generated->takes_c != 0 ? name : nullptr;
  FP4GEMM_TRY(check_generated(args));
  GeneratedForm const form{(*arch)->arch,     0, tile, generated_types_of(args), generated->num_matrices,
                           generated->num_aux};
  return write_source(**arch, kernel->info, form, *generated, source, bytes);
}

fp4gemm_status_t load(fp4gemm_gemm_args_t const* args, fp4gemm_generated_t const* generated, int device,
                      void const* cubin) {
  FP4GEMM_CHECK(cubin != nullptr, "cubin: is null, must point at the compiled kernel");
  GemmArgs call;
  GemmPlan plan;
  FP4GEMM_TRY(plan_generated(args, generated, device, &call, &plan));
  FP4GEMM_CHECK(plan.kernel != nullptr, "m, n: are %lld and %lld, must be positive", ll(args->m),
                ll(args->n));
  DeviceGuard const guard(device);
  FP4GEMM_TRY(guard.status());
  FP4GEMM_CHECK(generated->formula != nullptr,
                "generated.formula: is null, must be one of fp4gemm_formula_create");
  fp4gemm_formula_t& formula = *generated->formula;
  GeneratedForm const form = generated_form_of(call, plan, device);
  std::lock_guard<std::mutex> const lock(formula.adding);
  if (formula.find(form) != nullptr) {
    return FP4GEMM_SUCCESS;
  }
  void* function = nullptr;
  FP4GEMM_TRY(load_generated(cubin, architecture_of(plan.device.arch)->generated->shared_bytes(form.tile),
                             device, &function));
  formula.kernels.store(new GeneratedKernel{function, form, formula.kernels.load()},
                        std::memory_order_release);
  return FP4GEMM_SUCCESS;
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_gemm_with_cast_workspace_bytes(fp4gemm_gemm_args_t const* args,
                                                        fp4gemm_cast_t const* cast, int device,
                                                        size_t* bytes) {
  FP4GEMM_TRY(fp4gemm::check_args(args));
  return fp4gemm::workspace_bytes(*args, cast, device, bytes);
}

fp4gemm_status_t fp4gemm_gemm_with_cast(fp4gemm_gemm_args_t const* args, fp4gemm_cast_t const* cast,
                                        void* workspace, size_t workspace_bytes, int device,
                                        fp4gemm_stream_t stream) {
  FP4GEMM_TRY(fp4gemm::check_args(args));
  return fp4gemm::run(*args, cast, workspace, workspace_bytes, device, stream);
}

fp4gemm_status_t fp4gemm_gemm_workspace_bytes(fp4gemm_gemm_args_t const* args, int device, size_t* bytes) {
  fp4gemm_cast_t const cast = FP4GEMM_CAST_INIT;
  return fp4gemm_gemm_with_cast_workspace_bytes(args, &cast, device, bytes);
}

fp4gemm_status_t fp4gemm_gemm(fp4gemm_gemm_args_t const* args, void* workspace, size_t workspace_bytes,
                              int device, fp4gemm_stream_t stream) {
  fp4gemm_cast_t const cast = FP4GEMM_CAST_INIT;
  return fp4gemm_gemm_with_cast(args, &cast, workspace, workspace_bytes, device, stream);
}

fp4gemm_status_t fp4gemm_formula_create(fp4gemm_formula_t** formula) {
  FP4GEMM_CHECK(formula != nullptr, "formula: is null, must point at the result");
  *formula = new fp4gemm_formula_t();
  return FP4GEMM_SUCCESS;
}

fp4gemm_status_t fp4gemm_generated_source(fp4gemm_gemm_args_t const* args,
                                          fp4gemm_generated_t const* generated, int device, char* source,
                                          size_t bytes) {
  return fp4gemm::write_source_for(args, generated, device, source, bytes);
}

fp4gemm_status_t fp4gemm_generated_source_of_kernel(char const* kernel, fp4gemm_ragged_t ragged,
                                                    fp4gemm_generated_t const* generated, char* source,
                                                    size_t bytes) {
  return fp4gemm::write_source_of(kernel, ragged, generated, source, bytes);
}

fp4gemm_status_t fp4gemm_generated_load(fp4gemm_gemm_args_t const* args, fp4gemm_generated_t const* generated,
                                        int device, void const* cubin) {
  return fp4gemm::load(args, generated, device, cubin);
}

fp4gemm_status_t fp4gemm_gemm_generated_workspace_bytes(fp4gemm_gemm_args_t const* args,
                                                        fp4gemm_cast_t const* cast,
                                                        fp4gemm_generated_t const* generated, int device,
                                                        size_t* bytes) {
  FP4GEMM_TRY(fp4gemm::check_args(args));
  FP4GEMM_CHECK(generated != nullptr, "generated: is null, must point at the formula's inputs");
  return fp4gemm::workspace_bytes({*args, generated}, cast, device, bytes);
}

fp4gemm_status_t fp4gemm_gemm_generated(fp4gemm_gemm_args_t const* args, fp4gemm_cast_t const* cast,
                                        fp4gemm_generated_t const* generated, void* workspace,
                                        size_t workspace_bytes, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(fp4gemm::check_args(args));
  FP4GEMM_CHECK(generated != nullptr, "generated: is null, must point at the formula's inputs");
  return fp4gemm::run({*args, generated}, cast, workspace, workspace_bytes, device, stream);
}

}  // extern "C"
