// train_forward and train_backward on CUDA: the quantizers and products of a training step of a linear layer,
// two operators in place of seven, since on a small layer the calls take longer than the kernels.
#include "train_ops.hpp"

#include <string>

#include "gemm_call.hpp"
#include "gemm_ops.hpp"
#include "quantize_call.hpp"

namespace fp4gemm_torch {
namespace {

void check_flag(char const* name, char const* flag, int64_t value) {
  STD_TORCH_CHECK(value == 0 || value == 1, name, ": ", flag, " is ", value, ", must be 0 or 1");
}

/// How one operand is quantized: options of the quantize operators, a number each in the schema.
struct Cast {
  bool per_row;
  int64_t encode, four_over_six, e4m3_max, hadamard, signs;
  bool is_stochastic;

  Cast(char const* name, std::vector<int64_t> const& numbers) {
    STD_TORCH_CHECK(numbers.size() == 7, name, ": has ", numbers.size(), " numbers, must have 7");
    check_flag(name, "per_row", numbers[0]);
    check_flag(name, "is_stochastic", numbers[6]);
    per_row = numbers[0] != 0;
    encode = numbers[1];
    four_over_six = numbers[2];
    e4m3_max = numbers[3];
    hadamard = numbers[4];
    signs = numbers[5];
    is_stochastic = numbers[6] != 0;
    STD_TORCH_CHECK(e4m3_max == 448 || e4m3_max == 256, name, ": e4m3_max is ", e4m3_max,
                    ", must be 448 or 256");
  }

  /// The options of a quantize operator, with the defaults of those that a cast does not have.
  QuantizeOptions options(std::optional<Tensor> const& rng_state) const {
    QuantizeOptions result;
    result.per_row = per_row;
    result.encode = encode;
    result.four_over_six = four_over_six;
    result.e4m3_max = e4m3_max;
    result.hadamard = hadamard;
    result.signs = signs;
    result.rng_state = is_stochastic ? rng_state : std::nullopt;
    return result;
  }

