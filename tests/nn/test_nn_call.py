"""nn.Linear is one call of the operator linear; later calls omit the checks while nothing has changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn, selection
from fp4gemm.nn import linear as module
from nn_helpers import Names, float_linear, same_bits
from torch import Tensor

K, N = 64, 24


@pytest.fixture
def layer(device: torch.device) -> nn.Linear:
    return nn.Linear.from_float(float_linear(K, N).to(device))


@pytest.fixture
def x(device: torch.device, gen: torch.Generator) -> Tensor:
    return torch.randn(2, 3, K, generator=gen).bfloat16().to(device)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each forward that makes the checks."""
    calls: list[int] = []
    whole = nn.Linear._checked_forward

    def counted(self: nn.Linear, x: Any, **terms: Any) -> Tensor:
        calls.append(len(calls))
        return whole(self, x, **terms)

    monkeypatch.setattr(nn.Linear, "_checked_forward", counted)
    return calls


@pytest.mark.parametrize("scaling", ["per-token", "per-tensor", "a16"])
def test_a_forward_is_one_operator(scaling: Any, device: torch.device, x: Tensor) -> None:
    if scaling == "a16" and device.type == "cuda" and not fp4gemm.support.streams_prepacked(device):
        pytest.skip("this device multiplies quantized activations only")
    layer = nn.Linear.from_float(float_linear(K, N).to(device), activations=scaling)
    first = layer(x)
    for _ in range(2):
        with Names() as names:
            again = layer(x)
        assert names.seen == ["fp4gemm.linear.default"]
        assert same_bits(again, first)


def test_the_first_call_alone_makes_the_checks(layer: nn.Linear, x: Tensor, checked: list[int]) -> None:
    first = layer(x)
    assert len(checked) == 1
    assert same_bits(layer(x), first)
    assert same_bits(layer(x[0]), first[0])
    assert layer(x[:, :0]).shape == (2, 0, N)
    assert len(checked) == 1


