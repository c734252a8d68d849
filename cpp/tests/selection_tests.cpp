// Host tests of the kernel table and of selection: every architecture, SM count and class of shape.
#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checks.hpp"

namespace {

void test_table() {
  std::set<std::string> names;
  for (int i = 0; i < fp4gemm_kernel_count(); ++i) {
    fp4gemm_kernel_info_t const info = info_at(i);
    CHECK(names.insert(info.name).second, "%s is in the table twice", info.name);
    char expected[96];
    std::string const operand = info.operand;
    // The table has kernels of both kinds for FP8 tokens, whose sums are promoted or not.
    bool const is_fast = operand == "prepacked_fp8" && std::strstr(info.name, "_fast_") != nullptr;
    bool const names_operand = operand.rfind("prepacked", 0) == 0 || operand.rfind("mx", 0) == 0;
    std::string const variant = names_operand          ? operand + (is_fast ? "_fast_" : "_")
                                : info.is_swapped != 0 ? "swapped_"
                                                       : "";
    std::snprintf(expected, sizeof(expected), "sm%d_%s_%dx%dx%d_c%dx%d_%s%s_%s", info.arch, info.mode,
                  info.tile_m, info.tile_n, info.tile_k, info.cluster_m, info.cluster_n, variant.c_str(),
                  info.epilogue, kDtypeNames[info.out_dtype]);
    CHECK(std::string(expected) == info.name, "%s should be called %s", info.name, expected);
  }
  fp4gemm_kernel_info_t info{};
  CHECK(fp4gemm_kernel_info(-1, &info) == FP4GEMM_ERROR_INVALID_ARGUMENT, "index -1 was accepted");
  CHECK(std::strstr(fp4gemm_last_error(), "index: is -1") != nullptr, "%s", fp4gemm_last_error());
  CHECK(fp4gemm_kernel_info(fp4gemm_kernel_count(), &info) == FP4GEMM_ERROR_INVALID_ARGUMENT,
        "an index beyond the end was accepted");
  CHECK(fp4gemm_kernel_info(0, nullptr) == FP4GEMM_ERROR_INVALID_ARGUMENT, "a null info was accepted");
}

struct Formats {
  fp4gemm_format_t a = FP4GEMM_FORMAT_NVFP4;
  fp4gemm_format_t b = FP4GEMM_FORMAT_NVFP4;

  /// True if a kernel that reads `operand` can be given these formats, after a conversion or without.
  bool suit(char const* operand) const {
    bool const prepackable = b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_PREPACKED;
    if (a == FP4GEMM_FORMAT_E4M3 || b == FP4GEMM_FORMAT_PREPACKED_FP8) {
      return std::strcmp(operand, "prepacked_fp8") == 0 && a == FP4GEMM_FORMAT_E4M3 &&
             (b == FP4GEMM_FORMAT_NVFP4 || b == FP4GEMM_FORMAT_PREPACKED_FP8);
    }
    if (a == FP4GEMM_FORMAT_MXFP8 && b == FP4GEMM_FORMAT_MXFP4) {
      return std::strcmp(operand, "mxfp8_mxfp4") == 0 || std::strcmp(operand, "mxfp8") == 0 ||
             std::strcmp(operand, "fp16") == 0;
    }
    if (std::strcmp(operand, "mxfp8_mxfp4") == 0) {
      return false;
    }
    for (auto const& [format, name] :
         {std::pair{FP4GEMM_FORMAT_MXFP8, "mxfp8"}, {FP4GEMM_FORMAT_MXFP4, "mxfp4"}}) {
      if (a == format || std::strcmp(operand, name) == 0) {
        return a == format && (std::strcmp(operand, name) == 0 || std::strcmp(operand, "fp16") == 0);
      }
    }
    if (std::strcmp(operand, "nvfp4") == 0) {
      return a == FP4GEMM_FORMAT_NVFP4 && b == FP4GEMM_FORMAT_NVFP4;
    }
    if (std::strcmp(operand, "fp16") == 0) {
      return a != FP4GEMM_FORMAT_BF16 && b != FP4GEMM_FORMAT_PREPACKED;
    }
    bool const is_bf16 = std::strcmp(operand, "prepacked_bf16") == 0;
    return prepackable && std::strcmp(operand, "prepacked_fp8") != 0 && is_bf16 == (a == FP4GEMM_FORMAT_BF16);
  }
};

constexpr Formats kNvfp4{};
constexpr Formats kDecoded{FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_FP16};
constexpr Formats kStreamed{FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_PREPACKED};
constexpr Formats kFormatPairs[] = {kNvfp4,
                                    kDecoded,
                                    kStreamed,
                                    {FP4GEMM_FORMAT_NVFP4, FP4GEMM_FORMAT_PREPACKED},
                                    {FP4GEMM_FORMAT_BF16, FP4GEMM_FORMAT_PREPACKED},
                                    {FP4GEMM_FORMAT_BF16, FP4GEMM_FORMAT_NVFP4},
                                    {FP4GEMM_FORMAT_FP16, FP4GEMM_FORMAT_NVFP4},
                                    {FP4GEMM_FORMAT_E4M3, FP4GEMM_FORMAT_PREPACKED_FP8},
                                    {FP4GEMM_FORMAT_E4M3, FP4GEMM_FORMAT_NVFP4},
                                    {FP4GEMM_FORMAT_MXFP8, FP4GEMM_FORMAT_MXFP8},
                                    {FP4GEMM_FORMAT_MXFP4, FP4GEMM_FORMAT_MXFP4},
                                    {FP4GEMM_FORMAT_MXFP8, FP4GEMM_FORMAT_MXFP4}};

struct Wanted {
  int arch, num_sms;
  int64_t m, n, k;
  fp4gemm_dtype_t dtype = FP4GEMM_BF16;
  Formats formats = kNvfp4;
  int num_groups = 0;
  fp4gemm_ragged_t ragged = FP4GEMM_RAGGED_M;
  int batch_invariant = 0;
  fp4gemm_activation_t activation = FP4GEMM_ACTIVATION_NONE;
  int use_fast_accum = 0;

