"""Layers whose weights are MXFP4 and whose tokens become MXFP8: bits, state, updates, and what is refused."""

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
from fp4gemm.reference import mxfp4
from fp4gemm.reference.formats import decode_e2m1, decode_e8m0
from helpers import FLOATS, assert_bits, short
from nn_helpers import INNER, D, G, expert_stacks, float_linear, mxfp8_values, same_bits, same_state
from torch import Tensor

KIND: Any = "mxfp8-mxfp4"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def weight_values(w: Tensor) -> Tensor:
    """The values of w in MXFP4, in float64, by the reference alone."""
    codes, scales = mxfp4.quantize(w.detach().cpu(), "floor")
    blocks = decode_e2m1(codes).double().unflatten(-1, (-1, 32)) * decode_e8m0(scales).double().unsqueeze(-1)
    return blocks.flatten(-2)


def made(linear: torch.nn.Linear, **options: Any) -> nn.Linear:
    return nn.Linear.from_float(linear, activations=KIND, **options)


# ---- linear layers


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_linear_has_the_bits_of_the_reference(dtype: torch.dtype, device: torch.device) -> None:
    """cast(fl(sum) + bias) of small multiples of 1/64, whose sums every accumulator holds."""
    linear = float_linear().to(device, dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-8, 9, (24, 64)) / 64)
    layer = made(linear)
    assert isinstance(layer.weight, fp4gemm.MXFP4Tensor)
    assert layer.weight.dtype is dtype
    assert torch.equal(layer.dequantize_weight().double().cpu(), weight_values(linear.weight))
    for lead in ((), (5,), (2, 3), (0,), (130,)):
        x = torch.randint(-8, 9, (*lead, 64)).to(device, dtype)
        acc = (mxfp8_values(x) @ weight_values(linear.weight).t()).float()
        want = (acc + linear.bias.detach().cpu().float()).to(dtype)
        for _ in range(2):  # the second call is the one without checks
            assert_bits(layer(x).cpu(), want, str(lead))
    x, c = torch.randn(7, 64, device=device).to(dtype), torch.randn(7, 24, device=device).to(dtype)
    terms: dict[str, Any] = {"bias": linear.bias.detach(), "out_dtype": dtype}
    product = fp4gemm.mm(fp4gemm.quantize_mxfp8(x), layer.weight, c=c, **terms)
    assert_bits(layer(x, c), product)


def test_a_weight_keeps_its_codes() -> None:
    """The layer shares the memory of an MXFP4Tensor, and its state has its bytes."""
    weight = fp4gemm.MXFP4Tensor.from_weight(
        torch.randint(0, 256, (24, 2, 16), dtype=torch.uint8),
        torch.randint(100, 140, (24, 2), dtype=torch.uint8),
    )
    layer = nn.Linear.from_quantized(weight, torch.randn(24), activations=KIND)
    assert layer.weight_codes.data_ptr() == weight.codes.data_ptr()
    again = nn.Linear(64, 24, activations=KIND)
    again.load_state_dict(layer.state_dict())
    for held in (layer.weight, again.weight, copy.deepcopy(layer).to(torch.float16).weight):
        codes, scales = held.to_weight()
        assert torch.equal(codes, weight.to_weight().codes)
        assert torch.equal(scales, weight.to_weight().scales)


