"""quantize_model with methods and calibration: the weights that it makes, its report, and what it refuses."""

from __future__ import annotations

import copy
import re
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from fp4gemm.calibration import InputStatistics, Statistics, gptq
from nn_helpers import convert, same_bits
from torch import Tensor


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.down(torch.relu(self.up(h)))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model().eval()


def batches() -> list[Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [torch.randn(40, 32, generator=gen) @ torch.randn(32, 32, generator=gen) for _ in range(3)]


def layers_of(model: torch.nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def test_each_method_is_the_function_of_its_name(model: Model) -> None:
    known = fp4gemm.calibrate(model, batches(), second_moment=True)
    for method, calibration, want in (
        (None, None, lambda w, s: fp4gemm.quantize(w, four_over_six="mse")),
        ("round", None, lambda w, s: fp4gemm.quantize(w)),
        ("four-over-six", None, lambda w, s: fp4gemm.quantize(w, four_over_six="mse")),
        ("search", None, lambda w, s: fp4gemm.quantize(w, scale_search="mse")),
        ("search", known, lambda w, s: fp4gemm.quantize(w, scale_search="mse", importance=s.mean_square)),
        (None, known, lambda w, s: gptq(w, s.second_moment)),
        (None, batches(), lambda w, s: gptq(w, s.second_moment)),
    ):
        made, report = convert(model, method=method, calibration=calibration)
        for name, layer in layers_of(made).items():
            w = want(model.get_submodule(name).weight.detach(), known[name])
            assert same_bits(layer.weight_codes, w.codes), (method, name)
            assert same_bits(layer.weight_scales, w.scales), (method, name)
            assert layer.e4m3_max == w.e4m3_max
            entry = next(entry for entry in report.layers if entry.name == name)
            assert entry.method == (method or ("four-over-six" if calibration is None else "gptq"))
            assert (entry.output_error is None) is (calibration is None)


@pytest.mark.parametrize("method", ["round", "four-over-six", "search", "gptq"])
def test_weights_for_fp8_tokens(method: Any) -> None:
    """With activations="fp8" the search and GPTQ are those for an FP8 operand, and nothing else changes."""
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 48)).eval(), torch.randn(200, 64)
    known = fp4gemm.calibrate(model, [x], second_moment=True)
    w, s = model[0].weight.detach(), known["0"]
    plain, wanted = (
        {
            "round": lambda fp8: fp4gemm.quantize(w),
            "four-over-six": lambda fp8: fp4gemm.quantize(w, four_over_six="mse"),
            "search": lambda fp8: fp4gemm.quantize(
                w, scale_search="mse", importance=s.mean_square, fp8_operand=fp8
            ),
            "gptq": lambda fp8: gptq(w, s.second_moment, fp8_operand=fp8),
        }[method](fp8)
        for fp8 in (False, True)
    )
    assert same_bits(plain.codes, wanted.codes) is (method in ("round", "four-over-six"))
    for activations, want in (("fp8", wanted), ("a16", plain), ("per-token", plain)):
        made, _ = convert(model, method=method, calibration=known, activations=activations)
        assert same_bits(made[0].weight_codes, want.codes), activations
        assert same_bits(made[0].weight_scales, want.scales), activations
    if method == "search":
        for activations, fp8 in (("fp8", True), ("a16", False)):
            layer = nn.Linear.from_float(model[0], activations=activations, method="search")
            assert same_bits(
                layer.weight_codes, fp4gemm.quantize(w, scale_search="mse", fp8_operand=fp8).codes
            )


def test_without_second_moments_scales_are_searched(model: Model) -> None:
    _, report = convert(model, calibration=fp4gemm.calibrate(model, batches()))
    assert {layer.method for layer in report.layers} == {"search"}


def test_the_output_error_is_that_of_the_output(model: Model) -> None:
    x = batches()[0]
    known = fp4gemm.calibrate(model, [x], second_moment=True)
    made, report = convert(model, method="round", calibration=known)
    w, q = model.blocks[0].up.weight.detach(), layers_of(made)["blocks.0.up"].dequantize_weight()
    error = (x @ (w - q).T).norm() / (x @ w.T).norm()
    assert report.layers[0].output_error == pytest.approx(float(error), rel=1e-3)
    low, high = (f([layer.output_error for layer in report.layers[::2]]) for f in (min, max))
    assert f"round, output error {low:.3f} to {high:.3f}" in str(report).splitlines()[0]
    by_method = {m: convert(model, method=m, calibration=known)[1] for m in ("round", "search", "gptq")}
    means = [sum(layer.output_error for layer in r.layers) for r in by_method.values()]
    assert means[0] > means[1] > means[2]


def test_blocks_in_sequence(model: Model) -> None:
    """Each block is calibrated on what the blocks before it make of the batches with rounded weights."""
    before = copy.deepcopy(model.state_dict())
    made, _ = convert(model, calibration=iter(batches()), sequential=True)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    emulated = copy.deepcopy(model)
    for i in range(3):
        known = fp4gemm.calibrate(emulated, batches(), second_moment=True)
        for name in (f"blocks.{i}.up", f"blocks.{i}.down"):
            w = gptq(model.get_submodule(name).weight.detach(), known[name].second_moment)
            assert same_bits(layers_of(made)[name].weight_codes, w.codes), name
        for name in (f"blocks.{i}.up", f"blocks.{i}.down"):
            emulated.get_submodule(name).weight.data = layers_of(made)[name].dequantize_weight()
    again, _ = convert(model, calibration=batches(), sequential=True)
    for name, layer in layers_of(again).items():
        assert same_bits(layer.weight_codes, layers_of(made)[name].weight_codes)


