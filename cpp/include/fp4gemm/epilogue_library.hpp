// A library of kernels with an epilogue in Python, which `python -m fp4gemm epilogue build` makes for devices
// of compute capability 10.x or 12.x. One of its units includes this header alone and defines the C interface
// below, and one unit for each kernel includes epilogue_kernel.hpp.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "fp4gemm/generated.h"

namespace fp4gemm::epilogue_library {

/// A kernel of the library.
struct Kernel {
  bool is_grouped;
  bool is_fp32;  // D has fp32 elements, else bf16 or fp16
  size_t (*workspace_bytes)(fp4gemm_gemm_args_t const&, fp4gemm_generated_t const&, int device);
  /// An error, or null.
  char const* (*launch)(fp4gemm_gemm_args_t const&, fp4gemm_generated_t const&, void* workspace, int device,
                        fp4gemm_stream_t stream);
};

/// The formula, as the header that was generated from Python declares it.
struct Formula {
  bool takes_pairs;
  int num_results;
  bool takes_bias, takes_c;
  int num_rows, num_columns, num_groups, num_matrices, num_scalars, num_aux;
};

inline char* error_text() {
  thread_local char text[512];
  return text;
}

[[gnu::format(printf, 2, 3)]] inline fp4gemm_status_t fail(fp4gemm_status_t status, char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error_text(), 512, format, arguments);
  va_end(arguments);
  return status;
}

/// Refuses what the kernels of the library cannot compute.
inline fp4gemm_status_t check(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const& generated,
                              Formula const& formula) {
  constexpr auto kInvalid = FP4GEMM_ERROR_INVALID_ARGUMENT;
  constexpr auto kUnsupported = FP4GEMM_ERROR_NOT_SUPPORTED;
  if (args.struct_size != sizeof(args) || generated.struct_size != sizeof(generated)) {
    return fail(kInvalid,
                "struct_size: is %zu and %zu, must be %zu and %zu as in the headers of this library",
                args.struct_size, generated.struct_size, sizeof(args), sizeof(generated));
  }
  struct {
    char const* name;
    int got, want;
  } const counts[] = {{"takes_pairs", generated.takes_pairs != 0, formula.takes_pairs},
                      {"num_results", generated.num_results, formula.num_results},
                      {"takes_bias", generated.takes_bias != 0, formula.takes_bias},
                      {"takes_c", generated.takes_c != 0, formula.takes_c},
                      {"bias", args.bias.data != nullptr, formula.takes_bias},
                      {"c", args.c != nullptr, formula.takes_c},
                      {"num_rows", generated.num_rows, formula.num_rows},
                      {"num_columns", generated.num_columns, formula.num_columns},
                      {"num_groups", generated.num_groups, formula.num_groups},
                      {"num_matrices", generated.num_matrices, formula.num_matrices},
                      {"num_scalars", generated.num_scalars, formula.num_scalars},
                      {"num_aux", generated.num_aux, formula.num_aux}};
  for (auto const& count : counts) {
    if (count.got != count.want) {
      return fail(kInvalid, "%s: is %d, must be %d as in the epilogue of this library", count.name, count.got,
                  count.want);
    }
  }
  if (args.a.format != FP4GEMM_FORMAT_NVFP4 || args.b.format != FP4GEMM_FORMAT_NVFP4 ||
      args.quantize_a != FP4GEMM_QUANTIZE_A_NONE || args.a_rows != nullptr) {
    return fail(kUnsupported, "a, b: must both be NVFP4 codes with scales for an epilogue library");
  }
  if (args.num_groups > 0 && args.ragged != FP4GEMM_RAGGED_M) {
    return fail(kUnsupported, "ragged: must be FP4GEMM_RAGGED_M for an epilogue library");
  }
  if (args.kernel != nullptr) {
    return fail(kUnsupported, "kernel: is %s, must be NULL for an epilogue library", args.kernel);
  }
  if (args.m < 0 || args.n < 0 || args.k <= 0 || args.k % 32 != 0 || args.m > INT32_MAX ||
      args.n > INT32_MAX || args.k > INT32_MAX) {
    return fail(kInvalid, "m, n, k: are %lld, %lld, %lld, must be at most 2^31 - 1, and k a multiple of 32",
                static_cast<long long>(args.m), static_cast<long long>(args.n),
                static_cast<long long>(args.k));
  }
  int const step =
      (formula.takes_pairs && formula.num_results == 1 ? 2 : 1) * (args.out_dtype == FP4GEMM_FP32 ? 4 : 8);
  if (args.n % step != 0) {
    return fail(kInvalid, "n: is %lld, must be a multiple of %d", static_cast<long long>(args.n), step);
  }
  return FP4GEMM_SUCCESS;
}

