"""New weights in place: addresses and bits of all layers, all or nothing, and graphs that see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from experts_helpers import experts, routed, weights
from fp4gemm import nn
from fp4gemm.nn.merged import MergedLinear, Part
from nn_helpers import convert, float_linear, same_bits, same_state
from torch import Tensor

K, N = 64, 24


def addresses(module: torch.nn.Module) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in module.named_buffers()}


def snapshot(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def unchanged(module: torch.nn.Module, before: dict[str, Tensor]) -> bool:
    now = dict(module.named_buffers())
    return now.keys() == before.keys() and all(same_bits(now[name], before[name]) for name in now)


def new_weight(n: int = N, k: int = K, seed: int = 7, dtype: torch.dtype = torch.float32) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=gen) * 10.0 ** torch.linspace(1, -1, n).unsqueeze(1)).to(dtype)


@pytest.fixture(params=["codes", "prepacked"])
def form(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Brings a layer into one of the two forms in which a weight is held."""
    return (lambda layer: layer) if request.param == "codes" else (lambda layer: layer.prepack())


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "nvfp4"])
def test_linear(form: Callable[[Any], Any], kind: str, scaling: str) -> None:
    torch.manual_seed(1)
    layer = form(nn.Linear.from_float(float_linear(), weight_scaling=scaling))
    x = torch.randn(5, K, dtype=torch.bfloat16)
    before, first = addresses(layer), layer(x)
    w, bias = new_weight(), torch.randn(N)
    fresh = torch.nn.Linear(K, N)
    with torch.no_grad():
        fresh.weight.copy_(w if kind != "bfloat16" else w.bfloat16())
        fresh.bias.copy_(bias)
    want = nn.Linear.from_float(fresh, weight_scaling=scaling)
    given = {"float32": w, "bfloat16": w.bfloat16(), "nvfp4": want.weight}[kind]
    assert layer.update_(given, bias) is layer
    assert addresses(layer) == before
    assert same_state(layer, want)
    assert same_bits(layer(x), want(x))
    assert not same_bits(layer(x), first)
    layer.update_(given)  # the bias stays
    assert same_state(layer, want)


def test_an_amax_of_the_tensor_is_that_of_every_row(form: Callable[[Any], Any]) -> None:
    layer = form(nn.Linear.from_float(float_linear(), method="round"))
    w = fp4gemm.quantize(new_weight(), scaling="tensor")
    layer.update_(w)
    assert same_bits(layer.weight_amax, w.amax.expand(N).contiguous())
    assert same_bits(layer.dequantize_weight(), w.dequantize())


def test_the_own_weight_and_a_layer_without_one() -> None:
    layer = nn.Linear.from_float(float_linear())
    before = snapshot(layer)
    layer.update_(layer.weight)
    assert unchanged(layer, before)
    empty = nn.Linear(K, N, dtype=torch.float32)
    empty.update_(layer.weight, layer.bias)
    assert same_state(empty, layer)
    assert same_bits(empty(torch.ones(2, K)), layer(torch.ones(2, K)))


def test_in_inference_mode_and_of_inference_tensors(form: Callable[[Any], Any]) -> None:
    want = nn.Linear.from_float(float_linear(), method="round")
    with torch.inference_mode():
        made = fp4gemm.quantize(new_weight())
        held = nn.Linear.from_quantized(fp4gemm.quantize(new_weight(seed=3)))
        layer = form(nn.Linear.from_float(float_linear(), method="round"))
        layer.update_(new_weight())
    assert same_bits(layer.weight.codes, made.codes)
    layer.update_(want.weight, want.bias)
    assert same_state(layer, want)
    held.update_(made)
    assert same_bits(held.weight_codes, made.codes)


