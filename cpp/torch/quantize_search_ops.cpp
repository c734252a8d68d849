// The operator of the scale search on CUDA: it checks tensors, allocates results and calls the C interface.
#include "fp4gemm/scale_search.h"
#include "quantize_ops.hpp"
#include "tensors.hpp"

namespace fp4gemm_torch {

std::tuple<Tensor, Tensor, Tensor> quantize_searched(Tensor const& x, std::optional<Tensor> amax,
                                                     std::optional<Tensor> importance, bool per_row,
                                                     int64_t block_rows, int64_t e4m3_max, bool fp8_operand) {
  int32_t const device = x.get_device_index();
  check_dims("x", x, 2);
  check_unit_stride("x", x, "k");
  fp4gemm_quantize_searched_args_t args = FP4GEMM_QUANTIZE_SEARCHED_ARGS_INIT;
  args.m = x.size(0);
  args.k = x.size(1);
  STD_TORCH_CHECK(args.k > 0 && args.k % 16 == 0, "x: k is ", args.k, ", must be a positive multiple of 16");
  args.x = x.const_data_ptr();
  args.x_row_stride = args.m > 1 ? x.stride(0) : args.k;  // the stride of a single row may be any number
  args.x_dtype = dtype_of("x", x.scalar_type());
  args.scaling = per_row ? FP4GEMM_SCALING_ROW : FP4GEMM_SCALING_TENSOR;
  args.block_rows = narrow("block_rows", block_rows);
  args.e4m3_max = narrow("e4m3_max", e4m3_max);
  args.fp8_operand = fp8_operand ? 1 : 0;
  int64_t const num_amaxes = per_row ? args.m : 1;
  if (amax.has_value()) {
    args.amax_given = check_vector("amax", *amax, num_amaxes, false, device);
  }
  if (importance.has_value()) {
    args.importance = check_vector("importance", *importance, args.k, false, device);
  }
  int64_t scale_rows = 0;
  int64_t scale_columns = 0;
  fp4gemm_padded_scale_shape(args.m, args.k, &scale_rows, &scale_columns);
  Tensor codes = empty(args.m, args.k / 2, ScalarType::Byte, device);
  Tensor scales = empty(scale_rows, scale_columns, ScalarType::Float8_e4m3fn, device);
  Tensor measured = empty(amax.has_value() ? 0 : num_amaxes, -1, ScalarType::Float, device);
  args.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
  args.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  args.amax = amax.has_value() ? nullptr : static_cast<float*>(measured.mutable_data_ptr());
  check_status(fp4gemm_quantize_searched(&args, device, current_stream(device)));
  return {codes, scales, measured};
}

}  // namespace fp4gemm_torch
