// What the torch operators share: checks whose messages name the argument, the current stream, allocation.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "fp4gemm/fp4gemm.h"

// A torch without CUDA lacks this function, hence weak; it is called for CUDA tensors only.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index,
                                                                                   void** ret_stream);

namespace fp4gemm_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline char const* name_of(ScalarType type) { return torch::headeronly::toString(type); }

/// An integer of a schema, which has 64 bits, as the int of a C argument.
inline int narrow(char const* name, int64_t value) {
  int const narrowed = static_cast<int>(value);
  STD_TORCH_CHECK(narrowed == value, name, ": is ", value, ", must fit in 32 bits");
  return narrowed;
}

inline void check_status(fp4gemm_status_t status) {
  STD_TORCH_CHECK(status == FP4GEMM_SUCCESS, "fp4gemm: ", fp4gemm_last_error());
}

inline fp4gemm_stream_t current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<fp4gemm_stream_t>(stream);
}

inline fp4gemm_dtype_t dtype_of(char const* name, ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16: return FP4GEMM_BF16;
    case ScalarType::Half: return FP4GEMM_FP16;
    case ScalarType::Float: return FP4GEMM_FP32;
    default: STD_TORCH_CHECK(false, name, ": dtype is ", name_of(type), ", must be BFloat16, Half or Float");
  }
}

/// A new contiguous tensor on a CUDA device; cols < 0 makes a vector.
inline Tensor empty(int64_t rows, int64_t cols, ScalarType type, int32_t device) {
  int64_t const sizes[] = {rows, cols};
  int64_t const strides[] = {cols < 1 ? 1 : cols, 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(cols < 0 ? 1 : 2, sizes, strides,
                                                  static_cast<int32_t>(type), aoti_torch_device_type_cuda(),
                                                  device, &handle));
  return Tensor(handle);
}

/// A new contiguous tensor of three dimensions.
inline Tensor empty3(int64_t matrices, int64_t rows, int64_t cols, ScalarType type, int32_t device) {
  int64_t const row = cols < 1 ? 1 : cols;
  int64_t const sizes[] = {matrices, rows, cols};
  int64_t const strides[] = {row * (rows < 1 ? 1 : rows), row, 1};
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(3, sizes, strides, static_cast<int32_t>(type),
                                                  aoti_torch_device_type_cuda(), device, &handle));
  return Tensor(handle);
}

inline void check_dtype(char const* name, Tensor const& tensor, ScalarType type) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, name, ": dtype is ", name_of(tensor.scalar_type()),
                  ", must be ", name_of(type));
}

inline void check_device(char const* name, Tensor const& tensor, int32_t device) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, name, ": must be on cuda:", device,
                  " like the other arguments");
}

inline void check_contiguous(char const* name, Tensor const& tensor, ScalarType type, int32_t device) {
  check_dtype(name, tensor, type);
  check_device(name, tensor, device);
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": must be contiguous");
}

inline void check_dims(char const* name, Tensor const& tensor, int64_t dims) {
  STD_TORCH_CHECK(tensor.dim() == dims, name, ": has ", tensor.dim(), " dimensions, must have ", dims);
}

/// The last dimension, `axis` in messages, has unit stride. Without elements, or with one element in it, its
/// stride may be any number: torch keeps the zero strides of an expanded tensor that is empty.
inline void check_unit_stride(char const* name, Tensor const& tensor, char const* axis) {
  int64_t const last = tensor.dim() - 1;
  STD_TORCH_CHECK(tensor.size(last) <= 1 || tensor.numel() == 0 || tensor.stride(last) == 1, name,
                  ": stride along ", axis, " is ", tensor.stride(last), ", must be 1");
}

/// A contiguous matrix on the device.
inline void check_matrix(char const* name, Tensor const& tensor, ScalarType type, int32_t device) {
  check_dims(name, tensor, 2);
  check_contiguous(name, tensor, type, device);
}

inline void check_shape(char const* name, Tensor const& tensor, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(tensor.size(0) == rows && tensor.size(1) == cols, name, ": shape is (", tensor.size(0),
                  ", ", tensor.size(1), "), must be (", rows, ", ", cols, ")");
}

/// The swizzled scales of one matrix (matrices 0) or of a stack of matrices, of scale_rows rows each before
/// padding. `type` is that of NVFP4's scales, or e8m0, that of MXFP8's and MXFP4's.
inline void check_stacked_scales(char const* name, Tensor const& scales, int64_t matrices, int64_t scale_rows,
                                 int64_t k, int32_t device, ScalarType type = ScalarType::Float8_e4m3fn) {
  int64_t const lead = matrices > 0 ? 1 : 0;
  int64_t rows = 0;
  int64_t cols = 0;
  // A row of e8m0 scales has one for each 32 of k, half as many as one of NVFP4.
  fp4gemm_padded_scale_shape(scale_rows, type == ScalarType::Float8_e8m0fnu ? k / 2 : k, &rows, &cols);
  check_dims(name, scales, 2 + lead);
  check_contiguous(name, scales, type, device);
  STD_TORCH_CHECK(matrices == 0 || scales.size(0) == matrices, name, ": has ", scales.size(0),
                  " matrices, must have ", matrices);
  STD_TORCH_CHECK(scales.size(lead) == rows && scales.size(lead + 1) == cols, name, ": shape is (",
                  scales.size(lead), ", ", scales.size(lead + 1), "), must be (", rows, ", ", cols, ")");
}

/// The swizzled scales of a (rows, k) tensor.
inline void check_scales(char const* name, Tensor const& scales, int64_t rows, int64_t k, int32_t device) {
  check_stacked_scales(name, scales, 0, rows, k, device);
}

/// A contiguous fp32 vector of `length` elements, or of one element if that is allowed.
inline float const* check_vector(char const* name, Tensor const& vector, int64_t length, bool one_allowed,
                                 int32_t device) {
  check_dtype(name, vector, ScalarType::Float);
  check_device(name, vector, device);
  STD_TORCH_CHECK(vector.dim() == 1 && (vector.size(0) == length || (one_allowed && vector.size(0) == 1)),
                  name, ": has ", vector.numel(), " elements in ", vector.dim(),
                  " dimensions, must be a vector of ", length, one_allowed ? " or 1" : "");
  STD_TORCH_CHECK(vector.is_contiguous(), name, ": must be contiguous");
  return static_cast<float const*>(vector.const_data_ptr());
}

}  // namespace fp4gemm_torch
