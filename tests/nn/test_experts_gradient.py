"""Gradients of nn.Experts, and low-rank adapters on its frozen NVFP4 weights."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import fp4gemm
import pytest
import torch
from experts_helpers import GATED, INTER, PLAIN, D, G, experts, routed
from fp4gemm import activations, nn
from fp4gemm.nn import _adapted
from nn_helpers import same_bits, state_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

HOW = ("dequantized", "quantized")
Adapters = Sequence[nn.LowRank]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def adapters(m: nn.Experts, r: int = 4, b: float = 0.1) -> tuple[list[nn.LowRank], list[nn.LowRank]]:
    """An adapter of each weight, of matrices that require grad, about ``b`` times as large as the weight."""
    made = []
    for w in (m.w13, m.w2):
        g, n, k = w.num_matrices, w.out_features, w.in_features
        size = w.dequantize_weight().square().mean().sqrt().item()
        first, second = torch.randn(g, r, k) / r**0.5, torch.randn(g, n, r) * size * b
        made.append([nn.LowRank(first.requires_grad_(), second.requires_grad_(), 0.5)])
    return made[0], made[1]


def through(m: nn.Experts, rows: Tensor) -> Tensor:
    """Q(rows), with the gradient of the identity."""
    if m.activations == "a16":
        return rows
    with torch.no_grad():
        change = fp4gemm.quantize(rows.float()).dequantize(torch.float32).double() - rows
    return rows + change


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x rounded to a dtype, with the gradient of the identity."""
    with torch.no_grad():
        change = x.to(dtype).double() - x
    return x + change