W = new_weight()
BAD = {
    "type": ([1.0], TypeError, r"^weight: got \[1\.0\] \(list\), must be an NVFP4Tensor or a float tensor$"),
    "shape": (W[:16], ValueError, r"^weight: .*\(16, 64\).*\(24, 64\)"),
    "dtype": (W.double(), TypeError, r"^weight: dtype is torch\.float64"),
    "nan": (W.index_fill(0, torch.tensor([3]), torch.nan), ValueError, r"^weight: 64 values are NaN"),
    "quantized_shape": (
        fp4gemm.quantize(W[:16]),
        ValueError,
        r"^weight: shape is \(16, 64\), must be \(24, 64\)$",
    ),
    "bound": (
        fp4gemm.quantize(W, four_over_six="mse"),
        ValueError,
        r"^weight: e4m3_max is 256, must be 448 as of the layer; assign",
    ),
    "stack": (fp4gemm.quantize(W[None]), ValueError, r"^weight: shape is \(1, 24, 64\), must be \(n, k\)$"),
}


@pytest.mark.parametrize("case", BAD)
def test_after_an_error_nothing_has_changed(form: Callable[[Any], Any], case: str) -> None:
    value, error, message = BAD[case]
    layer = form(nn.Linear.from_float(float_linear(), method="round"))
    before = snapshot(layer)
    with pytest.raises(error, match=message):
        layer.update_(value, torch.ones(N))
    assert unchanged(layer, before)


def test_other_refusals() -> None:
    layer = nn.Linear.from_float(float_linear(), weight_scaling="tensor", method="round")
    before = snapshot(layer)
    with pytest.raises(ValueError, match=r"^weight: amax has shape \(24,\), must have \(1,\), since"):
        layer.update_(fp4gemm.quantize(W))
    with pytest.raises(ValueError, match=r"^bias: .*\(8,\).*\(24,\)"):
        layer.update_(W, torch.ones(8))
    assert unchanged(layer, before)
    with pytest.raises(ValueError, match=r"^bias: got .*, must be None: there is no bias$"):
        nn.Linear.from_float(float_linear(bias=False)).update_(W, torch.ones(N))
    with pytest.raises(ValueError, match=r"^weight: the layer is on the meta device, must be in memory"):
        nn.Linear(K, N, device="meta").update_(W)


def test_a_layer_of_the_bound_256() -> None:
    """A float weight gets the bound of the layer, which is a part of captured graphs."""
    four = fp4gemm.quantize(W, four_over_six="mse")
    layer = nn.Linear.from_quantized(four)
    other = fp4gemm.quantize(new_weight(seed=8), four_over_six="mae")
    layer.update_(other)
    assert same_bits(layer.dequantize_weight(), other.dequantize())
    with pytest.raises(ValueError, match=r"^weight: e4m3_max is 448, must be 256"):
        layer.update_(fp4gemm.quantize(W))
    layer.update_(W)
    assert same_bits(layer.weight_codes, four.codes)
    assert same_bits(layer.weight_scales, four.scales)
    layer.weight = torch.nn.Parameter(new_weight(seed=9))  # as transformers ties weights
    assert layer.e4m3_max == 256


# ---- experts


