// The arguments of SM90's GEMM of two operands that its tensor cores read as they are, with a generated
// epilogue.
#pragma once

#include "cutlass_evt/epilogue/generated_arguments.hpp"
#include "cutlass_evt/kernel/sm90_gemm_config.hpp"

namespace cutlass_evt {

struct Sm90GemmGeneratedParams : Sm90GemmParams {
  GeneratedInputs inputs;
  CUtensorMap aux[kMostGeneratedAux];  // of the further outputs, as that of D
};

}  // namespace cutlass_evt
