// The prepack and unprepack operators on CUDA: check tensors, allocate, call the C interface.
#include "gemm_call.hpp"
#include "quantize_call.hpp"
#include "quantize_ops.hpp"
#include "tensors.hpp"

namespace fp4gemm_torch {

Tensor prepack(Tensor const& codes, Tensor const& scales, bool fp8) {
  int32_t const device = codes.get_device_index();
  STD_TORCH_CHECK(codes.dim() == 2 || codes.dim() == 3, "codes: has ", codes.dim(),
                  " dimensions, must have 2 or 3");
  check_contiguous("codes", codes, ScalarType::Byte, device);
  bool const is_stack = codes.dim() == 3;
  int64_t const matrices = is_stack ? codes.size(0) : 1;
  int64_t const n = codes.size(codes.dim() - 2);
  int64_t const k = codes.size(codes.dim() - 1) * 2;
  STD_TORCH_CHECK(matrices > 0, "codes: has 0 matrices, must have 1 or more");
  check_stacked_scales("scales", scales, is_stack ? matrices : 0, n, k, device);
  int64_t const bytes = fp8 ? fp4gemm_prepacked_fp8_bytes(n, k) : fp4gemm_prepacked_bytes(n, k);
  ScalarType const type = fp8 ? ScalarType::Char : ScalarType::Byte;
  Tensor packed = is_stack ? empty(matrices, bytes, type, device) : empty(bytes, -1, type, device);
  auto const launch = fp8 ? fp4gemm_prepack_fp8 : fp4gemm_prepack;
  check_status(launch(static_cast<int>(matrices), n, k, static_cast<uint8_t const*>(codes.const_data_ptr()),
                      static_cast<uint8_t const*>(scales.const_data_ptr()), packed.mutable_data_ptr(), device,
                      current_stream(device)));
  return packed;
}

std::tuple<Tensor, Tensor> unprepack(Tensor const& packed, int64_t n, int64_t k) {
  int32_t const device = packed.get_device_index();
  STD_TORCH_CHECK(packed.dim() == 1 || packed.dim() == 2, "packed: has ", packed.dim(),
                  " dimensions, must have 1 or 2");
  bool const fp8 = is_in_order_of_fp8(packed);
  check_contiguous("packed", packed, fp8 ? ScalarType::Char : ScalarType::Byte, device);
  STD_TORCH_CHECK(n >= 0 && n <= INT32_MAX, "n: is ", n, ", must be between 0 and ", INT32_MAX);
  int64_t const step = fp8 ? kFp8Step : 16;
  STD_TORCH_CHECK(k > 0 && k % step == 0 && k <= INT32_MAX, "k: is ", k, ", must be a positive multiple of ",
                  step, " up to ", INT32_MAX);
  bool const is_stack = packed.dim() == 2;
  int64_t const matrices = is_stack ? packed.size(0) : 1;
  int64_t const bytes = packed.size(packed.dim() - 1);
  STD_TORCH_CHECK(matrices > 0, "packed: has 0 matrices, must have 1 or more");
  STD_TORCH_CHECK(bytes == prepacked_bytes(packed, n, k), "packed: has ", bytes,
                  " bytes a matrix, must have ", prepacked_bytes(packed, n, k), " for n = ", n,
                  " and k = ", k);
  int64_t rows = 0;
  int64_t columns = 0;
  fp4gemm_padded_scale_shape(n, k, &rows, &columns);
  Tensor codes = is_stack ? empty3(matrices, n, k / 2, ScalarType::Byte, device)
                          : empty(n, k / 2, ScalarType::Byte, device);
  Tensor scales = is_stack ? empty3(matrices, rows, columns, ScalarType::Float8_e4m3fn, device)
                           : empty(rows, columns, ScalarType::Float8_e4m3fn, device);
  auto const launch = fp8 ? fp4gemm_unprepack_fp8 : fp4gemm_unprepack;
  check_status(launch(static_cast<int>(matrices), n, k, packed.const_data_ptr(),
                      static_cast<uint8_t*>(codes.mutable_data_ptr()),
                      static_cast<uint8_t*>(scales.mutable_data_ptr()), device, current_stream(device)));
  return {codes, scales};
}

}  // namespace fp4gemm_torch