def test_from_float() -> None:
    linear = torch.nn.Linear(64, 32)
    for method, options in (("search", {"scale_search": "mse"}), ("four-over-six", {"four_over_six": "mse"})):
        layer = nn.Linear.from_float(linear, method=method)
        assert same_bits(layer.weight_codes, fp4gemm.quantize(linear.weight.detach(), **options).codes)
        w13, w2 = torch.randn(2, 128, 32), torch.randn(2, 32, 64)
        experts = nn.Experts.from_float(w13, w2, method=method)
        assert same_bits(experts.w2.weight_codes, fp4gemm.quantize(w2, **options).codes)
    for make in (lambda m: nn.Linear.from_float(linear, method=m),
                 lambda m: nn.Experts.from_float(w13, w2, method=m)):  # fmt: skip
        with pytest.raises(ValueError, match="method: got 'gptq', must be 'round', 'four-over-six' or"):
            make("gptq")


def test_experts_of_transformers(mixtral: Any) -> None:
    """Experts with few tokens get those of all experts added, and the report says so."""
    ids = [torch.arange(60)[None], torch.arange(9, 63)[None]]
    known = fp4gemm.calibrate(mixtral, ids, second_moment=True)
    name = "model.layers.0.mlp.experts"
    made, report = convert(mixtral, calibration=known)
    few = int((known[f"{name}.w2"].num_tokens < 64).sum())
    assert f"{few} of 4 experts saw fewer than 64 tokens: all added" in report.experts[0].reason
    assert 0 < report.experts[0].output_error < 0.2
    s = known[f"{name}.w2"]
    part = (s.num_tokens / 64).clamp(max=1).view(-1, 1, 1)
    of_all = (s.second_moment * (s.num_tokens / s.num_tokens.sum()).view(-1, 1, 1)).sum(0)
    experts = mixtral.get_submodule(name)
    want = gptq(experts.down_proj.detach(), part * s.second_moment + (1 - part) * of_all)
    values = made.get_submodule(name).w2.dequantize_weight()
    assert (values == want.dequantize(torch.float32)).float().mean() > 0.99
    assert convert(mixtral, calibration=ids, sequential=True)[1].experts[1].method == "gptq"


def test_what_cannot_be_done_is_reported(model: Model) -> None:
    """A moment that is zero, and one that is not positive definite."""
    known = dict(fp4gemm.calibrate(model, batches(), second_moment=True))
    zero = InputStatistics(torch.tensor(5), torch.zeros(32), torch.zeros(32, 32))
    none = InputStatistics(torch.tensor(0), torch.zeros(64), torch.zeros(64, 64))
    odd = InputStatistics(torch.tensor(5), torch.ones(32), 1.05 * torch.eye(32) - 0.05)
    known |= {"blocks.0.up": zero, "blocks.0.down": none, "blocks.1.up": odd}
    made, report = convert(model, calibration=Statistics(known))
    reasons = [layer.reason for layer in report.layers]
    assert reasons[0].startswith(
        "scales searched instead: second_moment: is not positive definite with damping 1"
    )
    assert reasons[1] == "no token reached it: scales searched without statistics"
    assert reasons[2] == "not positive definite: damping 1"
    w = fp4gemm.quantize(model.blocks[0].down.weight.detach(), scale_search="mse")
    assert same_bits(layers_of(made)["blocks.0.down"].weight_codes, w.codes)


S = Statistics({"0": InputStatistics(torch.tensor(1), torch.ones(32))})
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "method": ({"method": "awq"}, ValueError, "method: got 'awq', must be 'round', 'four-over-six'"),
    "method-type": ({"method": 1}, TypeError, "method: got 1 (int), must be 'round'"),
    "gptq": ({"method": "gptq"}, ValueError, "method: got 'gptq' without calibration, must be another"),
    "gptq-moments": (
        {"method": "gptq", "calibration": S}, ValueError, "must be another for statistics without second",
    ),
    "calibration": ({"calibration": 3}, TypeError, "calibration: got 3 (int), must be Statistics or"),
    "tensor": ({"calibration": torch.ones(2, 32)}, TypeError, "must be Statistics or a list of b"),
    "empty": ({"calibration": []}, ValueError, "batches: is empty, must have at least"),
    "sequential": ({"sequential": True}, ValueError, "sequential: got True, must be False without"),
    "sequential-type": ({"sequential": 1}, TypeError, "sequential: got 1 (int), must be True or"),
    "sequential-statistics": (
        {"sequential": True, "calibration": S}, ValueError, "must be False with Statistics (pass the batches",
    ),
    "sequential-empty": ({"sequential": True, "calibration": []}, ValueError, "calibration: is empty, must"),
    "layer": ({"calibration": Statistics({})}, ValueError, "calibration: has no statistics of '0', must"),
    "k": (
        {"calibration": Statistics({"0": InputStatistics(torch.tensor(1), torch.ones(64))})}, ValueError,
        "calibration: mean_square of '0' has shape (64,), must be (32,)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "error", "text"), BAD.values(), ids=BAD)
def test_bad_input(options: dict[str, Any], error: type[Exception], text: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 32))
    with pytest.raises(error, match=re.escape(text)):
        fp4gemm.models.quantize_model(model, **options)
    assert isinstance(model[0], torch.nn.Linear)


@pytest.mark.gpu
def test_cuda(cuda: torch.device, model: Model) -> None:
    here = convert(model, calibration=batches())[1]
    model.to(cuda)
    for method in ("search", "gptq"):
        made, report = convert(model, calibration=[x.to(cuda) for x in batches()], method=method)
        assert next(iter(layers_of(made).values())).weight_codes.is_cuda
    for a, b in zip(here.layers, report.layers, strict=True):
        assert b.output_error == pytest.approx(a.output_error, rel=0.05)
