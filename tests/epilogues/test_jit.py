"""Kernels that are compiled at run time, without a GPU: their sources, NVRTC, the cache, errors."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import capi
import pytest
from fp4gemm import _jit

FORMULA = """
#pragma once
#include "cutlass_evt/epilogue/arithmetic.hpp"
namespace cutlass_evt::generated {
constexpr bool kPairs = false, kDivides = false, kTakesBias = true, kTakesC = true;
constexpr int kOperations = 6, kResults = 1, kNumAux = 1;
constexpr int kRowInputs = 1, kColumnInputs = 1, kGroupInputs = 0, kMatrixInputs = 1, kScalars = 1;
struct Terms {
  float alpha, row, col, bias, c;
  float rows[1], columns[1], groups[1], matrices[1], scalars[1];
};
struct Results {
  float d[1];
  float aux[1][1];
};
template <class Divide>
CUTLASS_HOST_DEVICE Results apply(float acc, Terms const& t, Divide&) {
  nodes::multiply_rn<float> const mul;
  nodes::add_rn<float> const add;
  float const z = add(mul(t.alpha, mul(t.col, mul(t.row, acc))), t.bias);
  Results y;
  y.d[0] = add(mul(mul(z, t.rows[0]), add(t.columns[0], t.matrices[0])), mul(t.scalars[0], t.c));
  y.aux[0][0] = z;
  return y;
}
}  // namespace cutlass_evt::generated
"""

SMALL = 'extern "C" __global__ void fp4gemm_generated() {}\n'


def generated_source(kernel: str, **fields: object) -> tuple[str, str]:
    """The error of the library, or "", and the source."""
    text = ctypes.create_string_buffer(4096)
    status = capi.core().fp4gemm_generated_source_of_kernel(
        kernel.encode(), capi.RAGGED_M, capi.Generated(**fields), text, len(text)
    )
    if status != capi.SUCCESS:
        return capi.core().fp4gemm_last_error().decode(), ""
    return "", text.value.decode()


def source_of(kernel: str, **fields: object) -> str:
    error, text = generated_source(kernel, **fields)
    assert error == ""
    return text


OF_FORMULA = {
    "takes_bias": 1,
    "takes_c": 1,
    "num_rows": 1,
    "num_columns": 1,
    "num_matrices": 1,
    "num_scalars": 1,
    "num_aux": 1,
}


def hopper_kernels() -> list[capi.KernelInfo]:
    found = [
        k for k in capi.kernels(capi.core()) if k.arch == 90 and k.epilogue == b"rowcol" and k.out_dtype == 0
    ]
    if not found:
        pytest.skip("the library was built without kernels for 9.0")
    return found


def need_nvrtc() -> None:
    """Skips where NVRTC or the headers of the kernels are missing."""
    try:
        _jit.nvrtc()
        _jit.headers_dir()
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FP4GEMM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


def test_every_kernel_but_two_tiles_has_a_source() -> None:
    without = set()
    for kernel in hopper_kernels():
        name = kernel.name.decode()
        error, text = generated_source(name, **OF_FORMULA)
        if error:
            assert error == f"kernel: '{name}' has no form with an epilogue that is compiled at run time"
            without.add((kernel.operand, kernel.tile_m, kernel.tile_n))
        else:
            assert text.startswith(f"// sm90 {kernel.operand.decode()} {kernel.tile_m}x{kernel.tile_n}x")
            assert '#include "cutlass_evt/epilogue/generated.hpp"' in text
    packed = {key for key in without if key[0] == b"nvfp4"}
    assert without - packed == {(b"prepacked", 80, 192)}


def test_sources_of_dense_and_grouped_kernels_on_prepacked_weights_are_equal() -> None:
    names = [k.name.decode() for k in hopper_kernels() if b"dense" in k.name and b"_8x64x512_" in k.name]
    assert names
    for name in names:
        assert source_of(name) == source_of(name.replace("dense", "grouped"))


def test_the_types_are_in_the_source() -> None:
    kernel = next(k.name.decode() for k in hopper_kernels() if b"_8x64x512_" in k.name)
    matrices = (capi.GeneratedMatrix * 4)()
    matrices[0].dtype = capi.FP32
    texts = {
        source_of(kernel),
        source_of(kernel.replace("_bf16", "_fp16") if kernel.endswith("_bf16") else kernel),
        source_of(kernel, num_matrices=1),
        source_of(kernel, num_matrices=1, matrices=matrices),
        source_of(kernel, takes_pairs=1),
        source_of(kernel, takes_pairs=1, num_results=2),
    }
    assert len(texts) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_results": 2}, "generated.num_results: is 2, must be 1, or with pairs 1 or 2"),
        ({"num_rows": 9}, "generated.num_rows: is 9, must be between 0 and 8"),
        ({"num_aux": -1}, "generated.num_aux: is -1, must be between 0 and 4"),
        ({"takes_pairs": 2}, "generated.takes_pairs: is 2, must be 0 or 1"),
        ({"struct_size": 8}, "generated: struct_size is 8, must be "),
    ],
    ids=["results", "rows", "aux", "flag", "size"],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    error, _ = generated_source(hopper_kernels()[0].name.decode(), **fields)
    assert error.startswith(message)


def test_a_short_buffer_is_refused() -> None:
    kernel = hopper_kernels()[0].name
    text = ctypes.create_string_buffer(100)
    generated = capi.Generated()
    assert capi.core().fp4gemm_generated_source_of_kernel(kernel, 0, generated, text, 100) != capi.SUCCESS
    assert b"bytes: is 100, must be more than" in capi.core().fp4gemm_last_error()


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["_8x64x512_c1x1_prepacked_rowcol", "_128x256x64_c2x1_rowcol", "_prepacked_fp8_"]
)
def test_kernels_compile(part: str, cache: Path) -> None:
    kernels = [k.name.decode() for k in hopper_kernels() if part in k.name.decode()]
    need_nvrtc()
    cubin = _jit.compiled(source_of(kernels[0], **OF_FORMULA), FORMULA)
    assert cubin[:4] == b"\x7fELF"
    assert b"fp4gemm_generated" in cubin


def test_another_formula_than_the_source_is_for_is_refused(cache: Path) -> None:
    kernel = hopper_kernels()[0].name.decode()
    need_nvrtc()
    with pytest.raises(RuntimeError, match="the formula has other inputs or outputs"):
        _jit.compiled(source_of(kernel, takes_bias=1, takes_c=1), FORMULA)
    assert list(cache.glob("*.cubin")) == []


def test_the_cache_has_one_file_for_each_source_and_formula(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    need_nvrtc()
    with caplog.at_level(logging.WARNING, logger="fp4gemm._jit"):
        first = _jit.compiled(f"// small\n{SMALL}", "")
        assert "compiling an epilogue for the kernel small" in caplog.text
        caplog.clear()
        assert _jit.compiled(f"// small\n{SMALL}", "") == first
        assert caplog.text == ""
    _jit.compiled(f"// small\n{SMALL}", "// another formula")
    _jit.compiled(f"// other\n{SMALL}", "")
    assert len(list(cache.glob("*.cubin"))) == 3
    assert not [path for path in cache.iterdir() if path.suffix not in (".cubin", ".lock")]


def _compile_in_process(folder: str, barrier: multiprocessing.synchronize.Barrier, count: object) -> None:
    import os

    os.environ["FP4GEMM_CACHE"] = folder
    original = _jit._compile

    def counted(*arguments: object) -> bytes:
        with count.get_lock():  # type: ignore[attr-defined]
            count.value += 1  # type: ignore[attr-defined]
        return original(*arguments)  # type: ignore[arg-type]

    _jit._compile = counted
    barrier.wait()
    _jit.compiled(f"// small\n{SMALL}", "")


def test_processes_compile_once(tmp_path: Path) -> None:
    need_nvrtc()
    context = multiprocessing.get_context("fork")
    barrier, count = context.Barrier(3), context.Value("i", 0)
    processes = [
        context.Process(target=_compile_in_process, args=(str(tmp_path), barrier, count)) for _ in range(3)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert count.value == 1


def test_threads_compile_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_nvrtc()
    original, calls = _jit._compile, []

    def counted(*arguments: object) -> bytes:
        calls.append(arguments)
        return original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(_jit, "_compile", counted)
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(_jit.compiled(f"// small\n{SMALL}", "")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(set(found)) == 1
    assert len(found) == 4


def test_threads_of_a_pool_compile_in_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits and the messages of a compilation in this process."""
    need_nvrtc()
    first = _jit.compiled(f"// small\n{SMALL}", "// here")
    with pytest.raises(RuntimeError) as here:
        _jit.compiled("#error no\n", "")

    def fail(*_: object) -> NoReturn:
        pytest.fail("compiled in this process")

    monkeypatch.setattr(_jit._nvrtc, "compiled", fail)
    with ThreadPoolExecutor(2, initializer=_jit.compile_in_processes) as pool:
        headers = ["// there", "// and there"]
        assert list(pool.map(_jit.compiled, [f"// small\n{SMALL}"] * 2, headers)) == [first] * 2
        with pytest.raises(RuntimeError) as there:
            pool.submit(_jit.compiled, "#error no\n", "").result()
        assert str(there.value) == str(here.value).strip()
        for program, says in (
            ("/bin/false", "ended with the status 1"),
            ("/no/python", "cannot run /no/python"),
        ):
            monkeypatch.setattr(sys, "executable", program)
            with pytest.raises(RuntimeError, match=says):
                pool.submit(_jit.compiled, SMALL, f"// {program}").result()


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_nvrtc()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FP4GEMM_CACHE", str(tmp_path / "file"))
    with pytest.raises(RuntimeError, match="FP4GEMM_CACHE must name a folder that can be written"):
        _jit.compiled(SMALL, "")


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4GEMM_LIBRARY_DIR", str(tmp_path / "lib"))
    with pytest.raises(RuntimeError, match="has no headers of kernels, must be of a build with 90a"):
        _jit.headers_dir()
    monkeypatch.setattr(_jit, "_folders", lambda *names: iter(()))
    monkeypatch.setattr(_jit, "_MAJORS", (999,))
    with pytest.raises(RuntimeError, match="pip install nvidia-cuda-nvrtc"):
        _jit.nvrtc.__wrapped__()
