"""The calls without checks in Python: which ones they are, and what happens when the operator refuses one."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import DecodedTensor, NVFP4Tensor, PrepackedTensor, _fast, _refusals, selection
from fp4gemm.training import _step as training_step

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
        assert _fast._gemm(a, b, {}) == "D"
        assert calls[-1] == ({"b_rows": b_rows} if b_rows else {})
    assert _fast._gemm(packed(), packed(), {"out_dtype": torch.float32}) == "D"
    assert calls[-1]["out_dtype"] is torch.float32


def test_calls_of_linear_layers_go_to_the_operator(calls: list[dict[str, Any]]) -> None:
    bias = torch.ones(24)
    for given in (None, bias):
        assert _fast._gemm(packed(), prepacked(), {"bias": given, "out_dtype": torch.bfloat16}) == "D"
        wanted = {"out_dtype": torch.bfloat16, "b_rows": 24} | ({} if given is None else {"bias": bias})
        assert calls[-1].keys() == wanted.keys()
        assert all(calls[-1][name] is value for name, value in wanted.items())


@pytest.mark.parametrize(
    ("a", "b", "terms"),
    [
        (packed(), packed(), {"bias": torch.ones(24, dtype=torch.bfloat16)}),
        (packed(), packed(), {"bias": torch.ones(24, requires_grad=True)}),
        (packed(), packed(), {"bias": torch.ones(1, 24)}),
        (packed(), packed(), {"bias": torch.ones(24, device="meta")}),
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
    assert _fast._gemm(a, b, terms) is None
    assert calls == []


def test_rules_and_first_calls_are_checked(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that has not multiplied yet may need its self-test."""
    with monkeypatch.context() as patch:
        patch.setattr(_fast, "_READY", {-1})
        assert _fast._gemm(packed(), packed(), {}) is None
    assert _fast._RULES is selection.RULES
    monkeypatch.setattr(_fast, "_RULES", ["a rule"])
    assert _fast._gemm(packed(), packed(), {}) is None
    assert calls == []


def raising(error: Exception) -> Any:
    def operator(*args: Any, **kwargs: Any) -> None:
        raise error

    return operator


CALLS = {
    "_GEMM": lambda: fp4gemm.mm(A, A),
    "_QUANTIZE": lambda: fp4gemm.quantize(X, scaling="tensor"),
    "_QUANTIZE_DECODED": lambda: fp4gemm.quantize(X, decoded=True),
    "_RMS_NORM_QUANTIZE": lambda: fp4gemm.rms_norm_quantize(X.half()),
    "_RMS_NORM_QUANTIZE_DECODED": lambda: fp4gemm.rms_norm_quantize(X.half(), decoded=True),
}
X = torch.ones(8, 32)
A = fp4gemm.quantize(X)


@pytest.mark.parametrize("operator", CALLS)
def test_a_refusal_is_counted_unless_the_checks_explain_it(
    operator: str, monkeypatch: pytest.MonkeyPatch, unexplained: Counter[str]
) -> None:
    """What is no refusal is raised: torch.OutOfMemoryError, which is a RuntimeError, is not tried again."""
    wanted = CALLS[operator]()
    monkeypatch.setattr(_fast, operator, raising(RuntimeError("b: k is 96, must be 64")))
    with pytest.warns(RuntimeWarning, match="please report this: b: k is 96, must be 64"):
        got = CALLS[operator]()
    assert torch.equal(*(t if isinstance(t, torch.Tensor) else t.amax for t in (got, wanted)))
    assert sum(unexplained.values()) == 1
    CALLS[operator]()
    assert sum(unexplained.values()) == 2
    for error in (torch.OutOfMemoryError("no memory"), TypeError("a fault of ours"), KeyError("another")):
        monkeypatch.setattr(_fast, operator, raising(error))
        with pytest.raises(type(error), match=str(error)):
            CALLS[operator]()


def test_an_explanation_is_raised_alone(unexplained: Counter[str]) -> None:
    """The error of the checks has no refusal as its context, and nothing is counted as unexplained."""
    refused = _refusals.REFUSED["fp4gemm.quantize"]
    with pytest.raises(ValueError, match=r"^x: k is 40, must be a positive multiple of 16") as raised:
        fp4gemm.quantize(torch.ones(8, 40))
    assert raised.value.__context__ is None
    assert _refusals.REFUSED["fp4gemm.quantize"] == refused + 1
    assert not unexplained


@pytest.mark.parametrize(
    "x",
    [X.t().contiguous().t(), torch.ones(8 * 32 + 1)[1:].view(8, 32), torch.ones(1, 32).expand(8, 32)],
    ids=["transposed", "misaligned", "expanded"],
)
def test_a_tensor_that_is_copied_first_is_no_refusal(x: torch.Tensor, unexplained: Counter[str]) -> None:
    assert torch.equal(fp4gemm.quantize(x).codes, A.codes)
    h = x.half().as_strided(x.shape, x.stride()) if x.is_contiguous() else x.half()
    assert fp4gemm.rms_norm_quantize(X.half(), residual=h)[0].shape == x.shape
    layer = fp4gemm.training.Linear(32, 32)
    for each in (x, X):
        layer(each.clone().requires_grad_() if each is X else x).sum().backward()
    assert not unexplained


# What an operator is given too much, where it is called before the checks.
BROKEN: dict[str, tuple[Any, str, Any]] = {
    "training: forward": (training_step, "TRAIN_FORWARD", lambda: step("nvidia")),
    "training: backward": (training_step, "TRAIN_BACKWARD", lambda: step("nvidia")),
}


def step(preset: str, **changed: Any) -> None:
    recipe = fp4gemm.training.PRESETS[preset].replace(**changed)
    layer = fp4gemm.training.Linear(32, 32, recipe=recipe)
    layer(torch.randn(32, 32, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("place", BROKEN)
def test_a_broken_fast_path_of_training_is_counted(
    place: str, monkeypatch: pytest.MonkeyPatch, unexplained: Counter[str]
) -> None:
    module, name, call = BROKEN[place]
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args: right(*args, None, None, None))
    with pytest.warns(RuntimeWarning, match=f"fp4gemm.{place}: the operator refused a call"):
        call()
    assert set(unexplained) == {f"fp4gemm.{place}"}
