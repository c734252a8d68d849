// The row of a kernel in the table, which is made at compile time.
#pragma once

#include <array>

#include "cutlass/bfloat16.h"
#include "cutlass/half.h"
#include "kernel.hpp"

namespace fp4gemm {

template <class T>
struct OutType;
template <>
struct OutType<cutlass::bfloat16_t> {
  static constexpr fp4gemm_dtype_t kId = FP4GEMM_BF16;
  static constexpr char const* kName = "bf16";
};
template <>
struct OutType<cutlass::half_t> {
  static constexpr fp4gemm_dtype_t kId = FP4GEMM_FP16;
  static constexpr char const* kName = "fp16";
};
template <>
struct OutType<float> {
  static constexpr fp4gemm_dtype_t kId = FP4GEMM_FP32;
  static constexpr char const* kName = "fp32";
};

/// A text that is built at compile time.
struct NameBuilder {
  char text[80] = {};
  int size = 0;

  constexpr NameBuilder& operator<<(char const* part) {
    for (; *part != '\0'; ++part) {
      text[size++] = *part;
    }
    return *this;
  }
  constexpr NameBuilder& operator<<(int number) {
    char digits[12] = {};
    int count = 0;
    do {
      digits[count++] = static_cast<char>('0' + number % 10);
      number /= 10;
    } while (number > 0);
    while (count > 0) {
      text[size++] = digits[--count];
    }
    return *this;
  }
};

/// The properties of a kernel in the table. Tile and cluster are in terms of D, for a swapped kernel too.
struct KernelTraits {
  int arch;
  bool is_grouped;
  bool is_swapped;
  bool is_gated;
  int tile_m, tile_n, tile_k;
  int cluster_m, cluster_n;
  char const* epilogue;
  fp4gemm_dtype_t out_dtype;
  char const* out_name;
  Operands operands;
  bool fast_accum = false;

  constexpr char const* mode() const { return is_grouped ? "grouped" : "dense"; }

  constexpr char const* operand_name() const {
    switch (operands) {
      case Operands::kNvfp4: return "nvfp4";
      case Operands::kMxfp8: return "mxfp8";
      case Operands::kMxfp4: return "mxfp4";
      case Operands::kMxfp8Mxfp4: return "mxfp8_mxfp4";
      case Operands::kFp16: return "fp16";
      case Operands::kPrepacked: return "prepacked";
      case Operands::kPrepackedBf16: return "prepacked_bf16";
      case Operands::kPrepackedFp8: return "prepacked_fp8";
    }
    return "";
  }

  constexpr char const* variant() const {
    switch (operands) {
      case Operands::kMxfp8: return "_mxfp8_";
      case Operands::kMxfp4: return "_mxfp4_";
      case Operands::kMxfp8Mxfp4: return "_mxfp8_mxfp4_";
      case Operands::kPrepacked: return "_prepacked_";
      case Operands::kPrepackedBf16: return "_prepacked_bf16_";
      case Operands::kPrepackedFp8: return fast_accum ? "_prepacked_fp8_fast_" : "_prepacked_fp8_";
      default: return is_swapped ? "_swapped_" : "_";
    }
  }

  /// For instance sm100_dense_256x128x256_c2x1_rowcol_bf16.
  constexpr NameBuilder name() const {
    NameBuilder name;
    name << "sm" << arch << "_" << mode() << "_" << tile_m << "x" << tile_n << "x" << tile_k << "_c"
         << cluster_m << "x" << cluster_n << variant() << epilogue << "_" << out_name;
    return name;
  }
};

/// Impl must have kTraits, kName, workspace_bytes and launch. figures: those of Kernel.
template <class Impl>
constexpr Kernel make_row(MeasuredFigures const* figures = nullptr) {
  constexpr KernelTraits const& t = Impl::kTraits;
  return {{Impl::kName.text, t.mode(), t.epilogue, t.arch, t.tile_m, t.tile_n, t.tile_k, t.cluster_m,
           t.cluster_n, t.out_dtype, t.operand_name(), t.is_swapped, t.fast_accum},
          t.operands,
          t.is_grouped,
          t.is_gated,
          figures,
          &Impl::workspace_bytes,
          &Impl::launch};
}

template <int N>
constexpr KernelList make_list(Kernel const (&kernels)[N]) {
  return {kernels, N};
}
template <size_t N>
constexpr KernelList make_list(std::array<Kernel, N> const& kernels) {
  return {kernels.data(), static_cast<int>(N)};
}

}  // namespace fp4gemm