CHANGES: dict[str, Callable[[nn.Linear], None]] = {
    "amax in the dict": lambda q: q._buffers.update(weight_amax=q.weight_amax * 2),
    "bias in the dict": lambda q: q._buffers.update(bias=torch.ones_like(q.bias)),  # type: ignore[arg-type]
    "bias assigned": lambda q: setattr(q, "bias", torch.nn.Parameter(torch.ones(N, device=q.bias.device))),  # type: ignore[union-attr]
    "weight assigned": lambda q: setattr(q, "weight", torch.ones(N, K, device=q.weight_amax.device)),
    "activations": lambda q: setattr(q, "activations", "per-tensor"),
    "bound in place": lambda q: q.weight_e4m3_max.fill_(448),
    "loaded": lambda q: q.load_state_dict(nn.Linear.from_float(torch.nn.Linear(K, N)).state_dict()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_has_changed_is_noticed(name: str, layer: nn.Linear, x: Tensor) -> None:
    before = layer(x)
    CHANGES[name](layer)
    after = layer(x)
    assert not same_bits(after, before)
    fresh = copy.deepcopy(layer)  # which has never run
    assert fresh._fast is None
    assert same_bits(fresh(x), after)
    assert same_bits(layer(x), after)


def test_copies_share_nothing(layer: nn.Linear, x: Tensor) -> None:
    want = layer(x)
    other = copy.deepcopy(layer)
    other.weight = torch.zeros(N, K, device=x.device)
    other(x)
    assert same_bits(layer(x), want)


def test_an_option_that_is_set_later_counts(layer: nn.Linear, x: Tensor) -> None:
    layer(x)
    layer.check_finite = "raise"
    for _ in range(2):
        with pytest.raises(ValueError, match="x: 384 of 384 values are NaN or infinite"):
            layer(torch.full_like(x, torch.nan))


def test_wrong_arguments_are_named_in_every_call(layer: nn.Linear, x: Tensor) -> None:
    bad: list[tuple[Any, type[Exception], str]] = [
        (x[..., :32], ValueError, r"x: shape is \(2, 3, 32\), must be \(\.\.\., 64\), 64 = in_features"),
        (x[0, 0, 0], ValueError, r"x: shape is \(\), must be"),
        (x.double(), TypeError, r"x: dtype is torch\.float64"),
        (x.to("meta"), ValueError, "x: device is meta, must be"),
        ([1.0], TypeError, r"x: got \[1\.0\] \(list\), must be a torch.Tensor"),
    ]
    for _ in range(2):
        for value, error, message in bad:
            with pytest.raises(error, match=message):
                layer(value)
        layer(x)


@pytest.mark.parametrize("scaling", ["per-token", "per-tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_addend(scaling: Any, dtype: torch.dtype, device: torch.device, x: Tensor) -> None:
    layer = nn.Linear.from_float(float_linear(K, N).to(device), activations=scaling)
    x = x.to(dtype)
    c = torch.randn(*x.shape[:-1], N, device=device, dtype=dtype)
    want = fp4gemm.mm(
        fp4gemm.quantize(x.flatten(0, 1), scaling="row" if scaling == "per-token" else "tensor"),
        layer.weight,
        bias=layer.bias,
        c=c.flatten(0, 1),
        out_dtype=dtype,
    )
    plain = layer(x)
    for _ in range(2):
        assert same_bits(layer(x, c), want.view_as(c))
        assert same_bits(layer(x), plain)
    assert same_bits(layer(x, c.mT.contiguous().mT), want.view_as(c))


def test_a_wrong_addend_is_named_in_every_call(layer: nn.Linear, x: Tensor) -> None:
    c = layer(x)
    bad: list[tuple[Any, type[Exception], str]] = [
        (c[..., :8], ValueError, r"c: shape is \(2, 3, 8\), must be \(2, 3, \d+\)"),
        (c.double(), TypeError, r"c: dtype is torch\.float64, must be torch\.bfloat16"),
        (c.to("meta"), ValueError, "c: device is meta, must be"),
        (1.0, TypeError, r"c: got 1\.0 \(float\), must be a torch.Tensor"),
    ]
    for _ in range(2):
        for value, error, message in bad:
            with pytest.raises(error, match=message):
                layer(x, value)
        layer(x, c)


def test_rules_are_asked(layer: nn.Linear, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that is loaded after the first call counts; each call asks with its own number of tokens."""
    want = layer(x)
    asked: list[tuple[Any, ...]] = []

    def find(a: Tensor, *wanted: Any, use_fast_accum: bool) -> None:
        assert not use_fast_accum
        asked.append((tuple(a.shape), *wanted))

    monkeypatch.setattr(selection, "find", find)
    monkeypatch.setattr(module, "_RULES", [object()])
    assert same_bits(layer(x), want)
    assert same_bits(layer(x[:, :0]), want[:, :0])
    streams = fp4gemm.support.streams_prepacked(x.device)
    formats = ("fp16", "prepacked") if streams else ("nvfp4", "nvfp4")
    assert asked == [((m, K), N, K, torch.bfloat16, "dense", False, formats) for m in (6, 0)]


# ---- an x that several layers share


@pytest.mark.parametrize("decoded", [False, True], ids=["codes", "decoded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_shared_input(dtype: torch.dtype, decoded: bool, device: torch.device, x: Tensor) -> None:
    """The same bits as of x itself, in the dtype that the weight stands for."""
    if decoded and device.type == "cuda" and not fp4gemm.support.streams_prepacked(device):
        pytest.skip("this device does not read decoded operands")
    rows = x[0].to(dtype)
    shared = fp4gemm.quantize(rows, decoded=decoded)
    for bias in (True, False):
        q = nn.Linear.from_float(float_linear(K, N, bias).to(device, dtype))
        for _ in range(2):
            assert same_bits(q(shared), q(rows))


def test_a_shared_input_under_compile(layer: nn.Linear, x: Tensor) -> None:
    torch._dynamo.reset()
    rows = x[0].float()
    run = torch.compile(lambda t: layer(fp4gemm.quantize(t)), backend="aot_eager", fullgraph=True)
    assert same_bits(run(rows), layer(rows))


def test_wrong_shared_inputs(layer: nn.Linear, x: Tensor) -> None:
    rows = torch.ones(16, K, device=x.device)
    stack = fp4gemm.quantize(torch.ones(2, 16, K, device=x.device))
    plain = fp4gemm.quantize(rows)
    not_quantized = nn.Linear.from_float(float_linear(K, N).to(x.device), activations="a16")
    ends = torch.tensor([4, 16], dtype=torch.int32, device=x.device)
    bad: list[tuple[nn.Linear, Any, type[Exception], str]] = [
        (layer, fp4gemm.quantize(rows[:, :32]), ValueError, r"x: shape is \(16, 32\), must be \(m, 64\)"),
        (layer, stack, ValueError, r"x: shape is \(2, 16, 64\), must be \(m, 64\), 64 = in_features"),
        (layer, fp4gemm.quantize(rows, offs=ends), ValueError, r"x: has 2 groups \(offs\), must have none"),
        (layer, fp4gemm.quantize(rows, hadamard="bf16"), ValueError, "x: was rotated"),
        (layer, plain.to("meta"), ValueError, "x: device is meta, must be"),
        (not_quantized, plain, TypeError, "x: got .*, must be a bfloat16 or float16 tensor"),
    ]
    for q, value, error, message in bad:
        with pytest.raises(error, match=message):
            q(value)


@pytest.mark.parametrize("is_gated", [False, True], ids=["linear", "gated"])
def test_rules_are_those_of_the_epilogue(is_gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated product needs a rule of a gated kernel: the operator refuses one of another epilogue."""
    asked: list[bool] = []

    def find(
        x: Tensor, n: int, k: int, dtype: torch.dtype, mode: str, gated: bool, formats: object, **_: bool
    ) -> None:
        asked.append(gated)

    monkeypatch.setattr(module, "_RULES", [object()])
    monkeypatch.setattr(selection, "find", find)
    gate, up, down = (nn.Linear.from_float(torch.nn.Linear(64, 64, bias=False)) for _ in range(3))
    layer = nn.GatedMLP(gate, up, down) if is_gated else down
    layer(torch.ones(4, 64, dtype=torch.bfloat16))
    assert asked == ([True, False] if is_gated else [False])


@pytest.mark.gpu
def test_gpu_a_rule_of_a_plain_kernel_leaves_a_gated_mlp_alone(cuda: torch.device, tmp_path: Path) -> None:
    gate, up, down = (nn.Linear.from_float(torch.nn.Linear(64, 64, bias=False)).to(cuda) for _ in range(3))
    mlp, x = nn.GatedMLP(gate, up, down), torch.ones(4, 64, dtype=torch.bfloat16, device=cuda)
    wanted = mlp(x)
    arch = fp4gemm.kernel_table.kernel_arch(cuda.index)
    rules = [
        {"kernel": kernel.name}
        for kernel in fp4gemm.kernels()
        if kernel.arch == arch and kernel.mode == "dense" and kernel.out_dtype is torch.bfloat16
        and not kernel.is_gated
    ]  # fmt: skip
    assert rules
    path = tmp_path / "rules.json"
    path.write_text(json.dumps(rules))
    try:
        fp4gemm.selection.load(path)
        torch.testing.assert_close(mlp(x), wanted)
    finally:
        fp4gemm.selection.clear()
