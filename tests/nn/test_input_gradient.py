"""The gradient of the input of nn.Linear: adapters train on top of frozen NVFP4 weights."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import fp4gemm
import pytest
import torch
import torch.nn.functional as F
from fp4gemm import nn
from fp4gemm.nn.merged import Part, one_weight
from nn_helpers import float_linear, same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

K, N = 64, 96
HOW = ("dequantized", "quantized")
FORMS = [
    (scaling, dtype)
    for scaling in ("per-token", "per-tensor", "a16")
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]


def make(scaling: Any = "per-token", n: int = N, how: Any = "dequantized", seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    layer = nn.Linear.from_float(float_linear(K, n), activations=scaling)
    layer.input_gradient = how
    return layer


def inputs(dtype: torch.dtype = torch.bfloat16, n: int = N) -> tuple[Tensor, Tensor]:
    """x, which requires grad, and a gradient of the result."""
    torch.manual_seed(1)
    x, dy = torch.randn(2, 5, K, dtype=dtype), torch.randn(2, 5, n, dtype=dtype)
    return x.requires_grad_(), dy


def gradient(layer: Any, x: Tensor, dy: Tensor) -> Tensor:
    return torch.autograd.grad(layer(x), x, dy)[0]


def defined(layer: nn.Linear, dy: Tensor, how: str) -> Tensor:
    """dx by the definition, from the public functions."""
    if how == "dequantized":
        return dy @ layer.dequantize_weight(dy.dtype)
    w_t = fp4gemm.quantize(layer.dequantize_weight(), axis=0)
    q = fp4gemm.quantize(dy.reshape(-1, dy.shape[-1]))
    return fp4gemm.training.dgrad(q, w_t, out_dtype=dy.dtype).view(*dy.shape[:-1], K)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("scaling", "dtype"), FORMS, ids=str)
def test_the_gradient_is_the_definition(scaling: str, dtype: torch.dtype, how: str) -> None:
    layer, (x, dy) = make(scaling, how=how), inputs(dtype)
    with torch.no_grad():
        plain = layer(x)
    y = layer(x)
    assert y.requires_grad
    assert same_bits(y.detach(), plain)
    (dx,) = torch.autograd.grad(y, x, dy)
    want = defined(layer, dy, how)
    is_rounded = scaling == "a16" and dtype is torch.float32  # x, so that its gradient is rounded too
    assert same_bits(dx, want.bfloat16().float() if is_rounded else want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_it_equals_autograd_through_the_dequantized_weight(dtype: torch.dtype) -> None:
    layer, (x, dy) = make(), inputs(dtype)
    want = torch.autograd.grad(F.linear(x, layer.dequantize_weight(dtype)), x, dy)[0]
    assert same_bits(gradient(layer, x, dy), want)


def test_it_is_exact_with_respect_to_the_stored_weight() -> None:
    """One rounding of W to bf16 and one of each dx: within 2^-8 |dy| |W| and half an ulp of the exact one."""
    layer, (x, dy) = make(), inputs()
    w = layer.dequantize_weight().double()
    exact, size = dy.double() @ w, dy.double().abs() @ w.abs()
    assert bool(
        ((gradient(layer, x, dy).double() - exact).abs() <= size * 2.0**-8 + exact.abs() * 2.0**-8).all()
    )
    layer.input_gradient = "quantized"
    error = (gradient(layer, x, dy).double() - exact).norm() / exact.norm()
    assert 0.05 < error < 0.2


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("form", ["expanded", "transposed", "empty", "vector"])
def test_any_strides_and_shapes(form: str, how: str) -> None:
    layer = make(how=how)
    x = torch.randn(6, K, dtype=torch.bfloat16)
    x = {"empty": x[:0], "vector": x[0], "transposed": x.T.contiguous().T}.get(form, x).requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, dtype=y.dtype)
    dy = torch.ones((), dtype=y.dtype).expand(y.shape) if form == "expanded" else dy
    dy = dy.T.contiguous().T if form == "transposed" else dy
    (dx,) = torch.autograd.grad(y, x, dy)
    assert dx.shape == x.shape
    assert same_bits(dx, defined(layer, dy.contiguous(), how).view(x.shape))


def test_the_addend_has_its_gradient_too() -> None:
    layer, (x, dy) = make(), inputs()
    c = torch.randn_like(dy).requires_grad_()
    dx, dc = torch.autograd.grad(layer(x, c), (x, c), dy)
    assert same_bits(dc, dy)
    assert same_bits(dx, defined(layer, dy, "dequantized"))
    (dc,) = torch.autograd.grad(layer(x.detach(), c), c, dy)
    assert same_bits(dc, dy)
    shared = fp4gemm.quantize(x.detach().flatten(0, 1))
    layer.to(torch.bfloat16)
    (dc,) = torch.autograd.grad(layer(shared, c.flatten(0, 1)), c, dy.flatten(0, 1))
    assert same_bits(dc, dy)


@pytest.mark.parametrize("how", HOW)
def test_a_prepacked_weight(how: str) -> None:
    plain, packed = make("a16", how=how), make("a16", how=how).prepack()
    x, dy = inputs()
    assert same_bits(gradient(packed, x, dy), gradient(plain, x, dy))


@pytest.mark.parametrize("how", HOW)
def test_compiled_and_checkpointed(how: str) -> None:
    layer, (x, dy) = make(how=how), inputs()
    want = gradient(layer, x, dy)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same_bits(gradient(compiled, x, dy), want)
    for reentrant in (False, True):
        again = checkpoint(layer, x, use_reentrant=reentrant)
        assert same_bits(
            torch.autograd.grad(again, x, dy)[0] if not reentrant else backward(again, x, dy), want
        )


def backward(y: Tensor, x: Tensor, dy: Tensor) -> Tensor:
    x.grad = None
    y.backward(dy)
    assert x.grad is not None
    return x.grad


def test_autocast_changes_nothing() -> None:
    layer, (x, dy) = make(), inputs(torch.float32)
    want = gradient(layer, x, dy)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(gradient(layer, x, dy), want)


def saved_bytes(layer: Any, x: Tensor) -> tuple[int, int]:
    """Bytes that autograd saves beyond the layer's own memory, and in all."""
    own = {t.untyped_storage().data_ptr() for t in layer.buffers()}
    new, everything = [0], [0]

    def pack(t: Tensor) -> Tensor:
        everything[0] += t.nbytes
        new[0] += 0 if t.untyped_storage().data_ptr() in own else t.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x)
    return new[0], everything[0]


