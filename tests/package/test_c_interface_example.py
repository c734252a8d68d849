"""examples/c_interface.py: its structs, its decoder on the host, and the whole example on a GPU."""

from __future__ import annotations

import ctypes
from typing import Any

import capi
import fp4gemm
import numpy as np
import pytest
import torch

from examples import c_interface


class HostMemory:
    """Memory of the host in the place of a device."""

    device, stream = 0, 0

    def get(self, pointer: int, array: Any) -> Any:
        ctypes.memmove(array.ctypes.data, pointer, array.nbytes)
        return array


@pytest.mark.parametrize("name", ["Quantized", "QuantizeArgs", "Operand", "Vector", "GemmArgs"])
def test_structs_are_those_of_the_header(name: str) -> None:
    """tests/package/test_capi.py compares those of capi.py with the headers."""
    own, checked = getattr(c_interface, name), getattr(capi, name)

    def fields(kind: Any) -> list[tuple[str, str]]:
        return [(field, declared.__name__) for field, declared in kind._fields_]

    assert fields(own) == fields(checked)
    assert bytes(own()) == bytes(checked()), "the values of the _INIT macro"


@pytest.mark.parametrize("shape", [(1, 64), (130, 192), (257, 80)])
def test_decoded_values_are_those_of_dequantize(shape: tuple[int, int], gen: torch.Generator) -> None:
    x = torch.randn(*shape, generator=gen) * torch.logspace(-30, 30, shape[0]).unsqueeze(1)
    x[0, :16] = 0
    t = fp4gemm.quantize(x)
    matrix = object.__new__(c_interface.Matrix)
    matrix.gpu, matrix.rows, matrix.k = HostMemory(), *shape
    matrix.codes, matrix.scales, matrix.amax = (part.data_ptr() for part in (t.codes, t.scales, t.amax))
    assert np.allclose(matrix.values(), t.dequantize().double().numpy(), rtol=1e-6, atol=0)


def test_the_example_says_why_it_does_not_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(c_interface, "runtime", None)
    assert c_interface.main() == 0
    assert capsys.readouterr().out.startswith("skipped: cuda-python is not installed (pip install ")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("FP4GEMM_LIBRARY_DIR", str(tmp_path))
    with pytest.raises(ImportError, match=rf"libfp4gemm.so: is not in {tmp_path}, must be there"):
        c_interface.opened()


@pytest.mark.gpu
def test_on_a_gpu(cuda: torch.device, capsys: pytest.CaptureFixture[str]) -> None:
    """The quantizers and the product, on a stream and from a graph."""
    pytest.importorskip("cuda.bindings")
    assert c_interface.main() == 0
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 2
    assert all(": 0 of 153600 elements are wrong" in line for line in printed)
