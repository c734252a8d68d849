// Registers the torch operators of fp4gemm: their schemas and their CUDA implementations.
//
// They are built against torch's stable ABI: one binary serves every torch >= 2.11, with or without CUDA, and
// every Python. The CPU implementations and the fake ones, which compute shapes only, are registered in
// Python.
#include <torch/csrc/stable/library.h>

#include "gemm_ops.hpp"
#include "linear_ops.hpp"
#include "moe_ops.hpp"
#include "quantize_ops.hpp"
#include "ranks_ops.hpp"
#include "swiglu_ops.hpp"
#include "train_ops.hpp"

STABLE_TORCH_LIBRARY(fp4gemm, m) {
#define FP4GEMM_CAST_SCHEMA FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_SCHEMA)
  m.def("quantize(Tensor x, Tensor? amax, bool per_row, int axis=-1, int block_rows=1" FP4GEMM_CAST_SCHEMA
        ", Tensor? offs=None, Tensor? rows=None, Tensor? residual_channels=None) -> (Tensor, Tensor, "
        "Tensor)");
  m.def(
      "quantize_both(Tensor x, Tensor? amax, Tensor? amax_t, bool per_row, "
      "int block_rows=1" FP4GEMM_CAST_SCHEMA
      ", Tensor? offs=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def("quantize_decoded(Tensor x, Tensor? amax, bool per_row, int axis=-1" FP4GEMM_CAST_SCHEMA
        ", Tensor? offs=None, Tensor? rows=None, Tensor? residual_channels=None) -> (Tensor, Tensor)");
  m.def(
      "quantize_stack(Tensor x, Tensor? amax, bool rows, bool columns, bool per_row=False, "
      "int block_rows=16" FP4GEMM_CAST_SCHEMA ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
#undef FP4GEMM_CAST_SCHEMA
  m.def(
      "quantize_searched(Tensor x, Tensor? amax, Tensor? importance, bool per_row, int block_rows=1, "
      "int e4m3_max=448, bool fp8_operand=False) -> (Tensor, Tensor, Tensor)");
  m.def("quantize_fp8(Tensor x, Tensor? offs=None) -> (Tensor, Tensor)");
  m.def("silu_and_mul_quantize(Tensor x, Tensor? offs=None) -> (Tensor, Tensor, Tensor)");
  m.def("silu_and_mul_quantize_decoded(Tensor x, Tensor? offs=None) -> (Tensor, Tensor)");
  m.def("silu_and_mul_quantize_fp8(Tensor x, Tensor? offs=None) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_quantize(Tensor x, Tensor? weight, Tensor? residual, float eps) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm_quantize_decoded(Tensor x, Tensor? weight, Tensor? residual, float eps) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm_quantize_fp8(Tensor x, Tensor? weight, Tensor? residual, float eps) -> "
      "(Tensor, Tensor, Tensor)");
  m.def(
      "dequantize(Tensor codes, Tensor scales, Tensor amax, int e4m3_max, ScalarType dtype, "
      "bool swizzled=True, Tensor? offs=None) -> Tensor");
  m.def("decode(Tensor codes, Tensor scales) -> Tensor");
  m.def("prepack(Tensor codes, Tensor scales, bool fp8=False) -> Tensor");
  m.def("unprepack(Tensor packed, int n, int k) -> (Tensor, Tensor)");
  m.def(
      "mxfp8_quantize(Tensor x, int axis, ScalarType dtype, bool swizzled, Tensor? offs=None) -> (Tensor, "
      "Tensor)");
  m.def(
      "mxfp8_dequantize(Tensor values, Tensor scales, ScalarType dtype, bool swizzled, Tensor? offs=None) -> "
      "Tensor");
  m.def(
      "mxfp4_quantize(Tensor x, int axis, bool ceil, bool swizzled, Tensor? offs=None) -> (Tensor, Tensor)");
  m.def(
      "mxfp4_dequantize(Tensor codes, Tensor scales, ScalarType dtype, bool swizzled, Tensor? offs=None) -> "
      "Tensor");
  m.def("route(Tensor topk_ids, int num_experts) -> (Tensor, Tensor, Tensor)");
  m.def("combine(Tensor y, Tensor row_of_pair, Tensor topk_weights, ScalarType? out_dtype=None) -> Tensor");
  m.def("zero_outside_groups(Tensor(d!) x, Tensor offs) -> ()");
  m.def(
      "experts(Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor w13, Tensor? w13_scales, "
      "Tensor w13_amax, Tensor? w13_bias, Tensor w2, Tensor? w2_scales, Tensor w2_amax, Tensor? w2_bias, "
      "int w13_rows=0, int w2_rows=0, int w13_e4m3_max=448, int w2_e4m3_max=448, int scaling=1, "
      "int activation=4, bool batch_invariant=False, bool use_fast_accum=False) -> Tensor");
  m.def(
      "quantize_records(Tensor x, Tensor(d!) out, int four_over_six=0, bool fast_error=False, "
      "int e4m3_max=448, Tensor? rng_state=None, int first_row=0) -> ()");
  m.def("make_records(Tensor codes, Tensor scales, Tensor amax, Tensor(d!) out) -> ()");
  m.def("gather_records(Tensor[] records, Tensor rows, Tensor offs, int k) -> (Tensor, Tensor, Tensor)");
  m.def(
      "route_ranks(Tensor topk_ids, int num_experts, int num_ranks, int rank, int capacity) -> "
      "(Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "combine_ranks(Tensor[] y, Tensor row_of_pair, Tensor topk_weights, ScalarType? out_dtype=None) -> "
      "Tensor");
  m.def(
      "combine_part(Tensor y, Tensor topk_ids, Tensor row_of_pair, Tensor topk_weights, Tensor(d!) out, "
      "int num_experts, int num_ranks, int rank) -> ()");
  m.def(
      "combine_tree(Tensor[] parts, Tensor topk_ids, int num_experts, int first_token, "
      "ScalarType out_dtype=bfloat16) -> Tensor");
// What gemm and gemm_out share. A parameter named "kernel" would collide with one inside torch's inductor.
#define FP4GEMM_GEMM_SCHEMA                                                                              \
  "Tensor a, Tensor b, Tensor? scale_a=None, Tensor? scale_b=None, Tensor? offs=None, float alpha=1.0, " \
  "Tensor? alpha_groups=None, Tensor? alpha_row=None, Tensor? alpha_col=None, Tensor? bias=None, "       \
  "int activation=0, Tensor? c=None, float beta=1.0, bool batch_invariant=False, "                       \
  "bool use_fast_accum=False, int b_rows=0, str? kernel_name=None"
  m.def("gemm(" FP4GEMM_GEMM_SCHEMA ", ScalarType out_dtype=bfloat16) -> Tensor");
  m.def("gemm_out(" FP4GEMM_GEMM_SCHEMA ", *, Tensor(d!) out) -> ()");
#undef FP4GEMM_GEMM_SCHEMA
  // Implemented in Python on every device: a kernel is compiled for the program on a GPU.
  m.def(
      "gemm_epilogue(Tensor a, Tensor b, str program, Tensor[] inputs, float[] scalars, int[] aux_dtypes, "
      "Tensor? scale_a=None, Tensor? scale_b=None, Tensor? offs=None, float alpha=1.0, "
      "Tensor? alpha_groups=None, Tensor? alpha_row=None, Tensor? alpha_col=None, Tensor? bias=None, "
      "Tensor? c=None, bool batch_invariant=False, bool use_fast_accum=False, int b_rows=0, "
      "str? kernel_name=None, ScalarType out_dtype=bfloat16) -> Tensor[]");
  m.def(
      "gemm_epilogue_out(Tensor a, Tensor b, str program, Tensor[] inputs, float[] scalars, "
      "Tensor? scale_a=None, Tensor? scale_b=None, Tensor? offs=None, float alpha=1.0, "
      "Tensor? alpha_groups=None, Tensor? alpha_row=None, Tensor? alpha_col=None, Tensor? bias=None, "
      "Tensor? c=None, bool batch_invariant=False, bool use_fast_accum=False, int b_rows=0, "
      "str? kernel_name=None, *, Tensor(d!) out, Tensor(e!)[] aux) -> ()");
// What the operators of products with a formula that is compiled at run time share.
#define FP4GEMM_GENERATED_SCHEMA(outputs)                                                          \
  "int formula, int[] form, Tensor[] inputs, float[] scalars, " outputs                            \
  ", Tensor a, Tensor b, "                                                                         \
  "Tensor? scale_a=None, Tensor? scale_b=None, Tensor? offs=None, float alpha=1.0, "               \
  "Tensor? alpha_groups=None, Tensor? alpha_row=None, Tensor? alpha_col=None, Tensor? bias=None, " \
  "Tensor? c=None, bool batch_invariant=False, bool use_fast_accum=False, int b_rows=0, "          \
  "str? kernel_name=None"
  m.def("gemm_generated_source(" FP4GEMM_GENERATED_SCHEMA("Tensor out, Tensor[] aux") ") -> str");
  m.def("gemm_generated_load(Tensor cubin, " FP4GEMM_GENERATED_SCHEMA("Tensor out, Tensor[] aux") ") -> ()");
  m.def("gemm_generated(" FP4GEMM_GENERATED_SCHEMA("Tensor(d!) out, Tensor(e!)[] aux") ") -> bool");
#undef FP4GEMM_GENERATED_SCHEMA
  m.def(
      "linear(Tensor x, Tensor weight, Tensor? weight_scales, Tensor? weight_amax, Tensor? bias=None, "
      "int weight_rows=0, int weight_e4m3_max=448, int scaling=1, int activation=0, Tensor? c=None, "
      "float beta=1.0, Tensor? x_scales=None, Tensor? x_amax=None, int x_e4m3_max=448, "
      "bool batch_invariant=False, bool use_fast_accum=False, str? kernel_name=None, "
      "ScalarType? out_dtype=None, Tensor? residual_channels=None) -> Tensor");
  m.def(
      "train_forward(Tensor x, int[] cast, int[] cast_t, bool decoded, Tensor? rng_state, Tensor w, "
      "Tensor? w_scales, Tensor w_amax, int w_rows, int w_e4m3_max, Tensor? bias=None) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "train_backward(Tensor dy, int[] cast, int[] cast_t, bool decoded, Tensor? rng_state, Tensor w_t, "
      "Tensor? w_t_scales, Tensor w_t_amax, int w_t_rows, int w_t_e4m3_max, Tensor x_t, Tensor x_t_scales, "
      "Tensor x_t_amax, int x_t_e4m3_max, ScalarType dw_dtype) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate, Tensor up, Tensor? weights=None) -> Tensor");
  m.def(
      "swiglu_backward(Tensor dy, Tensor gate, Tensor up, Tensor? weights=None) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(fp4gemm, CUDA, m) {
  m.impl("quantize", TORCH_BOX(&fp4gemm_torch::quantize));
  m.impl("quantize_both", TORCH_BOX(&fp4gemm_torch::quantize_both));
  m.impl("quantize_decoded", TORCH_BOX(&fp4gemm_torch::quantize_decoded));
  m.impl("quantize_fp8", TORCH_BOX(&fp4gemm_torch::quantize_fp8));
  m.impl("quantize_searched", TORCH_BOX(&fp4gemm_torch::quantize_searched));
  m.impl("quantize_stack", TORCH_BOX(&fp4gemm_torch::quantize_stack));
  m.impl("silu_and_mul_quantize", TORCH_BOX(&fp4gemm_torch::silu_and_mul_quantize));
  m.impl("silu_and_mul_quantize_decoded", TORCH_BOX(&fp4gemm_torch::silu_and_mul_quantize_decoded));
  m.impl("silu_and_mul_quantize_fp8", TORCH_BOX(&fp4gemm_torch::silu_and_mul_quantize_fp8));
  m.impl("rms_norm_quantize", TORCH_BOX(&fp4gemm_torch::rms_norm_quantize));
  m.impl("rms_norm_quantize_decoded", TORCH_BOX(&fp4gemm_torch::rms_norm_quantize_decoded));
  m.impl("rms_norm_quantize_fp8", TORCH_BOX(&fp4gemm_torch::rms_norm_quantize_fp8));
  m.impl("mxfp8_quantize", TORCH_BOX(&fp4gemm_torch::mxfp8_quantize));
  m.impl("mxfp8_dequantize", TORCH_BOX(&fp4gemm_torch::mxfp8_dequantize));
  m.impl("mxfp4_quantize", TORCH_BOX(&fp4gemm_torch::mxfp4_quantize));
  m.impl("mxfp4_dequantize", TORCH_BOX(&fp4gemm_torch::mxfp4_dequantize));
  m.impl("dequantize", TORCH_BOX(&fp4gemm_torch::dequantize));
  m.impl("decode", TORCH_BOX(&fp4gemm_torch::decode));
  m.impl("prepack", TORCH_BOX(&fp4gemm_torch::prepack));
  m.impl("unprepack", TORCH_BOX(&fp4gemm_torch::unprepack));
  m.impl("gemm", TORCH_BOX(&fp4gemm_torch::gemm));
  m.impl("gemm_out", TORCH_BOX(&fp4gemm_torch::gemm_out));
  m.impl("gemm_generated_source", TORCH_BOX(&fp4gemm_torch::gemm_generated_source));
  m.impl("gemm_generated_load", TORCH_BOX(&fp4gemm_torch::gemm_generated_load));
  m.impl("gemm_generated", TORCH_BOX(&fp4gemm_torch::gemm_generated));
  m.impl("route", TORCH_BOX(&fp4gemm_torch::route));
  m.impl("combine", TORCH_BOX(&fp4gemm_torch::combine));
  m.impl("zero_outside_groups", TORCH_BOX(&fp4gemm_torch::zero_outside_groups));
  m.impl("experts", TORCH_BOX(&fp4gemm_torch::experts));
  m.impl("linear", TORCH_BOX(&fp4gemm_torch::linear));
  m.impl("train_forward", TORCH_BOX(&fp4gemm_torch::train_forward));
  m.impl("train_backward", TORCH_BOX(&fp4gemm_torch::train_backward));
  m.impl("swiglu", TORCH_BOX(&fp4gemm_torch::swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&fp4gemm_torch::swiglu_backward));
  m.impl("quantize_records", TORCH_BOX(&fp4gemm_torch::quantize_records));
  m.impl("make_records", TORCH_BOX(&fp4gemm_torch::make_records));
  m.impl("gather_records", TORCH_BOX(&fp4gemm_torch::gather_records));
  m.impl("route_ranks", TORCH_BOX(&fp4gemm_torch::route_ranks));
  m.impl("combine_ranks", TORCH_BOX(&fp4gemm_torch::combine_ranks));
  m.impl("combine_part", TORCH_BOX(&fp4gemm_torch::combine_part));
  m.impl("combine_tree", TORCH_BOX(&fp4gemm_torch::combine_tree));
}