def reference(
    m: nn.Experts, x: Tensor, ids: Tensor, scores: Tensor, lora13: Adapters = (), lora2: Adapters = ()
) -> Tensor:
    """The block in float64, token by token, with autograd of torch; h is rounded as the block rounds it."""
    hidden = x.dtype if x.dtype is not torch.float32 or m.rounded_gate else torch.bfloat16
    stacks = [w.dequantize_weight().double() for w in (m.w13, m.w2)]
    biases = [torch.zeros(w._shape[:2]) if w.bias is None else w.bias for w in (m.w13, m.w2)]
    act = activations.by_name[m.activation]
    out = []
    for i in range(x.shape[0]):
        total = x.new_zeros(D, dtype=torch.float64)
        for j in range(ids.shape[1]):
            e = int(ids[i, j])
            if not 0 <= e < m.num_experts:
                continue
            row = x[i].double()
            for layer, (w, bias, lora) in enumerate(zip(stacks, biases, (lora13, lora2), strict=True)):
                z = through(m, row.unsqueeze(0))[0] @ w[e].T + bias[e].double()
                for a, b, scale in lora:
                    z = z + scale * (row @ a[e].double().T) @ b[e].double().T
                z = rounded(z, x.dtype) if layer == 0 and m.rounded_gate else z
                row = rounded(act(z.float()).double(), hidden) if layer == 0 else z
            total = total + scores[i, j].double() * row
        out.append(total)
    return torch.stack(out)


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def leaves(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and topk_weights, which require grad, the ids of a routing with a dropped pair, and dy."""
    x, ids, scores = routed(9, dtype=dtype)
    ids[0, 1] = -1
    return x.requires_grad_(), ids, scores.requires_grad_(), torch.randn_like(x)


# ---- without adapters


@pytest.mark.parametrize("scaling", ["per-token", "per-tensor", "a16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_forward_has_the_bits_of_the_operator(dtype: torch.dtype, scaling: Any) -> None:
    if scaling == "fp8":
        m = nn.Experts.from_float(torch.randn(G, 256, D), torch.randn(G, D, 128), activations=scaling)
    else:
        m = experts(activations=scaling)
    x, ids, scores, _ = leaves(dtype)
    with torch.no_grad():
        want = m(x, ids, scores)
    y = m(x, ids, scores)
    assert y.requires_grad
    assert same_bits(y.detach(), want)


@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_forward_has_these_bits_with_every_activation(activation: str) -> None:
    m = experts(activation)
    x, ids, scores, _ = leaves()
    with torch.no_grad():
        want = m(x, ids, scores)
    assert same_bits(m(x, ids, scores).detach(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scores_dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scaling", ["per-token", "a16"])
def test_forward_has_these_bits_with_a_rounded_gate(
    dtype: torch.dtype, scores_dtype: torch.dtype, scaling: str
) -> None:
    m = experts(rounded_gate=True, activations=scaling)
    x, ids, scores, dy = leaves(dtype)
    scores = scores.detach().to(scores_dtype).requires_grad_()
    with torch.no_grad():
        want = m(x, ids, scores)
    y = m(x, ids, scores)
    assert same_bits(y.detach(), want)
    if scaling != "a16" or dtype is torch.float32:
        return  # the reference does not round inside of SwiGLU, so that other codes follow
    found = torch.autograd.grad(y, (x, scores), dy)
    wide = reference(m, x, ids, scores)
    for got, exact in zip(found, torch.autograd.grad(wide, (x, scores), dy.double()), strict=True):
        assert error(got, exact) < 0.01


@pytest.mark.parametrize("scaling", ["per-token", "a16"])
@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_gradients_of_tokens_and_of_router_weights(activation: str, scaling: str) -> None:
    """Those of the block in float64 whose quantization passes gradients straight through."""
    m = experts(activation, activations=scaling)
    for dtype in (torch.float32, torch.bfloat16):
        if scaling == "a16" and dtype is torch.float32:
            continue  # x is rounded to bfloat16
        x, ids, scores, dy = leaves(dtype)
        found = torch.autograd.grad(m(x, ids, scores), (x, scores), dy)
        wanted = torch.autograd.grad(reference(m, x, ids, scores), (x, scores), dy.double())
        for got, want in zip(found, wanted, strict=True):
            assert got.dtype is dtype or got.dtype is torch.float32
            assert error(got, want) < 0.01
        assert not found[1][0, 1]  # the weight of the pair that was dropped


def test_one_gradient_alone() -> None:
    m = experts()
    x, ids, scores, dy = leaves()
    both = torch.autograd.grad(m(x, ids, scores), (x, scores), dy)
    (dx,) = torch.autograd.grad(m(x, ids, scores.detach()), x, dy)
    (dscores,) = torch.autograd.grad(m(x.detach(), ids, scores), scores, dy)
    assert same_bits(dx, both[0])
    assert same_bits(dscores, both[1])


def test_quantized_input_gradient() -> None:
    """Both factors of each product of backward are rounded once more; the copy follows the weights."""
    m = experts("relu2")
    x, ids, scores, dy = leaves(torch.float32)
    (want,) = torch.autograd.grad(m(x, ids, scores), x, dy)
    m.input_gradient = "quantized"
    (got,) = torch.autograd.grad(m(x, ids, scores), x, dy)
    assert 0.02 < error(got, want) < 0.3
    held = m.w13._transposed
    assert held is not None
    assert held[1].data.numel() == m.w13.weight_codes.numel()
    assert same_bits(torch.autograd.grad(m(x, ids, scores), x, dy)[0], got)
    assert m.w13._transposed is held
    m.update_(torch.randn(G, INTER, D))
    assert not same_bits(torch.autograd.grad(m(x, ids, scores), x, dy)[0], got)
    assert m.w13._transposed is not held
    copied = copy.deepcopy(m)
    assert copied.w13._transposed is None
    assert copied.input_gradient == "quantized"
    with pytest.raises(ValueError, match=r"^input_gradient: got 'exact', must be 'dequantized' or 'quant"):
        m.input_gradient = "exact"  # type: ignore[assignment]


def test_prepacked_weights() -> None:
    plain, packed = experts(), experts()
    packed.load_state_dict(plain.state_dict())
    packed.prepack()
    x, ids, scores, dy = leaves()
    lora = adapters(plain)
    for m in (plain, packed):
        found = torch.autograd.grad(m(x, ids, scores, adapters13=lora[0], adapters2=lora[1]), x, dy)
        assert same_bits(found[0], torch.autograd.grad(_call(plain, lora, x, ids, scores), x, dy)[0])


def _call(m: nn.Experts, lora: tuple[Adapters, Adapters], *inputs: Tensor) -> Tensor:
    y: Tensor = m(*inputs, adapters13=lora[0], adapters2=lora[1])
    return y


@pytest.mark.parametrize("case", ["no-tokens", "no-experts", "one-expert", "leading-dimensions"])
def test_any_routing(case: str) -> None:
    m = experts()
    x, ids, scores, dy = leaves()
    if case == "no-tokens":
        x, ids, scores, dy = (t.detach()[:0] for t in (x, ids, scores, dy))
    if case == "no-experts":
        ids.fill_(-1)
    if case == "one-expert":
        ids = torch.full((9, 1), 2)
        scores = scores.detach()[:, :1]
    if case == "leading-dimensions":
        x, ids, scores, dy = (t.detach().view(3, 3, -1) for t in (x, ids, scores, dy))
    x, scores = (t.detach().clone().requires_grad_() for t in (x, scores))
    lora = adapters(m)
    y = _call(m, lora, x, ids, scores)
    assert y.shape == x.shape
    matrices = [t for each in lora for adapter in each for t in adapter[:2]]
    found = torch.autograd.grad(y, (x, scores, *matrices), dy)
    flat = [t.detach().flatten(0, -2) for t in (x, ids, scores)]
    if case in ("no-tokens", "no-experts"):
        assert not any(t.any() for t in found)
        return
    flat[0].requires_grad_()
    wanted = torch.autograd.grad(reference(m, *flat, *lora), (flat[0], *matrices), dy.flatten(0, -2).double())
    for got, want in zip((found[0].flatten(0, -2), *found[2:]), wanted, strict=True):
        assert error(got, want) < 0.04
    if case == "one-expert":
        assert not found[2][[0, 1, 3]].any()  # the matrices of experts without tokens


# ---- adapters


@pytest.mark.parametrize("scaling", ["per-token", "a16"])
@pytest.mark.parametrize("r", [1, 4, 8])
def test_adapters_against_float64(r: int, scaling: str) -> None:
    """y and every gradient, within 2 % in bf16, of the block in float64."""
    m, (x, ids, scores, dy) = experts("swiglu", activations=scaling), leaves()
    lora = adapters(m, r)
    matrices = [t for each in lora for adapter in each for t in adapter[:2]]
    y, want = _call(m, lora, x, ids, scores), reference(m, x, ids, scores, *lora)
    with torch.no_grad():
        assert same_bits(_call(m, lora, x, ids, scores), y.detach())
        assert error(m(x, ids, scores), want) > 0.05  # the adapters matter
    assert error(y.detach(), want.detach()) < 0.03
    found = torch.autograd.grad(y, (x, scores, *matrices), dy)
    wanted = torch.autograd.grad(want, (x, scores, *matrices), dy.double())
    for got, exact in zip(found, wanted, strict=True):
        assert error(got, exact) < 0.03


def test_adapters_of_float32_are_nearly_exact() -> None:
    """Without a quantized input and with relu2 nothing is rounded but h, to bfloat16."""
    m = experts("relu2", bias=False, activations="a16")
    x, ids, scores, dy = leaves()
    lora = adapters(m)
    y, want = _call(m, lora, x, ids, scores), reference(m, x, ids, scores, *lora)
    assert error(y.detach(), want.detach()) < 2.0**-7
    for got, exact in zip(
        torch.autograd.grad(y, (x, scores), dy),
        torch.autograd.grad(want, (x, scores), dy.double()),
        strict=True,
    ):
        assert error(got, exact) < 2.0**-7


@pytest.mark.parametrize("rounded_gate", [False, True])
@pytest.mark.parametrize("scaling", ["per-token", "a16"])
def test_zero_adapters_change_no_bit(scaling: str, rounded_gate: bool) -> None:
    m, (x, ids, scores, _) = experts(activations=scaling, rounded_gate=rounded_gate), leaves()
    lora = adapters(m, b=0.0)
    with torch.no_grad():
        assert same_bits(_call(m, lora, x, ids, scores), m(x, ids, scores))


def test_several_adapters_are_added() -> None:
    m, (x, ids, scores, _) = experts(activations="a16"), leaves()
    (first, *_), (second, *_) = adapters(m)
    (third, *_), _ = adapters(m, 8)
    with torch.no_grad():
        got = _call(m, ([first, third], [second]), x, ids, scores)
        joined = nn.LowRank(torch.cat((first.a, third.a), 1), torch.cat((first.b, third.b), 2), 0.5)
        assert error(got, _call(m, ([joined], [second]), x, ids, scores)) < 0.02


def test_adapters_train_and_the_weights_stay() -> None:
    m, (x, ids, scores, _) = experts(bias=False), leaves()
    before = state_bits(m)
    lora = adapters(m, b=0.0)
    matrices = [t for each in lora for adapter in each for t in adapter[:2]]
    others = adapters(m, b=0.3)
    target = _call(m, others, x, ids, scores).detach().float()
    optimizer = torch.optim.Adam(matrices, lr=0.03)
    losses = []
    for _ in range(40):
        loss = (_call(m, lora, x, ids, scores).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    after = state_bits(m)
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert not list(m.parameters())


def test_checkpointing_and_autocast() -> None:
    m, (x, ids, scores, dy) = experts(), leaves()
    lora = adapters(m)
    (want,) = torch.autograd.grad(_call(m, lora, x, ids, scores), x, dy)
    again = checkpoint(_call, m, lora, x, ids, scores, use_reentrant=False)
    assert same_bits(torch.autograd.grad(again, x, dy)[0], want)
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(torch.autograd.grad(_call(m, lora, x, ids, scores), x, dy)[0], want)


def test_compiled() -> None:
    m, (x, ids, scores, dy) = experts(), leaves()
    lora = adapters(m)
    wanted = torch.autograd.grad(_call(m, lora, x, ids, scores), (x, scores, lora[0][0].a), dy)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *inputs: _call(m, lora, *inputs), fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(x, ids, scores), (x, scores, lora[0][0].a), dy)
    for got, want in zip(found, wanted, strict=True):
        assert same_bits(got, want)


def test_the_kernel_of_swiglu_is_the_derivative_of_the_formula() -> None:
    z = torch.randn(16, 64, dtype=torch.bfloat16) * 3
    dh = torch.randn(16, 32, dtype=torch.bfloat16)
    act = activations.by_name["swiglu"]
    leaf = z.double().requires_grad_()
    silu = leaf[:, 0::2] * torch.sigmoid(leaf[:, 0::2]) * leaf[:, 1::2]
    (want,) = torch.autograd.grad(silu, leaf, dh.double())
    assert error(_adapted._through(act, z, dh), want) < 2.0**-7
    assert error(_adapted._through(act, z.float(), dh.float()), want) < 1e-6


# ---- what is refused


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "type": (lambda a: (a.a, a.b), TypeError, r"^adapters13\[0\]: got .*, must be an fp4gemm.nn.LowRank"),
    "rank": (lambda a: a._replace(a=a.a[0]), ValueError, r"^adapters13\[0\]\.a: .*\(g, r, k\)"),
    "k": (lambda a: a._replace(a=a.a[..., :32]), ValueError, r"^adapters13\[0\]\.a: shape is \(4, 4, 32\)"),
    "r": (lambda a: a._replace(b=a.b[..., :2]), ValueError, r"^adapters13\[0\]\.b: shape is .*rank 4 of a"),
    "dtype": (lambda a: a._replace(b=a.b.int()), TypeError, r"^adapters13\[0\]\.b: dtype is torch.int32"),
    "scale": (lambda a: a._replace(scale=float("nan")), ValueError, r"^adapters13\[0\]\.scale: got"),
}


@pytest.mark.parametrize(("change", "kind", "text"), BAD.values(), ids=BAD)
def test_bad_adapters(change: Any, kind: type[Exception], text: str) -> None:
    m, (x, ids, scores, _) = experts(), leaves()
    (adapter,), _ = adapters(m)
    with pytest.raises(kind, match=text):
        m(x, ids, scores, adapters13=[change(adapter)])


def test_a_weight_that_was_written_in_between() -> None:
    m, (x, ids, scores, dy) = experts(), leaves()
    y = m(x, ids, scores)
    m.update_(torch.randn(G, 2 * INTER, D))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, x, dy)


def test_a_weight_of_inference_mode() -> None:
    with torch.inference_mode():
        m = experts()
        codes = m.w13.weight_codes.clone()
    m.w13.weight_codes = codes
    with pytest.raises(RuntimeError, match=r"^w13: was made in inference mode, must not be where gradients"):
        m(*leaves()[:3])


def test_experts_on_many_ranks() -> None:
    m, (x, ids, scores, _) = experts(), leaves()
    m.ep = object()  # type: ignore[assignment]
    with pytest.raises(
        NotImplementedError, match=r"^ep: is set, must be None for gradients and for adapters"
    ):
        m(x, ids, scores)
    with pytest.raises(
        NotImplementedError, match=r"^ep: is set, must be None for gradients and for adapters"
    ):
        m(x.detach(), ids, scores.detach(), adapters2=adapters(m)[1])


def test_a_second_derivative() -> None:
    m, (x, ids, scores, dy) = experts(), leaves()
    (dx,) = torch.autograd.grad(m(x, ids, scores), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
def test_on_the_device(how: Any, device: torch.device) -> None:
    """The results of the CPU, up to the order of torch's sums, which changes some codes of h and of dy."""
    m, (x, ids, scores, dy) = experts(), leaves()
    m.input_gradient = how
    lora = adapters(m)
    matrices = [t for each in lora for adapter in each for t in adapter[:2]]
    y = _call(m, lora, x, ids, scores)
    want = (y, *torch.autograd.grad(y, (x, scores, *matrices), dy))
    there = [
        [nn.LowRank(a.detach().to(device).requires_grad_(), b.detach().to(device).requires_grad_(), s)]
        for ((a, b, s),) in lora
    ]
    given = [t.detach().to(device) for t in (x, ids, scores)]
    given[0].requires_grad_()
    given[2].requires_grad_()
    matrices = [t for each in there for adapter in each for t in adapter[:2]]
    y = _call(m.to(device), (there[0], there[1]), *given)
    found = (y, *torch.autograd.grad(y, (given[0], given[2], *matrices), dy.to(device)))
    for got, exact in zip(found, want, strict=True):
        assert error(got.detach().cpu(), exact.detach()) < 0.05
