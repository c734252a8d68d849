// A GEMM of the C interface in two steps, the plan and the launches. fp4gemm_gemm makes both; functions that
// consist of several calls make all plans first.
#pragma once

#include "device.hpp"
#include "fp4gemm/casts.h"
#include "gemm_args.hpp"
#include "kernel.hpp"

namespace fp4gemm {

/// What a GEMM will do: the kernel, the conversions and the layout of the workspace. Offsets are in bytes.
struct GemmPlan {
  fp4gemm_cast_t cast = FP4GEMM_CAST_INIT;  // set before plan_gemm where quantize_a has options
  Kernel const* kernel = nullptr;           // null: D has no elements
  DeviceProperties device;
  fp4gemm_format_t format_a = FP4GEMM_FORMAT_NVFP4;  // of A, or of what the call quantizes A to
  bool quantize_a = false;                           // in a launch of its own
  size_t scale_a_offset = 0;                         // with quantize_a
  size_t amax_offset = 0;
  bool decode_a = false;
  bool decode_b = false;
  bool decode_mx = false;         // both operands, to fp16 with a factor for each row
  size_t row_factors_offset = 0;  // with decode_mx: alpha_row and alpha_col with these factors
  size_t column_factors_offset = 0;
  bool prepack_b = false;
  bool expand_b = false;  // MXFP4 to MXFP8, with the same scales
  size_t b_offset = 0;
  size_t kernel_offset = 0;
  size_t total_bytes = 0;
};

/// Whether a cast has the options of FP4GEMM_CAST_INIT, the only ones of kernels that quantize or gather A.
bool is_default(fp4gemm_cast_t const& cast);

/// Checks the options of a cast beside the fields quantize_a and a_rows of a GEMM. `prefix` begins their
/// names in messages.
fp4gemm_status_t check_cast(char const* prefix, fp4gemm_cast_t const& cast, fp4gemm_quantize_a_t quantize_a,
                            bool gathers);

/// Plans a GEMM whose sizes, formats and types are valid (check_gemm_problem). Of pointers only offs, c and
/// a_rows matter, and of them only whether they are null.
fp4gemm_status_t plan_gemm(GemmArgs const& args, int device, GemmPlan* plan);

/// Launches what was planned for these arguments, whose pointers are valid (check_gemm_pointers). The device
/// is current, and the workspace has plan.total_bytes bytes and its alignment.
fp4gemm_status_t launch_gemm(GemmArgs const& args, GemmPlan const& plan, void* workspace, int device,
                             fp4gemm_stream_t stream);

}  // namespace fp4gemm