/// The kernel of a call, or null after a failure.
inline Kernel const* find(Kernel const* const* kernels, int count, fp4gemm_gemm_args_t const& args) {
  bool const is_grouped = args.num_groups > 0;
  bool const is_fp32 = args.out_dtype == FP4GEMM_FP32;
  for (int i = 0; i < count; ++i) {
    if (kernels[i]->is_grouped == is_grouped && kernels[i]->is_fp32 == is_fp32) {
      return kernels[i];
    }
  }
  fail(FP4GEMM_ERROR_NOT_SUPPORTED,
       "out_dtype, num_groups: this epilogue library was built without %s products with %s output",
       is_grouped ? "grouped" : "dense", is_fp32 ? "fp32" : "16-bit");
  return nullptr;
}

}  // namespace fp4gemm::epilogue_library

/// Defines the C interface of a library: a text about it in JSON, the text of the last error of the thread,
/// and the call of a kernel in a workspace of the bytes that the query returns, 128-byte aligned. The
/// arguments are those of fp4gemm_gemm_generated, of which args->activation, args->beta and generated->kernel
/// are not used. The device must be the current one.
#define FP4GEMM_EPILOGUE_LIBRARY(about, formula, kernels)                                                   \
  extern "C" {                                                                                              \
  FP4GEMM_API char const* fp4gemm_epilogue_about() { return about; }                                        \
  FP4GEMM_API char const* fp4gemm_epilogue_last_error() { return fp4gemm::epilogue_library::error_text(); } \
  FP4GEMM_API fp4gemm_status_t fp4gemm_epilogue_workspace_bytes(fp4gemm_gemm_args_t const* args,            \
                                                                fp4gemm_generated_t const* generated,       \
                                                                int device, size_t* bytes) {                \
    namespace library = fp4gemm::epilogue_library;                                                          \
    if (auto const status = library::check(*args, *generated, formula)) {                                   \
      return status;                                                                                        \
    }                                                                                                       \
    auto const* kernel = library::find(kernels, sizeof(kernels) / sizeof(*kernels), *args);                 \
    if (kernel == nullptr) {                                                                                \
      return FP4GEMM_ERROR_NOT_SUPPORTED;                                                                   \
    }                                                                                                       \
    *bytes = args->m == 0 || args->n == 0 ? 0 : kernel->workspace_bytes(*args, *generated, device);         \
    return FP4GEMM_SUCCESS;                                                                                 \
  }                                                                                                         \
  FP4GEMM_API fp4gemm_status_t fp4gemm_epilogue_launch(fp4gemm_gemm_args_t const* args,                     \
                                                       fp4gemm_generated_t const* generated,                \
                                                       void* workspace, size_t workspace_bytes, int device, \
                                                       fp4gemm_stream_t stream) {                           \
    namespace library = fp4gemm::epilogue_library;                                                          \
    size_t bytes = 0;                                                                                       \
    if (auto const status = fp4gemm_epilogue_workspace_bytes(args, generated, device, &bytes)) {            \
      return status;                                                                                        \
    }                                                                                                       \
    if (workspace_bytes < bytes) {                                                                          \
      return library::fail(FP4GEMM_ERROR_WORKSPACE, "workspace_bytes: is %zu, must be at least %zu",        \
                           workspace_bytes, bytes);                                                         \
    }                                                                                                       \
    if (args->m == 0 || args->n == 0) {                                                                     \
      return FP4GEMM_SUCCESS;                                                                               \
    }                                                                                                       \
    auto const* kernel = library::find(kernels, sizeof(kernels) / sizeof(*kernels), *args);                 \
    char const* error = kernel->launch(*args, *generated, workspace, device, stream);                       \
    return error == nullptr ? FP4GEMM_SUCCESS : library::fail(FP4GEMM_ERROR_CUDA, "%s", error);             \
  }                                                                                                         \
  }
