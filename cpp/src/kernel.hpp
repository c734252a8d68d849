// A GEMM kernel as data: its properties, and the functions that launch it.
#pragma once

#include <cstdint>

#include "check.hpp"
#include "cutlass_evt/epilogue/arguments.hpp"
#include "fp4gemm/fp4gemm.h"

namespace fp4gemm {

/// A dense (num_groups 0) or grouped GEMM on one device, with operands in the format that the kernel reads.
/// The fields have the meaning that they have in fp4gemm_gemm_args_t.
struct Problem {
  fp4gemm_ragged_t ragged = FP4GEMM_RAGGED_M;
  int64_t m = 0, n = 0, k = 0;
  int num_groups = 0;
  int32_t const* offs = nullptr;
  int group_columns = 0;  // ragged k: each group begins at a multiple of so many columns of a and b
  void const* a = nullptr;
  void const* scale_a = nullptr;  // null unless nvfp4, mxfp8 or mxfp4
  void const* b = nullptr;
  void const* scale_b = nullptr;
  bool b_is_fresh = true;  // the launch right before this one on the stream may have written b
  cutlass_evt::EpilogueArguments epilogue;
  bool batch_invariant = false;
  int device = 0;
  int num_sms = 0;
  // If the kernel quantizes A itself (gemm.cpp decides), a holds values of this type that were never
  // quantized, and alpha_row is absent. Each row gets an amax of its own.
  bool quantizes_a = false;
  fp4gemm_dtype_t a_dtype = FP4GEMM_BF16;
  int64_t a_row_stride = 0;  // elements
};

/// True if the launch right before the kernel may have written the B that the kernel reads: the caller does
/// not promise otherwise (fp4gemm_gemm_args_t::b_is_constant), or the call itself converts B first.
constexpr bool b_is_fresh(bool b_is_constant, bool is_converted) { return is_converted || !b_is_constant; }

/// The formats that a kernel reads. Operands in some other formats are converted, in the workspace.
enum class Operands {
  kNvfp4,          // both NVFP4
  kMxfp8,          // both MXFP8; an MXFP4 B is expanded first
  kMxfp4,          // both MXFP4
  kMxfp8Mxfp4,     // A MXFP8, B MXFP4
  kFp16,           // both fp16; NVFP4 and MX operands are decoded first
  kPrepacked,      // A as for kFp16; B prepacked; an NVFP4 B is prepacked first
  kPrepackedBf16,  // A bf16; B as for kPrepacked
  kPrepackedFp8,   // A e4m3; B prepacked for FP8; an NVFP4 B is prepacked first
};

/// True if a kernel can be given operands in these formats, after a conversion or without.
constexpr bool accepts(Operands operands, fp4gemm_format_t a, fp4gemm_format_t b) {
  bool const nvfp4_or_fp16 = a == FP4GEMM_FORMAT_NVFP4 || a == FP4GEMM_FORMAT_FP16;
  bool const prepackable = b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_PREPACKED;
  bool const prepackable_fp8 = b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_PREPACKED_FP8;
  switch (operands) {
    case Operands::kNvfp4: return a == FP4GEMM_FORMAT_NVFP4 && b == FP4GEMM_FORMAT_NVFP4;
    case Operands::kMxfp8: return a == FP4GEMM_FORMAT_MXFP8 && is_mx(b);
    case Operands::kMxfp4: return a == FP4GEMM_FORMAT_MXFP4 && b == FP4GEMM_FORMAT_MXFP4;
    case Operands::kMxfp8Mxfp4: return a == FP4GEMM_FORMAT_MXFP8 && b == FP4GEMM_FORMAT_MXFP4;
    case Operands::kFp16:
      return (nvfp4_or_fp16 && (b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_FP16)) ||
             multiplies_mx(a, b);
    case Operands::kPrepacked: return nvfp4_or_fp16 && prepackable;
    case Operands::kPrepackedBf16: return a == FP4GEMM_FORMAT_BF16 && prepackable;
    case Operands::kPrepackedFp8: return a == FP4GEMM_FORMAT_E4M3 && prepackable_fp8;
  }
  return false;
}

constexpr bool is_prepacked(Operands operands) {
  return operands == Operands::kPrepacked || operands == Operands::kPrepackedBf16 ||
         operands == Operands::kPrepackedFp8;
}

struct MeasuredFigures;  // figures.hpp

struct Kernel {
  fp4gemm_kernel_info_t info;
  Operands operands;
  bool is_grouped;
  bool is_gated;
  MeasuredFigures const* figures;  // measured, for the cost model; null: it derives the time from the tile
  /// Bytes of workspace in addition to the converted operands.
  size_t (*workspace_bytes)(Problem const&);
  fp4gemm_status_t (*launch)(Problem const&, void* workspace, fp4gemm_stream_t);
};

/// A list of kernels with static lifetime.
struct KernelList {
  Kernel const* data;
  int size;
};

// The lists of an architecture are named once, in the macro FP4GEMM_SMNN_LISTS(LIST) of its arch.hpp: LIST(x)
// for the list that the translation unit smNN/x.cu defines as lists::x. The header declares them by these
// names, and arch.cpp registers them. A unit whose list is not named does not compile, and a name without a
// list does not link.
#define FP4GEMM_DECLARE_LIST(name) extern KernelList const name;
#define FP4GEMM_ADDRESS_OF_LIST(name) &lists::name,

}  // namespace fp4gemm