  int select() const {
    return fp4gemm_select_kernel(arch, num_sms, m, n, k, num_groups, ragged, dtype, formats.a, formats.b,
                                 batch_invariant, use_fast_accum, activation);
  }
};

/// True if the table has a kernel of the architecture that computes what is wanted.
bool table_has_kernel(int arch, Wanted const& wanted) {
  bool const grouped = wanted.num_groups > 0;
  bool const ragged_k = grouped && wanted.ragged == FP4GEMM_RAGGED_K;
  bool const gated = wanted.activation == FP4GEMM_ACTIVATION_SWIGLU;
  static std::map<std::tuple<int, int, int, int, bool, bool, bool>, bool> known;
  auto const key = std::make_tuple(arch, static_cast<int>(wanted.dtype), static_cast<int>(wanted.formats.a),
                                   static_cast<int>(wanted.formats.b), grouped, ragged_k, gated);
  if (auto const found = known.find(key); found != known.end()) {
    return found->second;
  }
  bool& result = known[key];
  for (int i = 0; i < fp4gemm_kernel_count(); ++i) {
    fp4gemm_kernel_info_t const info = info_at(i);
    bool const is_prepacked = std::string(info.operand).rfind("prepacked", 0) == 0;
    result = result || (info.arch == arch && info.out_dtype == wanted.dtype &&
                        std::strcmp(info.mode, grouped ? "grouped" : "dense") == 0 &&
                        std::strcmp(info.epilogue, gated ? "gated" : "rowcol") == 0 &&
                        wanted.formats.suit(info.operand) && !(ragged_k && is_prepacked));
  }
  return result;
}

/// One selection: the kernel is of the device's architecture, of the mode and output type, and accepts the
/// operands; a second call returns the same.
void check_selection(Wanted const& wanted) {
  int const arch = arch_of(wanted.arch);
  bool const gated = wanted.activation == FP4GEMM_ACTIVATION_SWIGLU;
  int const index = wanted.select();
  if (!table_has_kernel(arch, wanted)) {
    CHECK(index == -1, "sm%d got kernel %d", wanted.arch, index);
    return;
  }
  CHECK(index >= 0 && index < fp4gemm_kernel_count(), "sm%d m %lld got index %d", wanted.arch,
        static_cast<long long>(wanted.m), index);
  if (index < 0) {
    return;
  }
  fp4gemm_kernel_info_t const info = info_at(index);
  CHECK(info.arch == arch && info.out_dtype == wanted.dtype, "sm%d got %s", wanted.arch, info.name);
  CHECK(wanted.formats.suit(info.operand), "operands of formats %d and %d got %s", wanted.formats.a,
        wanted.formats.b, info.name);
  CHECK(std::strcmp(info.mode, wanted.num_groups > 0 ? "grouped" : "dense") == 0, "%d groups got %s",
        wanted.num_groups, info.name);
  CHECK(std::strcmp(info.epilogue, gated ? "gated" : "rowcol") == 0, "got %s", info.name);
  CHECK(wanted.select() == index, "selection of %s is not repeatable", info.name);
}

/// Every device, SM count and class of shape gets a kernel of its own family and output type, or none.
void test_selection_is_legal() {
  int const archs[] = {70, 75, 80, 86, 89, 90, 100, 101, 103, 107, 110, 120, 121};
  int const sm_counts[] = {1, 2, 16, 48, 78, 114, 132, 148, 160, 188};
  int64_t const sizes_m[] = {0, 1, 7, 16, 33, 64, 128, 257, 1024, 4096, 8192, 131072, 5000000, 2147483647};
  int64_t const sizes_n[] = {8, 64, 192, 2112, 7168, 57344};
  int64_t const sizes_k[] = {32, 512, 7168, 16384};
  for (int arch : archs) {
    for (int num_sms : sm_counts) {
      for (int64_t m : sizes_m) {
        for (int64_t n : sizes_n) {
          for (int64_t k : sizes_k) {
            for (fp4gemm_dtype_t dtype : kDtypes) {
              for (Formats const& formats : kFormatPairs) {
                for (int num_groups : {0, 1, 256}) {
                  check_selection({arch, num_sms, m, n, k, dtype, formats, num_groups});
                }
              }
            }
          }
        }
      }
    }
  }
  CHECK((Wanted{90, 0, 1, 8, 32}.select()) == -1, "no SMs, yet a kernel");
  CHECK((Wanted{90, 132, -1, 8, 32}.select()) == -1, "m of -1, yet a kernel");
  CHECK((Wanted{90, 132, 1, 8, 32, static_cast<fp4gemm_dtype_t>(7)}.select()) == -1,
        "an unknown type, yet a kernel");
}

/// Batch-invariant selection does not depend on m; groups that are ragged in k may have k = 0.
void test_selection_of_modes() {
  for (int arch : {90, 100, 103, 120, 121}) {
    for (int num_groups : {0, 8, 1500}) {
      Wanted wanted{arch, 132, 1, 4096, 7168};
      wanted.num_groups = num_groups;
      wanted.batch_invariant = 1;
      int const first = wanted.select();
      for (int64_t m : {0, 2, 63, 64, 65, 128, 1000, 100000}) {
        wanted.m = m;
        CHECK(wanted.select() == first, "sm%d: m %lld changes a batch-invariant selection", arch,
              static_cast<long long>(m));
      }
    }
    Wanted ragged_k{arch, 132, 4096, 4096, 0};
    ragged_k.num_groups = 8;
    ragged_k.ragged = FP4GEMM_RAGGED_K;
    check_selection(ragged_k);
    ragged_k.k = 8192;
    check_selection(ragged_k);
    for (fp4gemm_dtype_t dtype : kDtypes) {
      for (int num_groups : {0, 8}) {
        Wanted gated{arch, 132, 300, 4096, 7168, dtype};
        gated.num_groups = num_groups;
        gated.activation = FP4GEMM_ACTIVATION_SWIGLU;
        check_selection(gated);
      }
    }
  }
}

/// What the cost model must get right with any figures: large tiles where they fill the device, small ones
/// where large ones would not.
void test_selection_follows_shape() {
  struct Case {
    int arch, num_sms;
    int64_t m, n, k;
    Formats formats;
    int least_tile, most_tile;  // of tile_m * tile_n
  };
  Case const cases[] = {
      {90, 132, 8192, 8192, 8192, kNvfp4, 128 * 256, 128 * 256},
      {90, 132, 8192, 8192, 8192, kDecoded, 128 * 256, 128 * 256},
      {90, 132, 4096, 4096, 4096, kNvfp4, 128 * 128, 128 * 256},
      {90, 132, 1, 8192, 8192, kNvfp4, 8 * 32, 8 * 32},
      {90, 132, 16, 8192, 8192, kNvfp4, 16 * 32, 16 * 32},
      {90, 132, 64, 8192, 8192, kNvfp4, 64 * 32, 64 * 128},
      {90, 132, 1, 8192, 8192, kDecoded, 1, 64 * 128},
      {90, 132, 256, 4096, 4096, kDecoded, 64 * 128, 64 * 128},
      {90, 132, 1024, 4096, 4096, kDecoded, 128 * 256, 128 * 256},
      {100, 148, 16384, 16384, 8192, kNvfp4, 256 * 256, 256 * 256},
      {100, 148, 1, 7168, 2048, kNvfp4, 1, 256 * 128},
      {103, 160, 16384, 16384, 8192, kNvfp4, 256 * 256, 256 * 256},
      {103, 160, 16, 4096, 7168, kNvfp4, 1, 256 * 128},
      {120, 188, 8192, 8192, 8192, kNvfp4, 256 * 128, 256 * 128},
      {120, 170, 1, 8192, 8192, kNvfp4, 1, 128 * 128},
      {120, 170, 128, 4096, 4096, kNvfp4, 1, 128 * 128},
      {121, 48, 4096, 4096, 4096, kNvfp4, 256 * 128, 256 * 128},
      {121, 48, 16, 2048, 4096, kNvfp4, 1, 128 * 128},
      {120, 170, 1, 4096, 4096, kStreamed, 8 * 64, 16 * 64},
      {120, 170, 16, 4096, 4096, kStreamed, 8 * 64, 32 * 128},
      {120, 170, 4096, 4096, 4096, kStreamed, 64 * 128, 64 * 128},
  };
  for (Case const& c : cases) {
    if (arch_of(c.arch) == 0) {
      continue;
    }
    for (fp4gemm_dtype_t dtype : kDtypes) {
      fp4gemm_kernel_info_t const info =
          info_at(Wanted{c.arch, c.num_sms, c.m, c.n, c.k, dtype, c.formats}.select());
      int const tile = info.tile_m * info.tile_n;
      // Not every type has the largest tiles.
      int const most_of_others = info.arch == 120 ? 128 * 128 : 256 * 128;
      int const least = dtype == FP4GEMM_BF16 ? c.least_tile : std::min(c.least_tile, most_of_others);
      CHECK(tile >= least && tile <= c.most_tile, "sm%d m %lld n %lld k %lld got %s", c.arch,
            static_cast<long long>(c.m), static_cast<long long>(c.n), static_cast<long long>(c.k), info.name);
    }
  }
}

/// A kernel that is never selected costs build time and size for nothing: each is selected for some problem
/// on some device. All GPUs have an even number of SMs.
void test_every_kernel_is_selected() {
  struct Device {
    int arch, num_sms;
  };
  Device const devices[] = {{90, 78},   {90, 114}, {90, 132},  {100, 148},
                            {103, 160}, {120, 84}, {120, 170}, {121, 48}};
  int64_t const sizes_m[] = {1,   8,   12,  16,  24,  32,   48,   64,   96,   128,  160,  192,   256,
                             320, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 65536};
  int64_t const sizes_n[] = {64, 256, 768, 1024, 2048, 3072, 4096, 6144, 8192, 14336, 28672};
  int64_t const sizes_k[] = {256, 768, 2048, 7168, 14336};
  std::vector<char> is_selected(fp4gemm_kernel_count());
  for (Device const& device : devices) {
    for (int64_t m : sizes_m) {
      for (int64_t n : sizes_n) {
        for (int64_t k : sizes_k) {
          for (fp4gemm_dtype_t dtype : kDtypes) {
            for (Formats const& formats : kFormatPairs) {
              for (int num_groups : {0, 4, 16, 128}) {
                for (auto activation : {FP4GEMM_ACTIVATION_NONE, FP4GEMM_ACTIVATION_SWIGLU}) {
                  Wanted wanted{device.arch, device.num_sms, m, n, k, dtype, formats, num_groups};
                  wanted.activation = activation;
                  // use_fast_accum changes the selection for FP8 tokens alone.
                  for (int fast = 0; fast <= (formats.a == FP4GEMM_FORMAT_E4M3 ? 1 : 0); ++fast) {
                    wanted.use_fast_accum = fast;
                    if (int const index = wanted.select(); index >= 0) {
                      is_selected[index] = 1;
                    }
                  }
                }
              }
            }
          }
        }
      }
    }
  }
  for (int i = 0; i < fp4gemm_kernel_count(); ++i) {
    CHECK(is_selected[i] != 0, "%s is selected for no problem", info_at(i).name);
  }
}

}  // namespace

int main() {
  test_table();
  test_selection_is_legal();
  test_selection_of_modes();
  test_selection_follows_shape();
  test_every_kernel_is_selected();
  return report();
}
