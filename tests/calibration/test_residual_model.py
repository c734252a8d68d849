"""quantize_model with residual channels: which layers share them, the layers' bits, the report, refusals."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.calibration import InputStatistics, Statistics, StatisticsFile, residual_channels
from nn_helpers import convert
from torch import Tensor

COUNT = 32


class Block(torch.nn.Module):
    """q, k and v read one tensor, and gate and up another; the experts are layers of a list."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.v_proj, self.o_proj = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64)
        self.gate_proj, self.up_proj = torch.nn.Linear(64, 96), torch.nn.Linear(64, 96)
        self.down_proj = torch.nn.Linear(96, 64)
        self.experts = torch.nn.ModuleList([torch.nn.Linear(64, 64)])

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.o_proj(torch.tanh(self.q_proj(h)) * torch.tanh(self.k_proj(h)) + self.v_proj(h))
        x = torch.nn.functional.rms_norm(h, (64,))
        y: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return h + y + self.experts[0](x)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


GROUPS = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    made = Model().eval()
    for p in made.parameters():
        p.data.mul_(torch.rand_like(p) * 2)
    return made


def batches() -> list[Tensor]:
    gen = torch.Generator().manual_seed(1)
    scale = torch.ones(64)
    scale[5::9] = 12.0  # outliers, which cost their neighbours precision
    return [torch.randn(50, 64, generator=gen) * scale for _ in range(3)]


