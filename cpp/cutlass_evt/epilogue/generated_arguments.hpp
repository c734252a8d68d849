// What a generated epilogue reads and writes beside the terms of EpilogueArguments: the inputs and the
// further outputs of its author. The header needs neither CUTLASS nor a CUDA compiler; epilogue/generated.hpp
// has the device code.
#pragma once

#include <cstdint>

#include "cutlass_evt/epilogue/arguments.hpp"

namespace cutlass_evt {

/// The most inputs of each kind, scalars and further outputs.
constexpr int kMostGeneratedVectors = 8;
constexpr int kMostGeneratedMatrices = 4;
constexpr int kMostGeneratedScalars = 16;
constexpr int kMostGeneratedAux = 4;

/// A matrix that is read, or written, element by element as D is. Its planes, of groups that are ragged in k,
/// follow each other as those of D do.
struct GeneratedMatrix {
  void* data = nullptr;
  int64_t row_stride = 0;  // elements
};

/// By value in the parameters of a kernel, so that a captured graph holds them.
struct GeneratedInputs {
  EpilogueVector rows[kMostGeneratedVectors];     // an element for each row of D
  EpilogueVector columns[kMostGeneratedVectors];  // for each column of the product
  float const* groups[kMostGeneratedVectors] = {};
  GeneratedMatrix matrices[kMostGeneratedMatrices];
  GeneratedMatrix aux[kMostGeneratedAux];
  float scalars[kMostGeneratedScalars] = {};
};

/// The arguments of a generated epilogue on prepacked weights, in place of EpilogueArguments.
struct GeneratedArguments : EpilogueArguments {
  GeneratedInputs inputs;
};

/// The types of the elements, which are fixed when an epilogue is compiled.
struct GeneratedTypes {
  OutputType output = OutputType::kBf16;  // of D and C
  OutputType matrices[kMostGeneratedMatrices] = {};
  OutputType aux[kMostGeneratedAux] = {};
};

}  // namespace cutlass_evt
