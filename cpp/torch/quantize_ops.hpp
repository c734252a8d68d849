// The CUDA implementations of the quantize, dequantize, decode and prepack ops; ops.cpp has their schemas.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace fp4gemm_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

/// The options of how elements are cast, which every quantize operator has, in the order of the schemas:
/// X(type in C++, name, default, schema, member of fp4gemm_quantize_args_t). Schemas, parameter lists,
/// QuantizeOptions and set_options, which passes the options on to the C interface, are made from this list.
#define FP4GEMM_CAST_OPTIONS(X)                                                                \
  X(int64_t, encode, 0, "int encode=0", &fp4gemm_quantize_args_t::encode)                      \
  X(int64_t, four_over_six, 0, "int four_over_six=0", &fp4gemm_quantize_args_t::four_over_six) \
  X(bool, fast_error, false, "bool fast_error=False", &fp4gemm_quantize_args_t::fast_error)    \
  X(int64_t, e4m3_max, 448, "int e4m3_max=448", &fp4gemm_quantize_args_t::e4m3_max)            \
  X(int64_t, hadamard, 0, "int hadamard=0", OfDirection{})                                     \
  X(int64_t, signs, 0, "int signs=0", &fp4gemm_quantize_args_t::hadamard_signs)                \
  X(std::optional<Tensor>, rng_state, std::nullopt, "Tensor? rng_state=None",                  \
    &fp4gemm_quantize_args_t::rng_state)

// What the list becomes in a parameter list, after other parameters, and in a schema.
#define FP4GEMM_AS_PARAMETER(type, name, initial, schema, member) , type name
#define FP4GEMM_AS_SCHEMA(type, name, initial, schema, member) ", " schema

std::tuple<Tensor, Tensor, Tensor> quantize(Tensor const& x, std::optional<Tensor> amax, bool per_row,
                                            int64_t axis,
                                            int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER),
                                            std::optional<Tensor> offs,
                                            std::optional<Tensor> rows = std::nullopt,
                                            std::optional<Tensor> residual_channels = std::nullopt);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> quantize_both(
    Tensor const& x, std::optional<Tensor> amax, std::optional<Tensor> amax_t, bool per_row,
    int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER), std::optional<Tensor> offs);

std::tuple<Tensor, Tensor> quantize_decoded(Tensor const& x, std::optional<Tensor> amax, bool per_row,
                                            int64_t axis FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER),
                                            std::optional<Tensor> offs,
                                            std::optional<Tensor> rows = std::nullopt,
                                            std::optional<Tensor> residual_channels = std::nullopt);

std::tuple<Tensor, Tensor> quantize_fp8(Tensor const& x, std::optional<Tensor> offs);

std::tuple<Tensor, Tensor, Tensor> quantize_searched(Tensor const& x, std::optional<Tensor> amax,
                                                     std::optional<Tensor> importance, bool per_row,
                                                     int64_t block_rows, int64_t e4m3_max, bool fp8_operand);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_stack(
    Tensor const& x, std::optional<Tensor> amax, bool rows, bool columns, bool per_row,
    int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER));

std::tuple<Tensor, Tensor, Tensor> silu_and_mul_quantize(Tensor const& x, std::optional<Tensor> offs);

std::tuple<Tensor, Tensor> silu_and_mul_quantize_decoded(Tensor const& x, std::optional<Tensor> offs);

std::tuple<Tensor, Tensor> silu_and_mul_quantize_fp8(Tensor const& x, std::optional<Tensor> offs);

std::tuple<Tensor, Tensor, Tensor, Tensor> rms_norm_quantize(Tensor const& x, std::optional<Tensor> weight,
                                                             std::optional<Tensor> residual, double eps);

std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize_decoded(Tensor const& x, std::optional<Tensor> weight,
                                                             std::optional<Tensor> residual, double eps);

std::tuple<Tensor, Tensor, Tensor> rms_norm_quantize_fp8(Tensor const& x, std::optional<Tensor> weight,
                                                         std::optional<Tensor> residual, double eps);

Tensor dequantize(Tensor const& codes, Tensor const& scales, Tensor const& amax, int64_t e4m3_max,
                  ScalarType dtype, bool swizzled, std::optional<Tensor> offs);

std::tuple<Tensor, Tensor> mxfp8_quantize(Tensor const& x, int64_t axis, ScalarType dtype, bool swizzled,
                                          std::optional<Tensor> offs);

Tensor mxfp8_dequantize(Tensor const& values, Tensor const& scales, ScalarType dtype, bool swizzled,
                        std::optional<Tensor> offs);

std::tuple<Tensor, Tensor> mxfp4_quantize(Tensor const& x, int64_t axis, bool ceil, bool swizzled,
                                          std::optional<Tensor> offs);

Tensor mxfp4_dequantize(Tensor const& codes, Tensor const& scales, ScalarType dtype, bool swizzled,
                        std::optional<Tensor> offs);

Tensor decode(Tensor const& codes, Tensor const& scales);

/// fp8: bytes for FP8 tokens, in Char; else in Byte. unprepack reads either.
Tensor prepack(Tensor const& codes, Tensor const& scales, bool fp8);

std::tuple<Tensor, Tensor> unprepack(Tensor const& packed, int64_t n, int64_t k);

}  // namespace fp4gemm_torch