@pytest.mark.parametrize("activation", ["swiglu", "silu"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["nk", "kn"])
def test_experts(form: Callable[[Any], Any], activation: str, is_transposed: bool) -> None:
    torch.manual_seed(2)
    m = form(experts(activation))
    inputs = routed()
    before, first = addresses(m), m(*inputs)
    new = weights(activation)
    want = nn.Experts.from_float(*new, activation=activation)
    w13, w2 = (w.transpose(1, 2).contiguous() if is_transposed else w for w in new[:2])
    assert m.update_(w13, w2, *new[2:], is_transposed=is_transposed) is m
    assert addresses(m) == before
    for name in ("w13", "w2"):
        assert same_state(getattr(m, name), getattr(want, name))
    assert same_bits(m(*inputs), want(*inputs))
    assert not same_bits(m(*inputs), first)


def test_one_weight_of_experts_and_quantized_ones(form: Callable[[Any], Any]) -> None:
    m = form(experts(bias=False, method="round"))
    kept = m.w2.dequantize_weight()
    w13, w2 = weights()[:2]
    quantized13 = fp4gemm.quantize(w13)
    m.update_(quantized13)
    assert same_bits(m.w2.dequantize_weight(), kept)
    want = nn.Experts.from_quantized(quantized13, fp4gemm.quantize(w2))
    assert same_bits(m.w13.dequantize_weight(), want.w13.dequantize_weight())
    m.update_(w13=want.w13.weight, w2=w2, layout="interleaved")
    for name in ("w13", "w2"):
        assert same_state(getattr(m, name), getattr(want, name))


def test_experts_all_or_nothing(form: Callable[[Any], Any]) -> None:
    m = form(experts())
    before = snapshot(m)
    w13, w2, bias13, bias2 = weights()
    for arguments, message in (
        ((w13, w2[:, :, :64], bias13, bias2), r"^w2: "),
        ((w13, torch.full_like(w2, torch.nan)), r"^w2: \d+ values are NaN"),
        ((w13[:, :64], w2), r"^w13: "),
        ((w13, w2, bias13, bias13), r"^bias2: "),
        ((None, w2, bias13), r"^bias13: must be None where w13 is None$"),
        ((None, None), r"^w13 and w2: got None for both"),
    ):
        with pytest.raises(ValueError, match=message):
            m.update_(*arguments)
        assert unchanged(m, before)
    with pytest.raises(ValueError, match=r"^layout: got 'rows'"):
        m.update_(w13, layout="rows")  # type: ignore[arg-type]


# ---- merged layers


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(K, 64)
        self.k_proj = torch.nn.Linear(K, 24, bias=False)
        self.v_proj = torch.nn.Linear(K, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


class MLP(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(K, 96, bias=False)
        self.up = torch.nn.Linear(K, 96, bias=False)
        self.down = torch.nn.Linear(96, K, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def test_parts_of_a_merged_layer(form: Callable[[Any], Any]) -> None:
    torch.manual_seed(3)
    model, other = Attention(), Attention()
    fused, want = (convert(m, fuse="auto")[0] for m in (model, other))
    merged = fused.qkv_proj
    assert isinstance(merged, MergedLinear)
    form(merged)
    before, x = addresses(merged), torch.randn(3, K)
    assert isinstance(fused.k_proj, Part)
    stale = fused.q_proj(x)
    fused.k_proj.update_(other.k_proj.weight.detach())
    k = fused.k_proj(x)  # not the columns of the product that q_proj made before
    assert same_bits(k, want(x)[1])
    assert same_bits(fused(x)[0], stale)
    fused.v_proj.update_(want.v_proj.weight, other.v_proj.bias.detach())
    merged.update_([other.q_proj.weight.detach(), None, None])
    assert same_bits(merged.weight.codes, want.qkv_proj.weight.codes)
    merged.update_(want.qkv_proj.weight, want.qkv_proj.bias)
    assert same_state(merged, want.qkv_proj)
    assert addresses(merged) == before
    assert all(same_bits(a, b) for a, b in zip(fused(x), want(x), strict=True))


def test_bad_parts() -> None:
    merged = convert(Attention(), fuse="auto")[0].qkv_proj
    before = snapshot(merged)
    for arguments, message in (
        (([W, W],), r"^weight: got 2 weights, must be 3 or one tensor$"),
        (([W, None, None],), r"^weight\[0\]: .*\(24, 64\).*\(64, 64\)"),
        (([None, fp4gemm.quantize(W), None],), r"^weight\[1\]: e4m3_max is 448, must be 256"),
        (([None, W, None], torch.ones(24)), r"^bias: "),
    ):
        with pytest.raises(ValueError, match=message):
            merged.update_(*arguments)
        assert unchanged(merged, before)


def test_gated_mlp(form: Callable[[Any], Any]) -> None:
    torch.manual_seed(4)
    holder, other = (torch.nn.ModuleDict({"mlp": MLP()}) for _ in range(2))
    fused, want = (convert(m, fuse="auto")[0]["mlp"] for m in (holder, other))
    assert isinstance(fused, nn.GatedMLP)
    form(fused.gate_up)
    form(fused.down)
    before, x, mlp = addresses(fused), torch.randn(3, K, dtype=torch.bfloat16), other["mlp"]
    fused.update_(up=mlp.up.weight.detach())
    with pytest.raises(ValueError, match=r"^down: "):
        fused.update_(gate=mlp.gate.weight.detach(), down=mlp.gate.weight.detach())
    with pytest.raises(ValueError, match=r"^up: .*, must be \(96, 64\)"):
        fused.update_(up=mlp.down.weight.detach())
    assert not same_bits(fused.gate_up.weight.codes, want.gate_up.weight.codes)
    fused.update_(gate=mlp.gate.weight.detach(), down=want.down.weight)
    for name in ("gate_up", "down"):
        assert same_state(getattr(fused, name), getattr(want, name))
    assert addresses(fused) == before
    assert same_bits(fused(x), want(x))
    with pytest.raises(ValueError, match=r"^gate, up and down: got None for all"):
        fused.update_()


# ---- captured graphs


def captured(*calls: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, list[Tensor]]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [call() for call in calls]
    return graph, results


@pytest.mark.gpu
@pytest.mark.parametrize("is_warm", [True, False], ids=["warm", "captured_first"])
def test_a_hundred_updates_into_a_captured_graph(cuda: torch.device, is_warm: bool) -> None:
    """A replay after each update gives the bits of fresh layers: warmed up (prepacked on Hopper), or not."""
    torch.manual_seed(5)
    x = torch.randn(16, 512, device=cuda, dtype=torch.bfloat16)
    routing = [t.to(cuda) for t in routed(32, 2, 8, torch.bfloat16)]

    def new() -> tuple[torch.nn.Linear, list[Tensor], nn.Linear, nn.Experts]:
        linear = torch.nn.Linear(512, 256, device=cuda, dtype=torch.bfloat16)
        stacks = [w.to(cuda) for w in weights(g=8, dtype=torch.bfloat16)]
        return linear, stacks, nn.Linear.from_float(linear), nn.Experts.from_float(*stacks)

    for _ in range(2):  # the libraries and the kernels are loaded before anything is captured
        *_, layer, block = new()
        layer(x), block(*routing)
    *_, layer, block = new()
    if is_warm:
        layer(x), block(*routing)
    graph, (y, z) = captured(lambda: layer(x), lambda: block(*routing))
    before = addresses(layer) | addresses(block)
    for i in range(100):
        linear, stacks, fresh, experts = new()
        if i % 2:
            layer.update_(linear.weight.detach(), linear.bias.detach())
            block.update_(*stacks)
        else:
            layer.update_(fresh.weight, fresh.bias)
            w13, w2 = experts.w13, experts.w2
            block.update_(w13.weight, w2.weight, w13.bias, w2.bias, layout="interleaved")
        graph.replay()
        if is_warm:
            want = [fresh(x), experts(*routing)]
        else:  # these graphs read codes and scales, as that one does
            other, want = captured(lambda fresh=fresh: fresh(x), lambda e=experts: e(*routing))
            other.replay()
        torch.cuda.synchronize(cuda)
        assert same_bits(y, want[0]), i
        assert same_bits(z, want[1]), i
    assert addresses(layer) | addresses(block) == before


@pytest.mark.gpu
def test_a_quantized_weight_does_not_synchronise(cuda: torch.device) -> None:
    layer = nn.Linear.from_float(torch.nn.Linear(512, 256, device=cuda, dtype=torch.bfloat16))
    w = fp4gemm.quantize(torch.randn(256, 512, device=cuda, dtype=torch.bfloat16), four_over_six="mse")
    for each in (layer, layer.prepack() if fp4gemm.support.streams_prepacked(cuda) else layer):
        torch.cuda.set_sync_debug_mode("error")
        try:
            each.update_(w)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert same_bits(each.weight.codes, w.codes)
