"""The generated C++ of an epilogue, compiled for the host, beside its evaluation in torch."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fp4gemm.epilogues import Program
from fp4gemm.epilogues.cpp import FILE_NAME, header
from fp4gemm.epilogues.evaluate import evaluate
from toolchain import REPO, cutlass_headers
from torch import Tensor

_VECTORS = ("rows", "columns", "groups", "matrices", "scalars")
_FIXED = ("acc", "acc", "alpha", "row", "col", "col", "bias", "bias", "c", "c")
_DRIVER = """
#include "fp4gemm_generated.hpp"
using namespace cutlass_evt::generated;

extern "C" void run(long count, float const* in, float* out) {
  for (long i = 0; i < count; ++i) {
    float const acc[2] = {in[0], in[1]};
    Terms t[2]{};
    for (int j = 0; j < 2; ++j) {
      t[j].alpha = in[2];
      t[j].row = in[3];
      t[j].col = in[4 + j];
      t[j].bias = in[6 + j];
      t[j].c = in[8 + j];
    }
    in += 10;
    for (int j = 0; j < kRowInputs; ++j) t[0].rows[j] = *in++;
    for (int j = 0; j < kColumnInputs; ++j) t[0].columns[j] = *in++;
    for (int j = 0; j < kGroupInputs; ++j) t[0].groups[j] = *in++;
    for (int j = 0; j < kMatrixInputs; ++j) t[0].matrices[j] = *in++;
    for (int j = 0; j < kScalars; ++j) t[0].scalars[j] = *in++;
    cutlass_evt::op::Division<false> divide;
    Results const y = APPLY;
    for (int j = 0; j < kResults; ++j) *out++ = y.d[j];
    for (int a = 0; a < kNumAux; ++a) {
      for (int j = 0; j < kResults; ++j) *out++ = y.aux[a][j];
    }
  }
}
"""


def inputs_of(program: Program) -> list[tuple[str, int]]:
    """What the columns of the input of the compiled function are."""
    fixed = [(kind, _FIXED[:i].count(kind)) for i, kind in enumerate(_FIXED)]
    return fixed + [(kind, i) for kind in _VECTORS for i in range(program.count(kind))]


def compiled(program: Program, folder: Path) -> Callable[[Tensor], Tensor]:
    """The generated function for the host: (count, inputs) to (count, outputs); skips without a compiler."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / FILE_NAME).write_text(header(program))
    source, library = folder / "driver.cpp", folder / "driver.so"
    call = "apply(acc[0], acc[1], t[0], t[1], divide)" if program.pairs else "apply(acc[0], t[0], divide)"
    source.write_text(_DRIVER.replace("APPLY", call))
    includes = [f"-I{path}" for path in (folder, REPO / "cpp", cutlass_headers())]
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", *includes, str(source)]
    done = subprocess.run([*command, "-o", str(library)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    function = ctypes.CDLL(str(library)).run
    function.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def run(given: Tensor) -> Tensor:
        given, out = given.contiguous(), torch.empty(given.shape[0], len(program.outputs))
        function(given.shape[0], given.data_ptr(), out.data_ptr())
        return out

    return run


def evaluated(program: Program, given: Tensor) -> Tensor:
    """The same by the reference: (count, inputs) to (count, outputs)."""
    read = dict(zip(inputs_of(program), given.unbind(1), strict=True))
    for i in range(2 if program.pairs else 1):
        product = read["acc", i]
        for factor in program.applied:
            product = product * read[factor, i if factor == "col" else 0]
        read["acc", i] = product
    outputs = evaluate(program, lambda kind, i: read[kind, i])
    return torch.stack([x.expand(given.shape[0]) for x in outputs], dim=1)
