"""record_statistics: the numbers of each operand, and that a step stays what it is."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import training
from fp4gemm.training import Cast, Recipe, functional, record_statistics
from fp4gemm.training._gathered import GatheredWeight, Made
from helpers import assert_bits
from torch import Tensor
from training_cases import RECIPES, balancing_factors, options

FIELDS = ("x", "w", "dy", "w_t", "dy_t", "x_t")
STATE = torch.zeros(2, dtype=torch.int64)
ENDS = (10, 10, 74)


def unpacked(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def numbers(wanted: Tensor, t: Any) -> tuple[float, float, float, float, float, float]:
    """Elements, amax, underflows, saturated ones, squares and squared errors, in float64."""
    got, wanted = t.dequantize().double(), wanted.double()
    if isinstance(t, fp4gemm.MXFP8Tensor):
        is_largest = t.values.double().abs() == 448
    else:
        is_largest = unpacked(t.codes) & 7 == 7
    beyond = wanted.abs() > got.abs() * (1 + 2**-20)
    return (
        wanted.numel(),
        float(wanted.abs().max()),
        int(((got == 0) & (wanted != 0)).sum()),
        int((is_largest & beyond).sum()),
        float(wanted.square().sum()),
        float((got - wanted).square().sum()),
    )


def quantized(x: Tensor, cast: Cast, recipe: Recipe) -> Any:
    if cast.format == "mxfp8":
        return fp4gemm.quantize_mxfp8(x)
    return fp4gemm.quantize(x, **options(cast, recipe, STATE))


def rotated(x: Tensor, cast: Cast, recipe: Recipe) -> Tensor:
    """By the Hadamard matrix, not by butterflies."""
    if cast.hadamard is None:
        return x
    r = torch.arange(16)
    ones = torch.tensor([[bin(int(i & j)).count("1") for j in r] for i in r])
    signs = torch.tensor([-1.0 if recipe.hadamard_signs >> int(i) & 1 else 1.0 for i in r])
    matrix = signs.unsqueeze(1) * (1.0 - 2.0 * (ones & 1)) / 4
    made = (x.double().view(-1, 16) @ matrix.double()).view(x.shape).float()
    return made.bfloat16().float() if cast.hadamard == "bf16" else made


def assert_statistics(got: training.OperandStatistics, want: tuple[float, ...]) -> None:
    elements, amax, underflows, saturated, squares, errors = want
    assert got.elements == elements
    assert got.amax == pytest.approx(amax, rel=1e-6)
    assert got.underflow == pytest.approx(underflows / elements, abs=2 / elements)
    assert got.saturation == pytest.approx(saturated / elements, abs=2 / elements)
    assert got.sqnr == pytest.approx(10 * math.log10(squares / errors), rel=1e-4)


def tensors(
    m: int, gen: torch.Generator, device: torch.device, outlier: float = 100
) -> tuple[Tensor, Tensor, Tensor]:
    """x, W and dy. With outliers there are blocks in which most elements underflow."""
    x, w, dy = (torch.randn(shape, generator=gen) for shape in ((m, 64), (96, 64), (m, 96)))
    x[:, 3] *= outlier
    return tuple(t.bfloat16().to(device) for t in (x, w, dy))  # type: ignore[return-value]


@pytest.mark.parametrize("m", [64, 33])
@pytest.mark.parametrize("name", RECIPES)
def test_every_operand(name: str, m: int, device: torch.device, gen: torch.Generator) -> None:
    recipe = RECIPES[name]
    layer = training.Linear(64, 96, bias=False, recipe=recipe, device=device, dtype=torch.bfloat16)
    # The errors of few outliers that are rounded stochastically say little of other draws.
    x, w, dy = tensors(m, gen, device, 1 if getattr(recipe.x, "stochastic", False) else 100)
    with torch.no_grad():
        layer.weight.copy_(w)
    statistics = record_statistics(layer)
    with statistics:
        layer(x.requires_grad_()).backward(dy)
    found = statistics.read()[""]
    assert tuple(found) == FIELDS
    of = {"x": x.detach().cpu(), "w": w.cpu(), "dy": dy.cpu()}
    for field in FIELDS:
        cast = getattr(recipe, field)
        if not isinstance(cast, Cast):
            assert found[field].elements == 0
            assert math.isnan(found[field].underflow)
            assert math.isnan(found[field].sqnr)
            continue
        wanted = source = of[field.removesuffix("_t")]
        c = balancing_factors(of["x"], of["dy"])
        scales = {"x_t": 1 / c, "dy_t": c}.get(field) if recipe.balance_tokens else None
        if cast.source == "rowwise":
            forward = getattr(recipe, field.removesuffix("_t"))
            source = quantized(source, forward, recipe).dequantize(torch.bfloat16)
        if scales is not None:
            source, wanted = ((t.double() * scales).to(t.dtype) for t in (source, wanted))
        if field.endswith("_t"):
            step = 64 if cast.format == "nvfp4" else 128
            pad = -source.shape[0] % step if source.shape[0] % 32 else 0  # one group of columns
            source, wanted = (
                torch.nn.functional.pad(t, (0, 0, 0, pad)).T.contiguous() for t in (source, wanted)
            )
        t = quantized(source, cast, recipe)
        want = numbers(rotated(wanted.float(), cast, recipe), t)
        elements = of[field.removesuffix("_t")].numel()
        if cast.stochastic:  # along the other axis it draws other numbers
            assert found[field].elements == elements
            assert found[field].sqnr == pytest.approx(10 * math.log10(want[4] / want[5]), abs=0.5)
        else:
            assert_statistics(found[field], (elements, *want[1:]))


@pytest.mark.parametrize("name", ["te_per_token", "per_token", "nvidia_no_sr", "row_scaled_dequantized"])
def test_experts(name: str, device: torch.device, gen: torch.Generator) -> None:
    """Statistics of groups are those of the groups together; rows of no group do not count."""
    recipe = RECIPES[name].replace(
        **{
            field: dataclasses.replace(getattr(RECIPES[name], field), stochastic=False)
            for field in ("dy", "dy_t")
            if isinstance(getattr(RECIPES[name], field), Cast)
        }
    )
    layer = training.GroupedLinear(3, 64, 96, recipe=recipe, device=device, dtype=torch.bfloat16)
    x, _, dy = tensors(77, gen, device)
    offs = torch.tensor(ENDS, dtype=torch.int32, device=device)
    statistics = record_statistics(layer)
    with statistics:
        layer(x.requires_grad_(), offs).backward(dy)
    found = statistics.read()[""]
    for field, tensor in (("x", x), ("dy", dy), ("x_t", x), ("dy_t", dy)):
        cast = getattr(recipe, field)
        if not isinstance(cast, Cast):
            continue
        parts = []
        for start, end in ((0, 10), (10, 74)):
            part = tensor.detach()[start:end].cpu()
            if field.endswith("_t"):
                part = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % 64)).T.contiguous()
            t = fp4gemm.quantize(part, **options(cast, recipe, STATE))
            parts.append(numbers(rotated(part.float(), cast, recipe), t))
        want = [sum(values) for values in zip(*parts, strict=True)]
        want[0], want[1] = 74 * tensor.shape[1], max(part[1] for part in parts)
        assert_statistics(found[field], tuple(want))
    assert found["w"].elements == layer.weight.numel()


def test_known_numbers(device: torch.device) -> None:
    """A block of 16 with a maximum of 448 * 6: 100 is the least that does not round to 0 is 112."""
    layer = training.Linear(32, 32, bias=False, recipe=Recipe(x=Cast(), w=Cast()), device=device)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(32))
    x = torch.zeros(32, 32, device=device)
    x[:, 0], x[:, 1], x[:, 2] = 2688, 100, 448
    x[:, 16] = 448 * 6 * 17 / 18 / 4.2  # its scale rounds down, so that the value saturates
    statistics = record_statistics(layer, ["x", "w"])
    with statistics, torch.no_grad():
        layer(x)
    found = statistics.read()[""]
    assert list(found) == ["x", "w"]
    t = fp4gemm.quantize(x)
    largest = int((unpacked(t.codes)[:, 16] == 7).all()) * float(t.dequantize()[0, 16] < x[0, 16])
    assert (found["x"].elements, found["x"].amax) == (1024, 2688)
    assert found["x"].underflow == 1 / 32
    assert found["x"].saturation == largest / 32
    assert found["w"].sqnr == math.inf
    assert (found["w"].amax, found["w"].underflow, found["w"].saturation) == (1, 0, 0)


def test_calls_add_up_until_they_are_forgotten(device: torch.device, gen: torch.Generator) -> None:
    layer = training.Linear(64, 96, recipe="nvidia", device=device, dtype=torch.bfloat16)
    x, _, _ = tensors(64, gen, device)
    statistics = record_statistics(layer, ["x"])
    with statistics:
        layer(x)
    layer(x)  # outside of it
    once = statistics.read()[""]["x"]
    with statistics:
        layer(x)
        layer(x * 2)
    thrice = statistics.read()[""]["x"]
    assert once.elements == 64 * 64
    assert thrice.elements == 3 * 64 * 64
    assert thrice.amax == 2 * once.amax
    assert thrice.sqnr == pytest.approx(once.sqnr, rel=1e-6)
    statistics.reset()
    assert statistics.read()[""]["x"].elements == 0


@pytest.mark.parametrize("name", ["nvidia", "per_token", "all stochastic"])
def test_a_step_stays_what_it_is(name: str, device: torch.device, gen: torch.Generator) -> None:
    """Its bits, the random numbers behind it, and what is left of the recording."""
    model = torch.nn.Sequential(
        training.Linear(64, 96, recipe=RECIPES[name]), torch.nn.SiLU(), training.Linear(96, 64, recipe="bf16")
    ).to(device, torch.bfloat16)
    x, _, _ = tensors(33, gen, device)
    results = []
    for is_recorded in (False, True):
        torch.manual_seed(3)
        y = None
        statistics = record_statistics(model)
        if is_recorded:
            with statistics:
                y = model(x)
                gradients = torch.autograd.grad(y.float().square().sum(), model.parameters())
        else:
            y = model(x)
            gradients = torch.autograd.grad(y.float().square().sum(), model.parameters())
        results.append([y.detach(), *gradients, torch.rand(3, device=device)])
    for got, want in zip(results[1], results[0], strict=True):
        assert_bits(got, want)
    found = statistics.read()
    assert list(found) == ["0", "2"]
    assert found["0"]["dy_t"].elements == 33 * 96
    assert not any(one.elements for one in found["2"].values())
    assert functional.OBSERVERS == []


def test_the_recording_ends_with_an_error(device: torch.device) -> None:
    layer = training.Linear(64, 96, recipe="nvidia", device=device)
    statistics = record_statistics(layer)
    with pytest.raises(ZeroDivisionError), statistics:
        1 / 0  # noqa: B018
    assert functional.OBSERVERS == []
    with statistics, pytest.raises(RuntimeError, match=r"^statistics: are being recorded already"):
        statistics.__enter__()
    assert functional.OBSERVERS == []


def test_names_of_blocks_of_experts(device: torch.device, gen: torch.Generator) -> None:
    """Layers of a MoE that share x, and a call without tokens."""
    moe = training.MoE(64, 32, 4, top_k=2, recipe="nvidia", device=device, dtype=torch.bfloat16)
    x, _, _ = tensors(48, gen, device)
    statistics = record_statistics(moe)
    with statistics:
        moe(x.requires_grad_()).float().square().sum().backward()
        moe(x[:0])
    found = {name.rsplit(".")[-1]: one for name, one in statistics.read().items()}
    assert {name: one["x"].elements for name, one in found.items()} == {
        "w1": 96 * 64,
        "w3": 96 * 64,
        "w2": 96 * 32,
    }
    weights = 2 * 4 * 64 * 32  # of both calls
    for name, features in (("w1", 64), ("w3", 64), ("w2", 32)):
        sizes = [found[name][field].elements for field in FIELDS]
        out = 96 - features
        assert sizes == [96 * features, weights, 96 * out, weights, 96 * out, 96 * features]


def test_names_of_stacked_experts(device: torch.device) -> None:
    """Those of the parameters, also of one that is read through a view."""
    transformers = pytest.importorskip("transformers", reason="experts of transformers")
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, vocab_size=64,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).to(device, torch.bfloat16)
    training.convert_model(model, "nvidia")
    statistics = record_statistics(model, ["x", "dy"])
    ids = torch.arange(32, device=device).view(1, 32)
    with statistics:
        model(ids, labels=ids).loss.backward()
    found = statistics.read()
    experts = {name.rsplit(".")[-1]: one for name, one in found.items() if "experts" in name}
    assert {name: (one["x"].elements, one["dy"].elements) for name, one in experts.items()} == {
        "gate_up_proj": (64 * 64, 64 * 64),
        "down_proj": (64 * 32, 64 * 64),
    }
    assert all(one["x"].elements for one in found.values())


class Separate(training.GroupedLinear):
    """Experts whose weights are parameters of their own, as those of Megatron-Core: weight0, weight1, ..."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        matrices = self.weight.detach().unbind()
        del self.weight
        for i, matrix in enumerate(matrices):
            self.register_parameter(f"weight{i}", torch.nn.Parameter(matrix.clone()))

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        weights = [getattr(self, f"weight{i}") for i in range(3)]
        return training.functional.grouped_linear(x, weights, offs, None, self.recipe)