def test_nothing_of_the_input_is_saved() -> None:
    layer, (x, _) = make(), inputs()
    new, everything = saved_bytes(layer, x)
    assert new == 0
    assert everything == layer.weight_codes.nbytes + layer.weight_scales.nbytes + layer.weight_amax.nbytes
    layer.input_gradient = "quantized"
    new, everything = saved_bytes(layer, x)
    assert new == everything == K * N // 2 + 128 * 8 + 4 * K  # codes, padded scales and amax of Q(W^T)


def test_the_copy_is_made_once_and_follows_the_weight() -> None:
    layer, (x, dy) = make(how="quantized"), inputs()
    first = gradient(layer, x, dy)
    held = layer._transposed
    assert same_bits(gradient(layer, x, dy), first)
    assert layer._transposed is held
    for write in (
        lambda: layer.update_(float_linear(K, N).weight),
        lambda: layer.load_state_dict(make(seed=7).state_dict()),
        lambda: setattr(layer, "weight", make(seed=8).weight),
    ):
        write()
        new = gradient(layer, x, dy)
        assert not same_bits(new, first)
        assert same_bits(new, defined(layer, dy, "quantized"))
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other._transposed is None
        assert other.input_gradient == "quantized"
        assert same_bits(gradient(other, x, dy), new)