def layers_of(model: torch.nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def known_of(model: torch.nn.Module, **more: Any) -> Statistics:
    return fp4gemm.calibrate(model, batches(), second_moment=True, quantization_error=True, **more)


def test_layers_that_read_one_tensor_share_the_costliest_channels(model: Model) -> None:
    known = known_of(model)
    made = fp4gemm.models.quantize_model(model, inplace=False, calibration=known, residual_channels=COUNT)
    plain = fp4gemm.models.quantize_model(model, inplace=False, calibration=known)
    layers, others, floats = layers_of(made), layers_of(plain), dict(model.named_modules())
    x = batches()[0]
    for i in range(2):
        for group in GROUPS:
            names = [f"blocks.{i}.{name}" for name in group]
            errors: Any = [known[name].quantization_error for name in names]
            want = residual_channels([floats[name].weight for name in names], errors, COUNT)
            for name in names:
                layer, other = layers[name], others[name]
                assert torch.equal(layer.residual_channels, want)
                assert torch.equal(layer.weight.codes, other.weight.codes)
                own = nn.Linear.from_quantized(other.weight, other.bias, residual_channels=want)
                h = torch.randn(7, layer.in_features, generator=torch.Generator().manual_seed(i))
                assert torch.equal(layer(h), own(h))
        assert layers[f"blocks.{i}.experts.0"].residual_channels is None
    with torch.no_grad():
        want = model(x)
        assert (made(x) - want).norm() < 0.9 * (plain(x) - want).norm()


@pytest.mark.parametrize("method", ["round", "gptq", "search"])
def test_batches_and_files_give_the_channels_of_statistics(model: Model, method: Any, tmp_path: Path) -> None:
    known = known_of(model)
    known.save(tmp_path / "known")
    options: dict[str, Any] = {"method": method, "residual_channels": COUNT, "inplace": False}
    wanted = fp4gemm.models.quantize_model(model, calibration=known, **options).state_dict()
    for calibration in (batches(), StatisticsFile(tmp_path / "known")):
        got = fp4gemm.models.quantize_model(model, calibration=calibration, **options).state_dict()
        assert got.keys() == wanted.keys()
        assert all(torch.equal(bits(got[n]), bits(wanted[n])) for n in wanted)


def test_block_by_block(model: Model) -> None:
    """The first block reads what it reads otherwise; the second one is behind rounded weights."""
    options: dict[str, Any] = {"residual_channels": COUNT, "inplace": False, "calibration": batches()}
    walked = layers_of(fp4gemm.models.quantize_model(model, sequential=True, **options))
    whole = layers_of(fp4gemm.models.quantize_model(model, **options))
    for name, layer in whole.items():
        other = walked[name]
        assert (layer.residual_channels is None) == (other.residual_channels is None)
        if name.startswith("blocks.0.") and layer.residual_channels is not None:
            assert torch.equal(layer.residual_channels, other.residual_channels)
    assert torch.equal(
        walked["blocks.1.q_proj"].residual_channels, walked["blocks.1.v_proj"].residual_channels
    )


def test_the_report_names_layers_without(model: Model) -> None:
    made, report = convert(model, residual_channels=96, calibration=batches())
    reasons = {layer.name.rpartition("blocks.")[2][2:]: layer for layer in report.layers}
    assert {name for name, layer in reasons.items() if layer.residual_channels == 96} == {"down_proj"}
    assert reasons["q_proj"].reason == "no residual channels: k is 64, must be at least 96"
    assert reasons["experts.0"].reason == "no residual channels: experts have none"
    assert "residual channels: 96 of 2\n" in str(report)
    assert layers_of(made)["blocks.1.down_proj"].residual_channels.shape == (96,)


def test_after_smoothing_the_errors_are_measured_again() -> None:
    """Smooth, then choose, then quantize."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.RMSNorm(64), torch.nn.Linear(64, 64)).eval()
    model[0].weight.data = torch.randn(64).mul(2).exp()
    x = torch.randn(40, 64)
    known = fp4gemm.calibrate(model, [x], quantization_error=True)
    smoothed = fp4gemm.models.smooth(model, known, x)
    text = (
        "calibration: has no quantization_error of '1', must have it for residual_channels; calibrate(..., qu"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        fp4gemm.models.quantize_model(model, calibration=smoothed, residual_channels=COUNT)
    with torch.no_grad():
        want = model(x)
        plain, residual = (
            fp4gemm.models.quantize_model(
                copy.deepcopy(model), calibration=[x], method="round", residual_channels=count
            )(x)
            for count in (0, COUNT)
        )
    assert (residual - want).norm() < 0.95 * (plain - want).norm()


def test_fused_layers_keep_them(model: Model) -> None:
    """q, k and v become one product with one cast."""
    options: dict[str, Any] = {"residual_channels": COUNT, "inplace": False, "calibration": batches()}
    plain = fp4gemm.models.quantize_model(model, **options)
    fused, report = convert(model, fuse="auto", residual_channels=COUNT, calibration=batches())
    assert "merged" in {block.action for block in report.blocks}
    merged = fused.blocks[0].q_proj.merged
    assert torch.equal(merged.residual_channels, layers_of(plain)["blocks.0.q_proj"].residual_channels)
    with torch.no_grad():
        a, b = fused(batches()[0]), plain(batches()[0])
    assert torch.allclose(a, b, rtol=1e-2, atol=1e-2 * float(b.abs().max()))


KNOWN = Statistics({})
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "type": ({"residual_channels": 32.0}, TypeError, "residual_channels: got 32.0 (float), must be an int"),
    "negative": ({"residual_channels": -1}, ValueError, "residual_channels: got -1, must be at least 0"),
    "step": ({"residual_channels": 16}, ValueError, "residual_channels: got 16, must be a multiple of 32"),
    "no-data": (
        {"calibration": None}, ValueError,
        "residual_channels: got 32 without calibration, must be 0, or have the calibration that chooses them",
    ),
    **{
        activations: (
            {"activations": activations}, ValueError,
            f"residual_channels: got 32 with activations {activations!r}, must be 0, or have activations "
            "'per-token' or 'per-tensor', whose errors it corrects",
        )
        for activations in ("a16", "fp8", "auto")
    },
    "errors": (
        {"calibration": Statistics({"0": InputStatistics(torch.tensor(1), torch.ones(64))})}, ValueError,
        "calibration: has no quantization_error of '0', must have it for residual_channels",
    ),
    "k": (
        {"calibration": Statistics({"0": InputStatistics(torch.tensor(1), torch.ones(32))})}, ValueError,
        "calibration: mean_square of '0' has shape (32,), must be (64,)",
    ),
    "layer": ({"calibration": KNOWN}, ValueError, "calibration: has no statistics of '0', must have"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "error", "text"), BAD.values(), ids=BAD)
def test_bad_input(changed: dict[str, Any], error: type[Exception], text: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 32))
    options = {"residual_channels": 32, "calibration": [torch.ones(2, 64)]} | changed
    with pytest.raises(error, match=re.escape(text)):
        fp4gemm.models.quantize_model(model, **options)
    assert isinstance(model[0], torch.nn.Linear)