def test_weights_of_experts_by_themselves(device: torch.device, gen: torch.Generator) -> None:
    """They have the statistics of a stack, under the name of the layer."""
    x, _, dy = tensors(77, gen, device)
    offs = torch.tensor(ENDS, dtype=torch.int32, device=device)
    found = []
    for kind in (training.GroupedLinear, Separate):
        torch.manual_seed(3)
        layer = kind(3, 64, 96, bias=False, recipe="te_per_token", device=device, dtype=torch.bfloat16)
        statistics = record_statistics(layer)
        with statistics:
            layer(x.detach().requires_grad_(), offs).backward(dy)
        found.append(statistics.read())
    assert list(found[0]) == [""]
    assert found[0][""]["w"].elements == 3 * 96 * 64
    assert found[0] == found[1]


def test_a_weight_that_was_gathered(gen: torch.Generator) -> None:
    """FSDP2 gathers its codes; x and dy have statistics as in other layers."""
    layer = training.Linear(64, 96, bias=False, recipe="nvidia_no_sr", dtype=torch.bfloat16)
    x, w, dy = tensors(64, gen, torch.device("cpu"))
    t = fp4gemm.quantize(w, scaling="tensor", block=(16, 16))
    made = Made(448, True, torch.Size((96, 64)))
    gathered = GatheredWeight(t.codes, t.compact_scales().view(torch.uint8), t.amax, made, torch.bfloat16)
    layer.weight = torch.nn.Parameter(gathered)
    layer.cache = None
    with record_statistics(layer), pytest.raises(NotImplementedError, match=r"must be without 'w' and 'w_t'"):
        layer(x)
    statistics = record_statistics(layer, ["x", "dy", "x_t"])
    with statistics:
        layer(x.requires_grad_()).backward(dy)
    assert [one.elements for one in statistics.read()[""].values()] == [64 * 64, 64 * 96, 64 * 64]


