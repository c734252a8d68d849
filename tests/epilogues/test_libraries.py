"""Libraries of epilogues for Blackwell, without nvcc and a GPU: command line, sources, loading, arguments."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
from pathlib import Path

import fp4gemm
import pytest
import torch
from fp4gemm import _epilogue_build, _epilogue_library, _native
from fp4gemm import epilogues as ep
from fp4gemm.commands import main
from fp4gemm.commands.epilogue import find_epilogue
from fp4gemm.device import epilogues as checks
from fp4gemm.ops import epilogue as epilogue_ops
from fp4gemm.ops.epilogue import EpilogueCall

HEADERS = Path(__file__).resolve().parents[2] / "cpp" / "include"
FILE = """
import fp4gemm
from fp4gemm import epilogues as ep

@fp4gemm.epilogue
def doubled(acc, *, shift):
    return 2.0 * acc + shift
"""
SECOND = """
@fp4gemm.epilogue(pairs=True)
def halves(gate, up):
    return gate * up
"""


@fp4gemm.epilogue
def everything(acc, bias, c, r: ep.Row, s: ep.Column, m: ep.Matrix, *, shift):
    return r * acc * s + m + bias + c + shift, {"acc": acc}


@fp4gemm.epilogue(pairs=True)
def halves(gate, up):
    return gate * up


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


# ---- the command


def test_the_epilogue_of_a_file(file: Path) -> None:
    assert find_epilogue(str(file)).name == "doubled"
    file.write_text(FILE + SECOND)
    assert find_epilogue(f"{file}:halves").program.pairs


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "", "FILE.py: got 'nowhere.py', must be a file of Python"),
        ("x = 1\n", "", "mine.py has these epilogues: none; must have one"),
        (FILE + SECOND, "", "mine.py has these epilogues: doubled, halves; must have one, or name it"),
        (FILE, ":triple", "NAME: got 'triple', must be an epilogue of"),
    ],
)
def test_bad_files(
    text: str | None, name: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit) as stopped:
        main(["epilogue", "build", "nowhere.py" if text is None else f"{file}{name}", "--arch", "120f"])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_tools_are_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["epilogue", "build", str(file), "--arch", "120f", "--out", str(tmp_path / "x.so")]
    headers = tmp_path / "prefix" / "include"
    (headers / "fp4gemm").mkdir(parents=True)
    monkeypatch.setattr(_native, "library_dir", lambda: tmp_path / "prefix" / "lib")
    assert main(command) == 1
    assert "has no fp4gemm/epilogue_kernel.hpp" in capsys.readouterr().err
    (headers / "fp4gemm" / "epilogue_kernel.hpp").touch()
    old = tmp_path / "nvcc"
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.1'\n")
    old.chmod(0o755)
    monkeypatch.setattr(_epilogue_build, "_nvccs", lambda: iter([old, tmp_path / "none"]))
    assert main(command) == 1
    error = capsys.readouterr().err
    assert f"seen: {old} (release 12.4)" in error
    assert "set CUDACXX" in error
    old.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.1'\n")
    monkeypatch.setenv("CUTLASS_DIR", str(tmp_path))
    assert main(command) == 1
    assert f"CUTLASS 4.2.0 or newer was not found in CUTLASS_DIR ({tmp_path})" in capsys.readouterr().err
    assert not (tmp_path / "x.so").exists()


def test_a_compiler_error_is_shown(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = tmp_path / "nvcc"
    failing.write_text("#!/bin/sh\necho 'error: no such thing' >&2\nexit 3\n")
    failing.chmod(0o755)
    tools = _epilogue_build.Tools(failing, tmp_path, tmp_path)
    monkeypatch.setattr(_epilogue_build, "find_tools", lambda: tools)
    assert main(["epilogue", "build", str(file), "--arch", "100f", "--out", str(tmp_path / "x.so")]) == 1
    error = capsys.readouterr().err
    assert "exit status 3" in error
    assert "error: no such thing" in error


# ---- sources


def test_there_is_a_unit_for_each_kernel() -> None:
    found = _epilogue_build.units(everything, 100, ("dense", "grouped"), ("bf16", "fp16", "fp32"))
    assert list(found) == ["dense_16", "dense_fp32", "grouped_16", "grouped_fp32", "library"]
    assert "cutlass_evt/arch/sm100.hpp" in found["dense_16"]
    assert "SixteenBits, false" in found["dense_16"]
    assert "float, true" in found["grouped_fp32"]
    assert "kFormula{0, 1, 1, 1, 1, 1, 0, 1, 1, 1}" in found["library"]


def test_fp32_results_of_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="--dtype: is fp32, must be bf16 or fp16: halves has one result"):
        _epilogue_build.units(halves, 120, ("dense",), ("fp32",))


# ---- a library whose kernel is a function of the host


KERNEL = """
#include "fp4gemm/epilogue_library.hpp"

