"""Layers whose weights and tokens are MXFP8: bits, state, updates, models, gradients, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import nn
from helpers import FLOATS, assert_bits, short
from nn_helpers import INNER, D, G, expert_stacks, float_linear, mxfp8_values, same_bits, same_state
from torch import Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# The kinds of layers whose tokens become MXFP8, and the casts of their weights.
KINDS: dict[Any, Any] = {"mxfp8": fp4gemm.quantize_mxfp8, "mxfp8-mxfp4": fp4gemm.quantize_mxfp4}


def made(linear: torch.nn.Linear, activations: Any = "mxfp8", **options: Any) -> nn.Linear:
    return nn.Linear.from_float(linear, activations=activations, **options)


# ---- linear layers


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_linear_has_the_bits_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """cast(fl(sum) + bias) of small multiples of 1/64, whose sums every accumulator holds."""
    linear = float_linear().to(device, dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-8, 9, (24, 64)) / 64)
    layer = made(linear)
    assert isinstance(layer.weight, fp4gemm.MXFP8Tensor)
    assert layer.weight.dtype is dtype
    for lead in ((), (5,), (2, 3), (0,), (130,)):
        x = torch.randint(-8, 9, (*lead, 64)).to(device, dtype)
        acc = (mxfp8_values(x) @ mxfp8_values(linear.weight).t()).float()
        want = (acc + linear.bias.detach().cpu().float()).to(dtype)
        for _ in range(2):  # the second call is the one without checks
            assert_bits(layer(x).cpu(), want, str(lead))
    x = torch.randn(7, 64, device=device).to(dtype)
    product = fp4gemm.mm(
        fp4gemm.quantize_mxfp8(x), fp4gemm.quantize_mxfp8(linear.weight.detach()), bias=linear.bias.detach(),
        out_dtype=dtype,
    )  # fmt: skip
    assert_bits(layer(x), product)
    c = torch.randn(7, 24, device=device).to(dtype)
    w = layer.weight
    product = fp4gemm.mm(fp4gemm.quantize_mxfp8(x), w, bias=linear.bias.detach(), c=c, out_dtype=dtype)
    assert_bits(layer(x, c), product)


def test_the_dequantized_weight() -> None:
    linear = float_linear()
    assert torch.equal(made(linear).dequantize_weight().double(), mxfp8_values(linear.weight))


def test_state_copies_pickles_and_moves() -> None:
    layer, x = made(float_linear()), torch.randn(3, 64)
    state = layer.state_dict()
    assert {name: t.dtype for name, t in state.items()} == {
        "weight_codes": torch.float8_e4m3fn,
        "weight_scales": torch.float8_e8m0fnu,
        "bias": torch.float32,
    }
    assert state["weight_codes"].shape == (24, 64)
    assert state["weight_scales"].shape == (128, 4)
    fresh = nn.Linear(64, 24, activations="mxfp8")
    with pytest.raises(RuntimeError, match="weight: not loaded yet"):
        fresh(x)
    fresh.load_state_dict(state)
    copies = [fresh, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer).half()]
    empty = nn.Linear(64, 24, activations="mxfp8", device="meta")
    empty.load_state_dict(state, assign=True)
    for other in (*copies, empty, nn.Linear.from_quantized(layer.weight, layer.bias, activations="mxfp8")):
        assert same_state(layer, other)
        assert same_bits(other(x), layer(x))
    assert copies[3].weight.dtype is torch.float16
    moved = copy.deepcopy(layer).to("meta").to_empty(device="cpu")
    with pytest.raises(RuntimeError, match="weight: not loaded yet"):
        moved(x)
    assert "weight_scaling" not in repr(layer)
    assert "activations='mxfp8'" in repr(layer)


def test_updates_keep_addresses() -> None:
    layer, other, x = made(float_linear()), float_linear(), torch.randn(3, 64)
    want, place = made(other), layer.weight_codes.data_ptr()
    for weight in (other.weight, want.weight):
        layer.update_(weight, other.bias)
        assert layer.weight_codes.data_ptr() == place
        assert same_bits(layer(x), want(x))
        layer.reset_parameters()
        with pytest.raises(RuntimeError, match="weight: not loaded yet"):
            layer(x)
    for weight in (other.weight, want.weight):
        layer.weight = weight
        assert same_state(nn.Linear.from_quantized(layer.weight, want.bias, activations="mxfp8"), want)


def test_a_recipe_makes_the_layer() -> None:
    linear = float_linear()
    recipe = fp4gemm.recipe.Recipe(activations="mxfp8")
    assert (recipe.method, recipe.weight_scaling, recipe.e4m3_max) == ("round", "row", 448)
    layer = nn.Linear.from_float(linear, recipe=recipe)
    assert same_state(layer, made(linear))
    again = fp4gemm.recipe.Recipe(**recipe.options())
    assert again == recipe


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_the_bits_of_training(dtype: torch.dtype, device: torch.device) -> None:
    """A recipe of training says how the layer is served: the forward pass has the same bits."""
    recipe = fp4gemm.training.PRESETS["mxfp8"]
    layer = fp4gemm.training.Linear(64, 32, recipe=recipe, dtype=dtype, device=device)
    served = nn.Linear.from_float(layer, recipe=recipe.for_inference())
    x = torch.randn(33, 64, device=device).to(dtype)
    assert torch.equal(served(x), layer(x))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_for_adapters(kind: Any, device: torch.device) -> None:
    layer = made(float_linear().bfloat16().to(device), kind)
    x = torch.randn(5, 64, device=device).bfloat16().requires_grad_()
    y = layer(x)
    assert_bits(y.detach(), layer(x.detach()))
    dy = torch.randn_like(y)
    (dx,) = torch.autograd.grad(y, x, dy)
    assert_bits(dx, dy @ layer.dequantize_weight(torch.bfloat16))


@pytest.mark.parametrize("kind", KINDS)
def test_compiled(kind: Any, device: torch.device) -> None:
    torch._dynamo.reset()
    layer = made(float_linear().bfloat16().to(device), kind)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = torch.randn(5, 64, device=device).bfloat16()
    assert_bits(run(x), layer(x))


# ---- experts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activation", ["swiglu", "swiglu_oai"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=short)
def test_experts_have_the_bits_of_their_products(
    kind: Any, activation: Any, dtype: torch.dtype, device: torch.device
) -> None:
    """The products of each expert; on the CPU, where sums are exact, those of each token and expert too.

    A GPU may add the products of one row in another order than those of many.
    """
    w13, w2, b13, b2 = expert_stacks(device, dtype)
    block = nn.Experts.from_float(w13, w2, b13, b2, activation=activation, activations=kind)
    x = torch.randn(9, D, device=device).to(dtype)
    ids = torch.stack([torch.randperm(G)[:2] for _ in range(9)]).to(device)
    ids[3, 1] = -1
    weights = torch.rand(9, 2, device=device)
    mixed13, mixed_bias = (t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) for t in (w13, b13))
    q13, q2 = KINDS[kind](mixed13), KINDS[kind](w2)
    for held, cast in ((block.w13.weight, q13), (block.w2.weight, q2)):
        assert type(held) is type(cast)
        assert_bits(held._elements, cast._elements)
        assert_bits(held.scales, cast.scales)
    got = block(x, ids, weights)
    assert_bits(block(x, ids, weights), got, "again")
    assert block(x[:0], ids[:0], weights[:0]).shape == (0, D)
    offs, token_of_row, row_of_pair = torch.ops.fp4gemm.route(ids, G)
    rows = x[token_of_row.clamp(min=0).long()]
    h_dtype = torch.bfloat16 if dtype is torch.float32 else dtype
    h = fp4gemm.grouped_mm(
        fp4gemm.quantize_mxfp8(rows, offs=offs),
        q13,
        bias=mixed_bias,
        activation=activation,
        out_dtype=h_dtype,
    )
    y = fp4gemm.grouped_mm(fp4gemm.quantize_mxfp8(h, offs=offs), q2, bias=b2, out_dtype=dtype)
    assert_bits(got, torch.ops.fp4gemm.combine(y, row_of_pair, weights, dtype), "by groups")
    if device.type != "cpu":
        return
    want = torch.zeros(9, D, device=device)
    for i in range(9):
        for j in range(2):
            e = int(ids[i, j])
            if e < 0:
                continue
            h = fp4gemm.mm(
                fp4gemm.quantize_mxfp8(x[i : i + 1]), q13[e], bias=mixed_bias[e], activation=activation,
                out_dtype=h_dtype,
            )  # fmt: skip
            y = fp4gemm.mm(fp4gemm.quantize_mxfp8(h), q2[e], bias=b2[e], out_dtype=dtype)
            want[i] += weights[i, j] * y[0].float()
    assert_bits(got, want.to(dtype), "one by one")


def test_state_of_experts_and_updates() -> None:
    w13, w2, b13, b2 = expert_stacks(torch.device("cpu"))
    block = nn.Experts.from_float(w13, w2, b13, b2, activations="mxfp8")
    x, ids, weights = torch.randn(5, D).bfloat16(), torch.arange(5).view(5, 1) % G, torch.rand(5, 1)
    fresh = nn.Experts(G, D, INNER, bias=True, activations="mxfp8")
    fresh.load_state_dict(block.state_dict())
    for other in (fresh, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert same_bits(other(x, ids, weights), block(x, ids, weights))
    want = nn.Experts.from_float(w13 * 2, w2, b13, b2, activations="mxfp8")
    block.update_(w13=w13 * 2)
    assert same_bits(want(x, ids, weights), block(x, ids, weights))


def test_gradients_and_adapters_of_experts(device: torch.device) -> None:
    """A call that autograd records has the bits of one that it does not record, where sums are exact."""
    w13, w2, b13, b2 = expert_stacks(device)
    block = nn.Experts.from_float(w13, w2, b13, b2, activations="mxfp8")
    x = torch.randn(5, D, device=device).bfloat16()
    ids, weights = torch.arange(5, device=device).view(5, 1) % G, torch.rand(5, 1, device=device)
    want, leaf = block(x, ids, weights), x.clone().requires_grad_()
    y = block(leaf, ids, weights)
    if device.type == "cpu":
        assert_bits(y.detach(), want)
    assert float((y.detach() - want).float().norm() / want.float().norm()) < 0.02
    y.float().sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
    assert bool(leaf.grad.any())


# ---- models


def test_a_model_is_quantized_and_fused(device: torch.device) -> None:
    class MLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = torch.nn.Linear(64, 96, bias=False)
            self.up_proj = torch.nn.Linear(64, 96, bias=False)
            self.down_proj = torch.nn.Linear(96, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
            return y

    model = torch.nn.Sequential(MLP(), MLP()).to(device, torch.bfloat16).eval()
    shown: list[Any] = []
    plain = fp4gemm.models.quantize_model(model, activations="mxfp8", inplace=False, report=shown.append)
    fused = fp4gemm.models.quantize_model(model, activations="mxfp8", inplace=False, fuse="auto")
    assert isinstance(plain[0].up_proj, nn.Linear)
    assert isinstance(fused[0], nn.GatedMLP)
    assert {layer.activations for layer in shown[0].layers} == {"mxfp8"}
    x = torch.randn(7, 64, device=device).bfloat16()
    with torch.no_grad():
        want, exact, alone = plain(x), model(x), fused[0](x)
    assert float((want - exact).norm() / exact.norm()) < 0.15
    first = plain[0]
    gate_up = torch.stack((first.gate_proj.weight.values, first.up_proj.weight.values), 1).flatten(0, 1)
    assert_bits(fused[0].gate_up.weight.values, gate_up)
    both = torch.stack((model[0].gate_proj.weight, model[0].up_proj.weight), 1).flatten(0, 1).detach()
    q = fp4gemm.quantize_mxfp8
    h = fp4gemm.mm(q(x), q(both), activation="swiglu")
    assert_bits(alone, fp4gemm.mm(q(h), first.down_proj.weight))


# ---- refusals


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: nn.Linear(64, 24, activations="mxfp8", weight_scaling="tensor"),
            "weight_scaling: got 'tensor', must be 'row'",
        ),
        (
            lambda: made(float_linear(), method="search"),
            "method: got 'search', must be 'round' with activations 'mxfp8'",
        ),
        (lambda: made(float_linear(), use_fast_accum=True), "use_fast_accum: got True"),
        (lambda: made(float_linear()).prepack(), "weight: is MXFP8, must be NVFP4 to be prepacked"),
        (lambda: setattr(made(float_linear()), "e4m3_max", 256), "e4m3_max: got 256, must not be set"),
        (
            lambda: setattr(made(float_linear()), "input_gradient", "quantized"),
            "input_gradient: got 'quantized', must be 'dequantized'",
        ),
        (
            lambda: nn.Linear.from_quantized(fp4gemm.quantize(torch.randn(24, 64)), activations="mxfp8"),
            "weight: got .*NVFP4Tensor.*must be an MXFP8Tensor with activations 'mxfp8'",
        ),
        (
            lambda: nn.Linear.from_quantized(fp4gemm.quantize_mxfp8(torch.randn(24, 64))),
            "weight: got .*MXFP8Tensor.*must be an NVFP4Tensor with activations 'per-token'",
        ),
        (
            lambda: nn.Linear.from_quantized(
                fp4gemm.quantize_mxfp8(torch.randn(24, 64), swizzled=False), activations="mxfp8"
            ),
            "weight: scales are compact, must be swizzled",
        ),
        (
            lambda: made(float_linear())(fp4gemm.quantize_mxfp8(torch.randn(3, 64))),
            "x: got .*, must be a ",
        ),
        (
            lambda: nn.Linear(64, 24, activations="mxfp8").load_state_dict(
                nn.Linear.from_float(float_linear()).state_dict()
            ),
            "weight_codes: dtype is torch.uint8, must be torch.float8_e4m3fn",
        ),
        (
            lambda: fp4gemm.models.prepare_qat(float_linear(), activations="mxfp8"),
            "activations: got .mxfp8., must be a value with weights in NVFP4",
        ),
        (
            lambda: fp4gemm.recipe.Recipe(activations="mxfp8", block=(16, 16)),
            r"block: got \(16, 16\), must be",
        ),
        (lambda: fp4gemm.checkpoint.Options(activations="mxfp8"), "activations: got 'mxfp8', must be"),
    ],
)  # fmt: skip
def test_refusals(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as caught:
        call()
    assert re.search(text, str(caught.value)), str(caught.value)


def test_nan_in_a_checkpoint_is_refused() -> None:
    for name, byte in (("weight_codes", 0xFF), ("weight_scales", 0xFF)):
        state = made(float_linear()).state_dict()
        state[name].view(torch.uint8)[0, 0] = byte
        with pytest.raises(RuntimeError, match=f"{name}: 1 of .* values are NaN, the first at"):
            nn.Linear(64, 24, activations="mxfp8").load_state_dict(state)