def test_adapters_train() -> None:
    """LoRA: the loss falls, the layer stays, and a float layer of the same weight trains the same way."""
    torch.manual_seed(0)
    layer = make("a16")
    x, target = torch.randn(32, K, dtype=torch.bfloat16), torch.randn(32, N, dtype=torch.bfloat16)
    before = {name: t.clone() for name, t in layer.state_dict().items()}
    losses = []
    for base in (layer, lambda h: F.linear(h, layer.dequantize_weight(h.dtype), layer.bias.to(h.dtype))):
        torch.manual_seed(3)
        first = torch.nn.Linear(K, K, dtype=torch.bfloat16)
        a, b = (torch.nn.Linear(*s, bias=False, dtype=torch.bfloat16) for s in ((K, 4), (4, N)))
        torch.nn.init.zeros_(b.weight)
        optimizer = torch.optim.SGD([*first.parameters(), *a.parameters(), *b.parameters()], lr=1e-3)
        for _ in range(20):
            h = first(x)
            loss = F.mse_loss((base(h) + b(a(h))).float(), target.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[19] < 0.9 * losses[0]
    assert losses[:20] == pytest.approx(losses[20:], rel=0.02)
    assert all(
        torch.equal(before[name].view(torch.uint8), t.view(torch.uint8))
        for name, t in layer.state_dict().items()
    )


def test_merged_layers() -> None:
    layers = [make(n=n, seed=n) for n in (32, 64)]
    merged = one_weight(layers)
    parts = [Part(merged, i) for i in range(2)]
    x, dy = inputs()
    with torch.no_grad():
        parts[0](x)  # its product is not for the graph below
    y = torch.cat([part(x) for part in parts], -1)
    assert same_bits(torch.autograd.grad(y, x, dy)[0], defined(merged, dy, "dequantized"))


# ---- what is refused


def test_a_weight_that_was_written_in_between() -> None:
    layer, (x, dy) = make(), inputs()
    y = layer(x)
    layer.update_(float_linear(K, N).weight)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, dy)


def test_a_second_derivative() -> None:
    layer, (x, dy) = make(), inputs()
    (dx,) = torch.autograd.grad(layer(x), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_an_activation_in_the_epilogue() -> None:
    mlp = nn.GatedMLP(make(), make(seed=1), nn.Linear.from_float(float_linear(N, K)))
    x, _ = inputs()
    for dtype in (torch.bfloat16, torch.float32):
        with pytest.raises(
            NotImplementedError, match=r"^x: requires grad, but a layer with an activation in its epilogue"
        ):
            mlp(x.detach().to(dtype).requires_grad_())


def test_bad_values_of_the_option() -> None:
    layer = make(n=24)
    with pytest.raises(
        ValueError, match=r"^input_gradient: got 'exact', must be 'dequantized' or 'quantized'"
    ):
        layer.input_gradient = "exact"  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=r"^input_gradient: got 'quantized' with out_features 24, must be 'dequantized'"
    ):
        layer.input_gradient = "quantized"
    assert layer.input_gradient == "dequantized"
    x, dy = inputs(n=24)
    assert same_bits(gradient(layer, x, dy), defined(layer, dy, "dequantized"))


def test_a_weight_of_inference_mode() -> None:
    with torch.inference_mode():
        layer = make()
        codes = layer.weight_codes.clone()
    layer.weight_codes = codes
    with pytest.raises(RuntimeError, match=r"^weight: was made in inference mode, must not be where x requi"):
        layer(inputs()[0])


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
def test_on_the_device(how: str, device: torch.device) -> None:
    """Bits of the CPU for "quantized"; torch's sums for "dequantized"."""
    layer, (x, dy) = make(how=how), inputs()
    want = gradient(layer, x, dy)
    got = gradient(layer.to(device), x.detach().to(device).requires_grad_(), dy.to(device)).cpu()
    if how == "quantized":
        assert same_bits(got, want)
    else:
        assert torch.allclose(got.float(), want.float(), rtol=2.0**-7, atol=1e-2)