namespace fp4gemm::epilogue_library {
static size_t bytes(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const&, int) { return args.m; }
static char const* launch(fp4gemm_gemm_args_t const& args, fp4gemm_generated_t const& generated, void*, int,
                          fp4gemm_stream_t) {
  if (args.k == 64) {
    return "the kernel failed";
  }
  float* const d = static_cast<float*>(args.d);
  d[0] = generated.scalars[0];
  d[1] = static_cast<float const*>(generated.matrices[0].data)[generated.matrices[0].row_stride];
  d[2] = generated.rows[0].data[1];
  d[3] = static_cast<float>(generated.aux[0].row_stride);
  return nullptr;
}
extern Kernel const dense_fp32;
Kernel const dense_fp32{false, true, &bytes, &launch};
}  // namespace fp4gemm::epilogue_library
"""


def compiled(folder: Path, version: str = "") -> Path:
    """A library of `everything` with float32 output, compiled by the compiler of the host."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("no compiler of C++")
    main_unit = _epilogue_build.units(everything, 120, ("dense",), ("fp32",))["library"]
    if version:
        main_unit = main_unit.replace(_native.version(), version)
    for name, text in (("kernel", KERNEL), ("library", main_unit)):
        (folder / f"{name}.cpp").write_text(text)
    out = folder / "library.so"
    sources = [str(folder / "kernel.cpp"), str(folder / "library.cpp")]
    flags = ["-std=c++17", "-Wall", "-Werror", "-fPIC", "-fvisibility=hidden", "-shared", f"-I{HEADERS}"]
    subprocess.run([compiler, *flags, "-o", str(out), *sources], check=True)
    return out


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ep.EpilogueLibrary:
    monkeypatch.setattr(_epilogue_library, "_LOADED", {})
    return ep.load(compiled(tmp_path))


