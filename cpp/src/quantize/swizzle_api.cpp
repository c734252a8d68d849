// The C interface of swizzling block scales: checks, and the launch on the given device.
#include "check.hpp"
#include "quantize/on_device.hpp"
#include "quantize/sizes.hpp"
#include "quantize/swizzle.hpp"

namespace fp4gemm {
namespace {

fp4gemm_status_t swizzle_scales(SwizzleJob const& job, int device, fp4gemm_stream_t stream) {
  FP4GEMM_TRY(check_size("num_matrices", job.num_matrices, 0, 1));
  FP4GEMM_TRY(check_size("rows", job.rows, 0, 1));
  FP4GEMM_TRY(check_size("columns", job.columns, 1, 1, Rules::kMaxK / kBlock));
  FP4GEMM_TRY(check_size("row_stride", job.row_stride, job.columns, 1, Rules::kMaxK));
  FP4GEMM_CHECK(product_is_at_most(Rules::kMaxElements, job.num_matrices, job.rows, job.row_stride),
                "num_matrices: is %d, of %lld rows that are %lld bytes apart, must have at most %lld bytes",
                job.num_matrices, ll(job.rows), ll(job.row_stride), ll(Rules::kMaxElements));
  int64_t const scales = job.num_matrices * job.rows * job.columns;
  FP4GEMM_TRY(check_buffer("compact", job.compact, scales, 1));
  FP4GEMM_TRY(check_buffer("swizzled", job.swizzled, scales));
  return on_device(device, [&](DeviceProperties const& properties) {
    return launch_swizzle_scales(job, properties, stream);
  });
}

}  // namespace
}  // namespace fp4gemm

extern "C" {

fp4gemm_status_t fp4gemm_swizzle_scales(int num_matrices, int64_t rows, int64_t columns,
                                        uint8_t const* compact, int64_t row_stride, uint8_t* swizzled,
                                        int device, fp4gemm_stream_t stream) {
  return fp4gemm::swizzle_scales({num_matrices, rows, columns, compact, row_stride, swizzled}, device,
                                 stream);
}

}  // extern "C"
