// The operator that quantizes stacks on CUDA: it checks tensors, allocates results and calls the C interface.
#include "fp4gemm/stacks.h"
#include "quantize_call.hpp"

namespace fp4gemm_torch {
namespace {

/// Makes codes and scales for one direction, (matrices, rows, k), and sets them as its results; without
/// elements if the direction is not wanted.
void set_side(fp4gemm_quantized_t& side, bool is_wanted, int64_t matrices, int64_t rows, int64_t k,
              int32_t device, Tensor& codes, Tensor& scales) {
  int64_t scale_rows = 0;
  int64_t scale_columns = 0;
  fp4gemm_padded_scale_shape(rows, k, &scale_rows, &scale_columns);
  int64_t const count = is_wanted ? matrices : 0;
  codes = empty3(count, rows, k / 2, ScalarType::Byte, device);
  scales = empty3(count, scale_rows, scale_columns, ScalarType::Float8_e4m3fn, device);
  if (is_wanted) {
    side.codes = static_cast<uint8_t*>(codes.mutable_data_ptr());
    side.scales = static_cast<uint8_t*>(scales.mutable_data_ptr());
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_stack(
    Tensor const& x, std::optional<Tensor> amax, bool rows, bool columns, bool per_row,
    int64_t block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_PARAMETER)) {
  int32_t const device = x.get_device_index();
  check_dims("x", x, 3);
  STD_TORCH_CHECK(rows || columns, "rows: is False, must be True where columns is False");
  int64_t const matrices = x.size(0);
  fp4gemm_quantize_args_t args = FP4GEMM_QUANTIZE_ARGS_INIT;
  args.m = x.size(1);
  args.k = x.size(2);
  STD_TORCH_CHECK(args.m > 0 && (args.m % 16 == 0 || !columns), "x: n is ", args.m,
                  ", must be positive, and a multiple of 16 with columns");
  STD_TORCH_CHECK(args.k > 0 && args.k % 16 == 0, "x: k is ", args.k, ", must be a positive multiple of 16");
  args.x = x.const_data_ptr();
  // The stride of a single row, and that of a single matrix, may be any number.
  args.x_row_stride = args.m > 1 ? x.stride(1) : matrices > 1 ? x.stride(0) : args.k;
  check_unit_stride("x", x, "k");
  STD_TORCH_CHECK(matrices <= 1 || x.stride(0) == args.m * args.x_row_stride, "x: stride along matrices is ",
                  x.stride(0), ", must be ", args.m * args.x_row_stride);
  args.x_dtype = dtype_of("x", x.scalar_type());
  QuantizeOptions const options{per_row, block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_AS_ARGUMENT)};
  set_options(args, options, device);
  (columns ? args.column : args.row).hadamard = hadamard_of(options);
  Tensor codes, scales, codes_t, scales_t;
  set_side(args.row, rows, matrices, args.m, args.k, device, codes, scales);
  set_side(args.column, columns, matrices, args.k, args.m, device, codes_t, scales_t);
  // A square has one scale for both directions, and so a matrix has one amax.
  fp4gemm_quantized_t& measured_by = rows ? args.row : args.column;
  int64_t const num_amaxes = amax.has_value() ? 0 : matrices;
  Tensor measured = empty(num_amaxes, per_row ? args.k : -1, ScalarType::Float, device);
  if (!amax.has_value()) {
    measured_by.amax = static_cast<float*>(measured.mutable_data_ptr());
  } else if (per_row) {
    check_matrix("amax", *amax, ScalarType::Float, device);
    check_shape("amax", *amax, matrices, args.k);
    measured_by.amax_given = static_cast<float const*>(amax->const_data_ptr());
  } else {
    measured_by.amax_given = check_vector("amax", *amax, matrices, false, device);
  }
  if (rows && columns) {
    args.column.amax_given = amax.has_value() ? args.row.amax_given : args.row.amax;
  }
  check_status(
      fp4gemm_quantize_stack(&args, narrow("x: matrices", matrices), device, current_stream(device)));
  return {codes, scales, codes_t, scales_t, measured};
}

}  // namespace fp4gemm_torch