def test_state_copies_pickles_and_moves() -> None:
    layer, x = made(float_linear()), torch.randn(3, 64)
    state = layer.state_dict()
    assert {name: (t.dtype, tuple(t.shape)) for name, t in state.items()} == {
        "weight_codes": (torch.uint8, (24, 32)),
        "weight_scales": (torch.float8_e8m0fnu, (128, 4)),
        "bias": (torch.float32, (24,)),
    }
    fresh = nn.Linear(64, 24, activations=KIND)
    with pytest.raises(RuntimeError, match="weight: not loaded yet"):
        fresh(x)
    fresh.load_state_dict(state)
    empty = nn.Linear(64, 24, activations=KIND, device="meta")
    empty.load_state_dict(state, assign=True)
    for other in (fresh, empty, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same_state(layer, other)
        assert same_bits(other(x), layer(x))
    assert f"activations={KIND!r}" in repr(layer)


def test_updates_keep_addresses() -> None:
    layer, other, x = made(float_linear()), float_linear(), torch.randn(3, 64)
    want, place = made(other), layer.weight_codes.data_ptr()
    for weight in (other.weight, want.weight):
        layer.update_(weight, other.bias)
        assert layer.weight_codes.data_ptr() == place
        assert same_bits(layer(x), want(x))
        layer.reset_parameters()


def test_a_recipe_makes_the_layer() -> None:
    linear, recipe = float_linear(), fp4gemm.recipe.Recipe(activations=KIND)
    assert (recipe.method, recipe.weight_scaling, recipe.e4m3_max) == ("round", "row", 448)
    assert same_state(nn.Linear.from_float(linear, recipe=recipe), made(linear))
    assert fp4gemm.recipe.Recipe(**recipe.options()) == recipe


# ---- experts


def test_state_of_experts_and_updates() -> None:
    w13, w2, b13, b2 = expert_stacks(torch.device("cpu"))
    block = nn.Experts.from_float(w13, w2, b13, b2, activations=KIND)
    x, ids, weights = torch.randn(5, D).bfloat16(), torch.arange(5).view(5, 1) % G, torch.rand(5, 1)
    fresh = nn.Experts(G, D, INNER, bias=True, activations=KIND)
    fresh.load_state_dict(block.state_dict())
    for other in (fresh, copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert same_bits(other(x, ids, weights), block(x, ids, weights))
    want = nn.Experts.from_float(w13 * 2, w2, b13, b2, activations=KIND)
    block.update_(w13=w13 * 2)
    assert same_bits(want(x, ids, weights), block(x, ids, weights))


# ---- models


def test_a_model_is_quantized_and_fused() -> None:
    class MLP(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj = torch.nn.Linear(64, 96, bias=False)
            self.up_proj = torch.nn.Linear(64, 96, bias=False)
            self.down_proj = torch.nn.Linear(96, 64, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.down_proj(torch.nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
            return y

    model = torch.nn.Sequential(MLP(), MLP()).bfloat16().eval()
    fused = fp4gemm.models.quantize_model(model, activations=KIND, inplace=False, fuse="auto")
    assert isinstance(fused[0], nn.GatedMLP)
    x = torch.randn(7, 64).bfloat16()
    first = model[0]
    both = torch.stack((first.gate_proj.weight, first.up_proj.weight), 1).flatten(0, 1).detach()
    h = fp4gemm.mm(fp4gemm.quantize_mxfp8(x), fp4gemm.quantize_mxfp4(both), activation="swiglu")
    down = fp4gemm.quantize_mxfp4(first.down_proj.weight.detach())
    assert_bits(fused[0](x), fp4gemm.mm(fp4gemm.quantize_mxfp8(h), down))


# ---- refusals


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: nn.Linear(64, 24, activations=KIND, weight_scaling="tensor"),
            "weight_scaling: got 'tensor', must be 'row'",
        ),
        (
            lambda: made(float_linear(), method="search"),
            "method: got 'search', must be 'round' with activations 'mxfp8-mxfp4'",
        ),
        (lambda: made(float_linear()).prepack(), "weight: is MXFP4, must be NVFP4 to be prepacked"),
        (
            lambda: nn.Linear.from_quantized(fp4gemm.quantize_mxfp8(torch.randn(24, 64)), activations=KIND),
            "weight: got .*MXFP8Tensor.*must be an MXFP4Tensor with activations 'mxfp8-mxfp4'",
        ),
        (
            lambda: nn.Linear.from_quantized(
                fp4gemm.quantize_mxfp4(torch.randn(24, 64)), activations="mxfp8"
            ),
            "weight: got .*MXFP4Tensor.*must be an MXFP8Tensor with activations 'mxfp8'",
        ),
        (
            lambda: nn.Linear.from_quantized(
                fp4gemm.quantize_mxfp4(torch.randn(24, 64), swizzled=False), activations=KIND
            ),
            "weight: scales are compact, must be swizzled: quantize_mxfp4",
        ),
        (lambda: made(float_linear())(fp4gemm.quantize_mxfp8(torch.randn(3, 64))), "x: got .*, must be a "),
        (
            lambda: nn.Linear(64, 24, activations=KIND).load_state_dict(
                nn.Linear.from_float(float_linear(), activations="mxfp8").state_dict()
            ),
            "weight_codes: dtype is torch.float8_e4m3fn, must be torch.uint8",
        ),
        (
            lambda: fp4gemm.models.prepare_qat(float_linear(), activations=KIND),
            "activations: got .mxfp8-mxfp4., must be a value with weights in NVFP4",
        ),
    ],
)
def test_refusals(call: Callable[[], Any], text: str) -> None:
    with pytest.raises((TypeError, ValueError, RuntimeError, NotImplementedError)) as caught:
        call()
    assert re.search(text, str(caught.value)), str(caught.value)


def test_nan_scales_of_a_state_are_refused() -> None:
    state = made(float_linear()).state_dict()
    state["weight_scales"].view(torch.uint8)[0, 0] = 255
    with pytest.raises(RuntimeError, match=r"weight_scales: 1 of \d+ values are NaN"):
        nn.Linear(64, 24, activations=KIND).load_state_dict(state)