  /// Whether one pass makes both: they differ in the rotation at most.
  bool is_one_pass_with(Cast const& other) const {
    return per_row == other.per_row && encode == other.encode && four_over_six == other.four_over_six &&
           e4m3_max == other.e4m3_max && is_stochastic == other.is_stochastic;
  }
};

/// x or dy, and the device of the call: a contiguous matrix whose sizes are positive multiples of 32.
int32_t check_input(char const* name, char const* weight, Tensor const& x) {
  STD_TORCH_CHECK(x.is_cuda(), name, ": must be on a CUDA device like ", weight);
  check_dims(name, x, 2);
  dtype_of(name, x.scalar_type());
  for (int i = 0; i < 2; ++i) {
    STD_TORCH_CHECK(x.size(i) > 0 && x.size(i) % 32 == 0, name, ": ", i == 0 ? "m" : "k", " is ", x.size(i),
                    ", must be a positive multiple of 32");
  }
  STD_TORCH_CHECK(x.is_contiguous(), name, ": must be contiguous");
  return x.get_device_index();
}

/// An operand as gemm reads it: codes with scales, or decoded values without.
struct Operand {
  Tensor data;
  std::optional<Tensor> scales;
  Tensor amax;
};

/// x quantized along an axis. amax: that of x where it is known.
Operand quantized(Tensor const& x, int64_t axis, Cast const& cast, bool decoded,
                  std::optional<Tensor> const& rng_state, std::optional<Tensor> const& amax = std::nullopt) {
  QuantizeOptions const options = cast.options(rng_state);
  if (decoded) {
    auto const [data, measured] = quantize_decoded(
        x, amax, options.per_row, axis FP4GEMM_CAST_OPTIONS(FP4GEMM_OF_OPTIONS), std::nullopt);
    return {data, std::nullopt, amax.value_or(measured)};
  }
  auto const [codes, scales, measured] =
      quantize(x, amax, options.per_row, axis, options.block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_OF_OPTIONS),
               std::nullopt);
  return {codes, scales, amax.value_or(measured)};
}

/// x quantized along its rows, and along its columns; the amax is measured once where both have the same.
std::pair<Operand, Operand> quantized_both(Tensor const& x, Cast const& cast, Cast const& cast_t,
                                           bool decoded, bool decoded_t,
                                           std::optional<Tensor> const& rng_state) {
  for (Cast const* each : {&cast, &cast_t}) {
    STD_TORCH_CHECK(!each->is_stochastic || rng_state.has_value(),
                    "rng_state: is None, must be given for stochastic rounding");
  }
  STD_TORCH_CHECK(cast.hadamard == 0, "cast: hadamard is ", cast.hadamard, ", must be 0; it is for cast_t");
  bool const is_one_pass = cast.is_one_pass_with(cast_t);
  if (is_one_pass && !decoded && !decoded_t) {
    QuantizeOptions const options = cast_t.options(rng_state);  // but for hadamard those of cast
    auto const [codes, scales, amax, codes_t, scales_t, amax_t] =
        quantize_both(x, std::nullopt, std::nullopt, options.per_row,
                      options.block_rows FP4GEMM_CAST_OPTIONS(FP4GEMM_OF_OPTIONS), std::nullopt);
    return {{codes, scales, amax}, {codes_t, scales_t, amax_t}};
  }
  Operand const row = quantized(x, -1, cast, decoded, rng_state);
  bool const has_one_amax = is_one_pass && !cast.per_row && cast_t.hadamard == 0;
  return {row, quantized(x, 0, cast_t, decoded_t, rng_state,
                         has_one_amax ? std::optional<Tensor>(row.amax) : std::nullopt)};
}

/// A quantized operand (n, k) that was given, whose parts have this name in front; returns n. rows: n if it
/// is prepacked, else 0. x: the name of the operand that has the same k.
int64_t check_given(std::string const& name, Operand const& w, int64_t rows, int64_t e4m3_max, int64_t k,
                    char const* x, int32_t device) {
  int64_t const n = check_weight(name.c_str(), w.data, w.scales, rows, e4m3_max, k, false, x);
  if (rows == 0) {
    check_scales((name + "_scales").c_str(), *w.scales, n, k, device);
  }
  vector_of((name + "_amax").c_str(), w.amax, 0, n, device);
  return n;
}

/// a b^T + bias of operands that were quantized with these bounds; b_rows is that of gemm.
Tensor product(Operand const& a, int64_t a_e4m3_max, Operand const& b, int64_t b_e4m3_max, int64_t b_rows,
               std::optional<Tensor> const& bias, ScalarType out_dtype) {
  // The product of the bounds is exact, so that there is one rounding.
  float const alpha = 1.0f / static_cast<float>(36 * a_e4m3_max * b_e4m3_max);
  return gemm(a.data, b.data, a.scales, b.scales, std::nullopt, alpha, std::nullopt, a.amax, b.amax, bias, 0,
              std::nullopt, 1.0, false, false, b_rows, std::nullopt, out_dtype);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> train_forward(Tensor const& x, std::vector<int64_t> cast,
                                                         std::vector<int64_t> cast_t, bool decoded,
                                                         std::optional<Tensor> rng_state, Tensor const& w,
                                                         std::optional<Tensor> w_scales, Tensor const& w_amax,
                                                         int64_t w_rows, int64_t w_e4m3_max,
                                                         std::optional<Tensor> bias) {
  int32_t const device = check_input("x", "w", x);
  Operand const right{w, w_scales, w_amax};
  check_given("w", right, w_rows, w_e4m3_max, x.size(1), "x", device);
  Cast const of_x("cast", cast), of_x_t("cast_t", cast_t);
  auto const [left, x_t] = quantized_both(x, of_x, of_x_t, decoded, false, rng_state);
  Tensor y = product(left, of_x.e4m3_max, right, w_e4m3_max, w_rows, bias, x.scalar_type());
  return {y, x_t.data, *x_t.scales, x_t.amax};
}

std::tuple<Tensor, Tensor> train_backward(Tensor const& dy, std::vector<int64_t> cast,
                                          std::vector<int64_t> cast_t, bool decoded,
                                          std::optional<Tensor> rng_state, Tensor const& w_t,
                                          std::optional<Tensor> w_t_scales, Tensor const& w_t_amax,
                                          int64_t w_t_rows, int64_t w_t_e4m3_max, Tensor const& x_t,
                                          Tensor const& x_t_scales, Tensor const& x_t_amax,
                                          int64_t x_t_e4m3_max, ScalarType dw_dtype) {
  int32_t const device = check_input("dy", "w_t", dy);
  Operand const of_dx{w_t, w_t_scales, w_t_amax};
  Operand const of_dw{x_t, x_t_scales, x_t_amax};
  int64_t const k = check_given("w_t", of_dx, w_t_rows, w_t_e4m3_max, dy.size(1), "dy", device);
  int64_t const x_t_rows = check_given("x_t", of_dw, 0, x_t_e4m3_max, dy.size(0), "dy", device);
  STD_TORCH_CHECK(x_t_rows == k, "x_t: has ", x_t_rows, " rows, must have ", k, " as w_t");
  dtype_of("dw_dtype", dw_dtype);
  Cast const of_dy("cast", cast), of_dy_t("cast_t", cast_t);
  auto const [left, dy_t] = quantized_both(dy, of_dy, of_dy_t, decoded, decoded, rng_state);
  Tensor dx = product(left, of_dy.e4m3_max, of_dx, w_t_e4m3_max, w_t_rows, std::nullopt, dy.scalar_type());
  Tensor dw = product(dy_t, of_dy_t.e4m3_max, of_dw, x_t_e4m3_max, 0, std::nullopt, dw_dtype);
  return {dx, dw};
}

}  // namespace fp4gemm_torch
