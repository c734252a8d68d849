"""fp4gemm.models.smooth: the float model keeps its bits, and NVFP4 loses less."""

from __future__ import annotations

import copy
import re
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm.calibration import InputStatistics, Statistics
from torch import Tensor


class Norm(torch.nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(k).exp())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Block(torch.nn.Module):
    """Gate and up behind a norm; values for two heads that share one of v."""

    head_dim = 16

    def __init__(self, leak: bool) -> None:
        super().__init__()
        self.norm, self.leak = Norm(32), leak
        self.gate, self.up_proj = torch.nn.Linear(32, 64), torch.nn.Linear(32, 64)
        self.down_proj = torch.nn.Linear(64, 32)
        self.v_proj, self.o_proj = torch.nn.Linear(32, 16), torch.nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y = self.down_proj(torch.relu(self.gate(h)) * self.up_proj(h))
        return x + y + self.o_proj(torch.cat([self.v_proj(x)] * 2, -1)) + (h if self.leak else 0)


def made(leak: bool = False, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(leak), Block(leak)).to(dtype).eval()
    for block in model:
        for layer in (block.v_proj, block.up_proj):
            layer.weight.data.mul_(torch.randn(layer.out_features, 1).mul(2).exp())
    return model, (torch.randn(40, 32) * torch.randn(32).exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_model_keeps_its_bits(dtype: torch.dtype) -> None:
    model, x = made(dtype=dtype)
    before, state = model(x), copy.deepcopy(model.state_dict())
    known = fp4gemm.calibrate(model, [x], second_moment=True)
    smoothed = fp4gemm.models.smooth(model, known, x)
    assert torch.equal(model(x), before)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, state[name])}
    parts = "norm.weight gate.weight up_proj.weight up_proj.bias down_proj.weight v_proj.weight v_proj.bias"
    parts = [*parts.split(), "o_proj.weight"]
    assert changed == {f"{i}.{part}" for i in range(2) for part in parts}
    again = fp4gemm.calibrate(model, [x], second_moment=True)
    for name in known:
        assert torch.allclose(smoothed[name].mean_square, again[name].mean_square, rtol=1e-4)
        assert torch.allclose(smoothed[name].second_moment, again[name].second_moment, rtol=1e-3, atol=1e-4)
    assert torch.equal(smoothed["0.v_proj"].mean_square, known["0.v_proj"].mean_square)  # reads x itself
    ratio = smoothed["0.gate"].mean_square.log2().std() / known["0.gate"].mean_square.log2().std()
    assert ratio < 0.8


def test_errors_of_inputs_that_change_are_dropped() -> None:
    model, x = made()
    known = fp4gemm.calibrate(model, [x], quantization_error=True)
    smoothed = fp4gemm.models.smooth(model, known, x)
    kept = {name for name, layer in smoothed.items() if layer.quantization_error is not None}
    assert kept == {"0.v_proj", "1.v_proj"}  # which read x itself


def test_nvfp4_loses_less() -> None:
    model, x = made()
    want, known = model(x), fp4gemm.calibrate(model, [x])
    losses = []
    for strength in (0.0, 0.5):
        float_model = copy.deepcopy(model)
        statistics = fp4gemm.models.smooth(float_model, known, x, strength=strength)
        quantized = fp4gemm.models.quantize_model(float_model, calibration=statistics)
        with torch.no_grad():
            losses.append(float((quantized(x) - want).norm()))
    assert losses[1] < 0.98 * losses[0]


def test_a_norm_that_others_read_stays() -> None:
    model, x = made(leak=True)
    state = copy.deepcopy(model.state_dict())
    known = fp4gemm.calibrate(model, [x])
    with pytest.warns(UserWarning, match="^smooth: norm stays as it is: the model would not"):
        smoothed = fp4gemm.models.smooth(model, known, x)
    for name in ("0.norm.weight", "0.gate.weight"):
        assert torch.equal(model.state_dict()[name], state[name])
    assert not torch.equal(model.state_dict()["0.down_proj.weight"], state["0.down_proj.weight"])
    assert torch.equal(smoothed["0.gate"].mean_square, known["0.gate"].mean_square)


def test_tied_weights_stay() -> None:
    model, x = made()
    model[1].gate.weight = model[0].gate.weight
    state = copy.deepcopy(model.state_dict())
    fp4gemm.models.smooth(model, fp4gemm.calibrate(model, [x]), x)
    assert torch.equal(model.state_dict()["0.norm.weight"], state["0.norm.weight"])


MODEL, X = made()
KNOWN = Statistics({"0.gate": InputStatistics(torch.tensor(1), torch.ones(32))})
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "model": ({"model": 1}, TypeError, "model: got 1 (int), must be a torch.nn.Module"),
    "meta": ({"model": copy.deepcopy(MODEL).to("meta")}, ValueError, "model: has weights on the meta device"),
    "statistics": ({"statistics": {}}, TypeError, "statistics: got {} (dict), must be Statistics"),
    "layer": (
        {"statistics": Statistics({"fc": KNOWN["0.gate"]})}, ValueError,
        "statistics: 'fc' has k = 32, must be a linear layer of the model",
    ),
    "batch": ({"batch": torch.ones(3, 31)}, ValueError, "is not accepted by the model"),
    "strength": ({"strength": "0.5"}, TypeError, "strength: got '0.5' (str), must be a number"),
    "strength-range": ({"strength": 1.5}, ValueError, "strength: got 1.5, must be from 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "text"), BAD.values(), ids=BAD)
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        fp4gemm.models.smooth(**{"model": MODEL, "statistics": KNOWN, "batch": X} | change)