def test_refusals(device: torch.device) -> None:
    layer = training.Linear(64, 96, recipe="nvidia", device=device)
    with pytest.raises(TypeError, match=r"^model: got 3 \(int\), must be a torch.nn.Module"):
        record_statistics(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^model: has no layer of fp4gemm.training"):
        record_statistics(torch.nn.Linear(64, 96))
    with pytest.raises(ValueError, match=r"^operands\[1\]: got 'y', must be 'x', 'w'"):
        record_statistics(layer, ["x", "y"])
    with pytest.raises(TypeError, match=r"^operands: got 'x' \(str\), must be a list or tuple"):
        record_statistics(layer, "x")
    sharded = training.Linear(64, 96, recipe="nvidia", device=device)
    sharded._is_sharded = True  # as a style of tensor parallelism says
    with pytest.raises(NotImplementedError, match=r"^model: layer '1' is sharded by tensor parallelism"):
        record_statistics(torch.nn.Sequential(layer, sharded))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with record_statistics(layer), pytest.raises(Exception, match=r"outside of torch\.compile only"):
        compiled(torch.ones(32, 64, device=device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["nvidia", "per_token", "te_per_token_rht"])
def test_nothing_synchronises(name: str, cuda: torch.device, gen: torch.Generator) -> None:
    """Nor does a replay of a captured step, which adds to the same sums."""
    layers = torch.nn.ModuleList(
        [
            training.Linear(64, 96, recipe=name, device=cuda, dtype=torch.bfloat16),
            training.GroupedLinear(3, 64, 96, recipe=name, device=cuda, dtype=torch.bfloat16),
        ]
    )
    x, _, dy = tensors(77, gen, cuda)
    x.requires_grad_()
    offs = torch.tensor(ENDS, dtype=torch.int32, device=cuda)
    statistics = record_statistics(layers)

    def step() -> None:
        layers[0](x).backward(dy)
        layers[1](x, offs).backward(dy)

    step()  # kernels are loaded and tested
    torch.cuda.synchronize(cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with statistics:
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = statistics.read()
    assert found["0"]["dy_t"].elements == 77 * 96
    assert found["1"]["x_t"].elements == 74 * 64
