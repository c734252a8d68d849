// Host tests of the conversions of e4m3 in software, against those of CUDA's headers.
#include "quantize/e4m3_software.hpp"

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "checks.hpp"

namespace {

namespace software = fp4gemm::e4m3_software;

/// All upper halves of a float with lower halves at and beside each place where rounding changes.
void test_from_float() {
  uint32_t const lower_halves[] = {0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
  for (uint32_t upper = 0; upper <= 0xFFFF; ++upper) {
    for (uint32_t const lower : lower_halves) {
      float const x = software::from_bits(upper << 16 | lower);
      int const wanted = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
      int const got = software::from_float(x);
      CHECK(got == wanted, "%a: %#x, must be %#x", x, got, wanted);
    }
  }
}

void test_to_half() {
  for (int x = 0; x <= 0xFF; ++x) {
    auto const code = static_cast<uint8_t>(x);
    __half_raw const wanted = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
    __half_raw raw;
    raw.x = software::to_half_over_256(code);
    float const got = 256.0f * __half2float(__half(raw));
    float const value = __half2float(__half(wanted));
    CHECK(got == value || (got != got && value != value), "%#x: %a, must be %a", x, got, value);
    CHECK(software::bits_of(got) >> 31 == software::bits_of(value) >> 31 || got != got, "%#x: its sign", x);
  }
}

}  // namespace

int main() {
  test_from_float();
  test_to_half();
  return report();
}
