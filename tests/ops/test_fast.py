"""The calls without checks in Python: which ones they are, and what happens when the operator refuses one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, PrepackedTensor, _fast, selection

DEVICE = 7  # an index that no test machine has


class OnCuda(SimpleNamespace):
    """Stands in for a CUDA tensor: the fast path asks for nothing else."""

    shape = (8, 16)
    requires_grad = False

    def get_device(self) -> int:
        return DEVICE


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of each call of the operator, on a device that has multiplied before."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(_fast, "_GEMM", lambda *operands, **terms: seen.append(terms) or "D")
    monkeypatch.setattr(_fast, "_READY", {DEVICE})
    return seen


def packed(**changed: Any) -> NVFP4Tensor:
    parts = {"codes": OnCuda(), "scales": OnCuda(), "amax": OnCuda(), "e4m3_max": 448, **changed}
    return NVFP4Tensor._trusted(**parts)


def prepacked() -> PrepackedTensor:
    return PrepackedTensor._trusted(OnCuda(), OnCuda(), (24, 32), 448)


def test_plain_calls_go_to_the_operator(calls: list[dict[str, Any]]) -> None:
    decoded = DecodedTensor._trusted(OnCuda(shape=(8, 32)), OnCuda(), 448)
    for a, b, b_rows in ((packed(), packed(), 0), (packed(), prepacked(), 24), (decoded, prepacked(), 24)):
        assert _fast.mm(a, b, {}) == "D"
        assert calls[-1] == ({"b_rows": b_rows} if b_rows else {})
    assert _fast.mm(packed(), packed(), {"out_dtype": torch.float32}) == "D"
    assert calls[-1]["out_dtype"] is torch.float32


def test_calls_of_linear_layers_go_to_the_operator(calls: list[dict[str, Any]]) -> None:
    bias = torch.ones(24)
    for given in (None, bias):
        assert _fast.mm(packed(), prepacked(), {"bias": given, "out_dtype": torch.bfloat16}) == "D"
        wanted = {"out_dtype": torch.bfloat16, "b_rows": 24} | ({} if given is None else {"bias": bias})
        assert calls[-1].keys() == wanted.keys()
        assert all(calls[-1][name] is value for name, value in wanted.items())


@pytest.mark.parametrize(
    ("a", "b", "terms"),
    [
        (packed(), packed(), {"bias": torch.ones(24, dtype=torch.bfloat16)}),
        (packed(), packed(), {"bias": torch.ones(24, requires_grad=True)}),
        (packed(), packed(), {"bias": torch.ones(1, 24)}),
        (packed(), packed(), {"activation": "silu"}),
        (packed(), packed(), {"out_dtype": None, "beta": 1.0}),
        (packed(), packed(), {"out_dtype": torch.float64}),
        (packed(), packed(hadamard_signs=3), {}),
        (packed(offs=OnCuda()), packed(), {}),
        (packed(amax=OnCuda(requires_grad=True)), packed(), {}),
        (packed(codes=OnCuda(shape=(8, 32))), prepacked(), {}),
        (OnCuda(), packed(), {}),
        (packed(), OnCuda(), {}),
    ],
)
def test_other_calls_are_checked(a: Any, b: Any, terms: dict[str, Any], calls: list[dict[str, Any]]) -> None:
    assert _fast.mm(a, b, terms) is None
    assert calls == []


def test_rules_and_first_calls_are_checked(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has not multiplied yet may need its self-test."""
    with monkeypatch.context() as patch:
        patch.setattr(_fast, "_READY", {-1})
        assert _fast.mm(packed(), packed(), {}) is None
    assert _fast._RULES is selection.RULES
    monkeypatch.setattr(_fast, "_RULES", ["a rule"])
    assert _fast.mm(packed(), packed(), {}) is None
    assert calls == []


@pytest.mark.parametrize("operator", ["_GEMM", "_QUANTIZE", "_QUANTIZE_DECODED"])
def test_a_refusal_is_explained_but_no_memory_is_raised(
    operator: str, calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.OutOfMemoryError is a RuntimeError, which must not make the call run a second time."""

    def call() -> object:
        if operator == "_GEMM":
            return _fast.mm(packed(), packed(), {})
        return _fast.quantize(torch.ones(1), operator == "_QUANTIZE_DECODED", {"scaling": "tensor"})

    def raising(error: Exception) -> Any:
        def operator(*args: Any, **kwargs: Any) -> None:
            raise error

        return operator

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(_fast, operator, raising(RuntimeError("b: k is 96, must be 64")))
    assert call() is None
    for error in (torch.OutOfMemoryError("no memory"), ValueError("a fault of ours")):
        monkeypatch.setattr(_fast, operator, raising(error))
        with pytest.raises(type(error), match=str(error)):
            call()


def test_the_cpu_is_checked() -> None:
    t = fp4gemm.quantize(torch.ones(8, 32))
    assert _fast.quantize(torch.ones(8, 32), False, {}) is None
    assert _fast.mm(t, t, {}) is None
