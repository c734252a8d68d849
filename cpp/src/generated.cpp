// The sources of kernels with an epilogue that is compiled at run time.
#include "generated.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#include "fp4gemm/generated.h"

namespace fp4gemm {

void SourceText::append(char const* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  size_t const at = std::min(length, bytes);
  int const written = std::vsnprintf(text + at, bytes - at, format, arguments);
  va_end(arguments);
  length += static_cast<size_t>(std::max(0, written));
}

bool GeneratedForm::operator==(GeneratedForm const& other) const {
  return arch == other.arch && device == other.device && tile == other.tile &&
         types.output == other.types.output && num_matrices == other.num_matrices &&
         num_aux == other.num_aux &&
         std::equal(types.matrices, types.matrices + num_matrices, other.types.matrices) &&
         std::equal(types.aux, types.aux + num_aux, other.types.aux);
}

namespace {

void append_types(SourceText& to, cutlass_evt::OutputType const* types, int count) {
  to.append(", {");
  for (int i = 0; i < count; ++i) {
    to.append("%scutlass_evt::OutputType{%d}", i == 0 ? "" : ", ", static_cast<int>(types[i]));
  }
  to.append("}");
}

}  // namespace

void write_generated_source(GeneratedKernels const& kernels, fp4gemm_kernel_info_t const& kernel,
                            GeneratedForm const& form, fp4gemm_generated_t const& generated, SourceText& to) {
  to.append("// sm%d %s %dx%dx%d\n", kernel.arch, kernel.operand, kernel.tile_m, kernel.tile_n,
            kernel.tile_k);
  to.append(
      "#include \"fp4gemm_nvrtc.hpp\"\n"
      "#include \"cutlass_evt/epilogue/generated.hpp\"\n"
      "namespace {\n"
      "namespace formula = cutlass_evt::generated;\n"
      "static_assert(formula::kPairs == %s && formula::kResults == %d && formula::kTakesBias == %s &&\n"
      "              formula::kTakesC == %s, \"the formula is of another kind\");\n"
      "static_assert(formula::kRowInputs == %d && formula::kColumnInputs == %d && formula::kGroupInputs == "
      "%d &&\n"
      "              formula::kMatrixInputs == %d && formula::kScalars == %d && formula::kNumAux == %d,\n"
      "              \"the formula has other inputs or outputs\");\n",
      generated.takes_pairs != 0 ? "true" : "false", generated.num_results,
      generated.takes_bias != 0 ? "true" : "false", generated.takes_c != 0 ? "true" : "false",
      generated.num_rows, generated.num_columns, generated.num_groups, generated.num_matrices,
      generated.num_scalars, generated.num_aux);
  to.append(
      "struct Types {\n"
      "  static constexpr cutlass_evt::GeneratedTypes kTypes{cutlass_evt::OutputType{%d}",
      static_cast<int>(form.types.output));
  append_types(to, form.types.matrices, form.num_matrices);
  append_types(to, form.types.aux, form.num_aux);
  to.append("};\n};\n}  // namespace\n");
  kernels.write_source(form.tile, to);
  to.append(
      "extern \"C\" __global__ void __launch_bounds__(Config::kThreads, Config::kCtasPerSm)\n"
      "    fp4gemm_generated(__grid_constant__ Kernel::Params const params) {\n"
      "  extern __shared__ char fp4gemm_generated_shared[];\n"
      "  Kernel::run(params, fp4gemm_generated_shared);\n"
      "}\n");
}

}  // namespace fp4gemm