def operands(k: int = 32, **fields: object) -> _epilogue_library.Operands:
    codes, scales = torch.zeros(2, k // 2, dtype=torch.uint8), torch.zeros(1)
    weights = torch.zeros(8, k // 2, dtype=torch.uint8)
    product = _epilogue_library.Operands(
        *(codes, weights, scales, scales, None, 1.0, None, None, None),
        *(torch.zeros(8), torch.zeros(2, 8)),
    )
    return product._replace(**fields)  # type: ignore[arg-type]


FORM = (0, 1, 1, 1, 1, 1, 0, 1)
LIBRARY = ep.EpilogueLibrary(
    *(Path("none.so"), "everything", "", 120, ("dense", "grouped"), (torch.bfloat16,), ctypes.CDLL(None))
)


def launched(
    library: ep.EpilogueLibrary, product: _epilogue_library.Operands, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    inputs = [torch.tensor([1.0, 5.0]), torch.zeros(8), torch.arange(32.0).view(2, 16)[:, :8]]
    outputs = [torch.zeros(2, 8, dtype=dtype), torch.zeros(2, 12)[:, :8]]
    args = _epilogue_library.structs(product, FORM, inputs, [0.5], outputs)
    size = _epilogue_library.workspace_bytes(library, *args, 0)
    assert size == 2
    _epilogue_library.launch(library, *args, torch.zeros(size, dtype=torch.uint8), 0, None)
    return outputs[0]


def test_a_call_reaches_the_kernel(library: ep.EpilogueLibrary) -> None:
    assert library[1:6] == ("everything", everything.program.hash, 120, ("dense",), (torch.float32,))
    assert launched(library, operands())[0, :4].tolist() == [0.5, 16.0, 5.0, 12.0]


def test_failures_of_a_call(library: ep.EpilogueLibrary) -> None:
    with pytest.raises(RuntimeError, match=r"library\.so: the kernel failed"):
        launched(library, operands(64))
    with pytest.raises(RuntimeError, match="bias: is 0, must be 1 as in the epilogue of this library"):
        launched(library, operands(bias=None))
    with pytest.raises(RuntimeError, match="was built without dense products with 16-bit output"):
        launched(library, operands(), torch.bfloat16)
    with pytest.raises(RuntimeError, match="was built without grouped products with fp32 output"):
        launched(library, operands(offs=torch.tensor([2], dtype=torch.int32)))


def test_libraries_are_found(library: ep.EpilogueLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    program = everything.program.hash
    assert _epilogue_library.find(program, (12, 1)) == library
    with pytest.raises(NotImplementedError, match=r"epilogue build FILE\.py:NAME --arch 100f --out FILE\.so"):
        _epilogue_library.find(program, (10, 0))
    with pytest.raises(NotImplementedError, match=r"has compute capability 11\.0, must have 9\.0"):
        _epilogue_library.find(program, (11, 0))
    monkeypatch.setattr(_epilogue_library, "_LOADED", {})
    monkeypatch.setenv("FP4GEMM_EPILOGUES", str(library.path))
    _epilogue_library._load_of_variable.cache_clear()
    assert _epilogue_library.find(program, (12, 0)).path == library.path
    monkeypatch.setenv("FP4GEMM_EPILOGUES", "/nowhere.so")
    _epilogue_library._load_of_variable.cache_clear()
    with pytest.raises(ValueError, match=r"FP4GEMM_EPILOGUES: path: /nowhere\.so cannot be opened"):
        _epilogue_library.find(program, (12, 0))
    _epilogue_library._load_of_variable.cache_clear()


def test_the_operator_calls_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checks, the refusals, and what it passes on."""
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(_epilogue_library, "compute", lambda *args: seen.append(args))
    gen = torch.Generator().manual_seed(0)
    x, w = (fp4gemm.quantize(torch.randn(rows, 64, generator=gen).bfloat16()) for rows in (6, 16))
    inputs = [torch.ones(6).bfloat16(), torch.ones(16), torch.zeros(6, 16)]
    call = EpilogueCall(
        *(x.codes, w.codes, everything.text, inputs, [1.5], [2], x.scales, w.scales, None, 0.5),
        bias=torch.zeros(16),
        c=torch.zeros(6, 16).bfloat16(),
    )

    def computed(call: EpilogueCall) -> list[torch.Tensor]:
        outputs = [torch.empty(6, 16, dtype=dtype) for dtype in (call.out_dtype, torch.float32)]
        generated = epilogue_ops.Generated("", list(FORM), "")
        epilogue_ops.compute_by_library(LIBRARY, call, generated, outputs)
        return outputs

    d, aux = computed(call)
    assert (d.shape, d.dtype, aux.dtype) == ((6, 16), torch.bfloat16, torch.float32)
    library, product, form, given, scalars, outputs = seen[0]
    assert (library, form, scalars) == (LIBRARY, list(FORM), [1.5])
    assert isinstance(product, _epilogue_library.Operands)
    assert product.alpha == 0.5
    assert [t.dtype for t in given] == [torch.float32] * 3  # type: ignore[attr-defined]
    assert outputs[0] is d  # type: ignore[index]
    assert outputs[1] is aux  # type: ignore[index]
    half = call._replace(a=torch.zeros(6, 64).half(), scale_a=None)
    with pytest.raises(NotImplementedError, match="a, b: must both be NVFP4 codes with scales"):
        computed(half)
    with pytest.raises(NotImplementedError, match="kernel: got 'x', must be None"):
        computed(call._replace(kernel_name="x"))
    with pytest.raises(NotImplementedError, match=r"out_dtype: got torch\.float16, must be torch\.bfloat16"):
        computed(call._replace(out_dtype=torch.float16))
    with pytest.raises(NotImplementedError, match="offs: the groups divide k, must divide m"):
        computed(call._replace(offs=torch.tensor([64], dtype=torch.int32)))
    with pytest.raises(ValueError, match=r"inputs\[0\]: shape is \(5,\)"):
        computed(call._replace(inputs=[torch.ones(5), *inputs[1:]]))
    with pytest.raises(TypeError, match=r"c: dtype is torch\.float32, must be torch\.bfloat16"):
        computed(call._replace(c=torch.zeros(6, 16)))
    assert len(seen) == 1


def test_the_check_leaves_out_what_a_library_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_library", lambda program, device: LIBRARY)
    names = {result.name for result in fp4gemm.check_epilogue(halves, "cpu").results}
    assert names == {"300x400x288, bfloat16", "3x32x32, bfloat16", "ragged m, bfloat16"}


def test_bad_libraries(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="path: got int, must be the path of a library"):
        ep.load(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"lacks fp4gemm_epilogue_about, must be made by python -m fp4gemm"):
        ep.load(_native.library_path(_native.CORE_LIBRARY))
    path = compiled(tmp_path, "0.0.1")
    with pytest.raises(ValueError, match=r"was built by fp4gemm 0\.0\.1, must be built by"):
        ep.load(path)


def test_the_text_about_a_library_is_json(tmp_path: Path) -> None:
    unit = _epilogue_build.units(everything, 100, ("dense",), ("bf16",))["library"]
    line = next(line for line in unit.splitlines() if line.startswith("FP4GEMM_EPILOGUE_LIBRARY("))
    text = json.loads(line.removeprefix("FP4GEMM_EPILOGUE_LIBRARY(").rsplit('",', 1)[0] + '"')
    about = json.loads(text)
    assert (about["arch"], about["modes"], about["dtypes"]) == (100, ["dense"], [0, 1])
