"""fp4gemm.nn.Experts: its results, where its weights come from, and what it refuses."""

from __future__ import annotations

import typing
from collections import Counter
from collections.abc import Callable

import fp4gemm
import pytest
import torch
from experts_helpers import GATED, INTER, PLAIN, D, G, experts, routed, weights
from fp4gemm import nn
from fp4gemm.nn import experts as nn_experts
from nn_helpers import same_bits, state_bits
from torch import Tensor


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def by_hand(m: nn.Experts, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
    """The definition in the docstring, token by token, with the functions that existed before."""
    is_gated = m.activation in GATED
    hidden = x.dtype if x.dtype is not torch.float32 else torch.bfloat16
    out = torch.zeros(x.shape)
    for i, j in torch.cartesian_prod(*(torch.arange(size) for size in ids.shape)).tolist():
        e = int(ids[i, j])
        if not 0 <= e < m.num_experts:
            continue
        biases = [None if w.bias is None else w.bias[e] for w in (m.w13, m.w2)]
        row = x[i : i + 1]
        quantized = fp4gemm.quantize if m.activations == "per-token" else lambda v: v
        h = fp4gemm.mm(
            quantized(row), m.w13.weight[e], bias=biases[0], activation=m.activation, out_dtype=hidden
        )
        assert h.shape[1] == (m.w13.out_features // 2 if is_gated else m.w13.out_features)
        y = fp4gemm.mm(quantized(h), m.w2.weight[e], bias=biases[1], out_dtype=x.dtype)
        out[i] += scores[i, j].float() * y[0].float()
    return out.to(x.dtype)


# ---- results


@pytest.mark.parametrize("scaling", ["per-token", "a16"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@pytest.mark.parametrize("activation", [*GATED, *PLAIN])
def test_forward_is_the_definition(activation: str, dtype: torch.dtype, scaling: str) -> None:
    m, (x, *routing) = experts(activation, activations=scaling), routed(5, dtype=dtype)
    in_16_bits = x.bfloat16() if dtype is torch.float32 and scaling == "a16" else x
    want = by_hand(m, in_16_bits, *routing).to(dtype)
    for _ in range(2):  # the second call may go without checks
        assert same_bits(m(x, *routing), want)


def test_it_approximates_the_float_experts() -> None:
    w13, w2, bias13, bias2 = weights()
    x, ids, scores = routed(32)
    want = torch.zeros(32, D)
    for i, j in torch.cartesian_prod(torch.arange(32), torch.arange(2)).tolist():
        e = ids[i, j]
        gate, up = (w13[e] @ x[i] + bias13[e]).chunk(2)
        want[i] += scores[i, j] * (w2[e] @ (torch.nn.functional.silu(gate) * up) + bias2[e])
    y = nn.Experts.from_float(w13, w2, bias13, bias2)(x, ids, scores)
    assert torch.cosine_similarity(y.flatten(), want.flatten(), 0) > 0.97


@pytest.mark.parametrize("top_k", [1, 8])
def test_top_k(top_k: int) -> None:
    m, inputs = experts(g=8), routed(5, top_k, 8)
    assert same_bits(m(*inputs), by_hand(m, *inputs))


def test_a_refused_call_is_counted_for_any_top_k(
    monkeypatch: pytest.MonkeyPatch, unexplained: Counter[str]
) -> None:
    """Rows of 8 bytes are no reason to make the call again without counting it."""
    m = experts()
    x, ids, scores = (each.contiguous() for each in routed(5, 1))
    want, multiply = m(x, ids, scores), nn_experts.multiply

    def refused_once(*args: typing.Any) -> Tensor:
        monkeypatch.setattr(nn_experts, "multiply", multiply)
        raise RuntimeError("a wrong argument")

    monkeypatch.setattr(nn_experts, "multiply", refused_once)
    with pytest.warns(RuntimeWarning, match=r"nn\.Experts: .* a wrong argument"):
        assert same_bits(m(x, ids, scores), want)
    assert unexplained == {"fp4gemm.nn.Experts": 1}


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("scores_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_dtypes_of_the_routing(ids_dtype: torch.dtype, scores_dtype: torch.dtype) -> None:
    m, (x, ids, scores) = experts(), routed()
    ids, scores = ids.to(ids_dtype), scores.to(scores_dtype)
    assert same_bits(m(x, ids, scores), by_hand(m, x, ids, scores))


def test_ids_of_no_expert() -> None:
    m, (x, ids, scores) = experts(), routed()
    for none in (-1, G, 1000):
        ids[0], ids[2, 1] = none, none
        y = m(x, ids, scores)
        assert same_bits(y, by_hand(m, x, ids, scores))
        assert not y[0].any()
        assert y[2].any()
    assert not m(x, torch.full_like(ids, -1), scores).any()


def test_one_hot_expert() -> None:
    m, (x, ids, scores) = experts(), routed(6, 1)
    ids[:] = 2
    assert same_bits(m(x, ids, scores), by_hand(m, x, ids, scores))


def test_no_token_and_leading_dimensions() -> None:
    m, (x, ids, scores) = experts(), routed(6)
    y = m(x, ids, scores)
    assert m(x[:0], ids[:0], scores[:0]).shape == (0, D)
    assert same_bits(m(x.view(2, 3, D), ids.view(2, 3, 2), scores.view(2, 3, 2)), y.view(2, 3, D))
    assert same_bits(m(x[0], ids[0], scores[0]), y[0])
    strided = torch.cat((x, x), 1)[:, 1 : D + 1]
    assert same_bits(m(strided, ids.T.contiguous().T, scores), m(strided.contiguous(), ids, scores))


# ---- where the weights come from


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("activation", ["swiglu", "silu"])
def test_every_source_gives_the_same_weights(activation: str, scaling: typing.Any) -> None:
    w13, w2, bias13, bias2 = weights(activation, dtype=torch.bfloat16)
    m = nn.Experts.from_float(
        w13,
        w2,
        bias13,
        bias2,
        activation=activation,
        weight_scaling=scaling,  # type: ignore[arg-type]
    )
    want = state_bits(m)
    assert (m.num_experts, m.hidden, m.intermediate, m.weight_scaling) == (G, D, INTER, scaling)
    assert m.dtype is torch.bfloat16
    assert torch.equal(m.w13.bias, _mixed(bias13, activation).float())
    assert m.w13.weight_amax.shape == (G, w13.shape[1] if scaling == "row" else 1)
    packed = [fp4gemm.quantize(w, scaling=scaling, four_over_six="mse") for w in (w13, w2)]
    others = [
        nn.Experts.from_float(
            w13.mT.contiguous(),
            w2.mT.contiguous(),
            bias13,
            bias2,
            is_transposed=True,
            activation=activation,
            weight_scaling=scaling,
        ),
        nn.Experts.from_float(
            _mixed(w13, activation),
            w2,
            _mixed(bias13, activation),
            bias2,
            layout="interleaved",
            activation=activation,
            weight_scaling=scaling,
        ),
        nn.Experts.from_quantized(*packed, bias13, bias2, activation=activation),
    ]
    for other in others:
        found = state_bits(other)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], value) for name, value in want.items())
    shared = nn.Experts.from_quantized(*packed, layout="interleaved", activation=activation)
    assert shared.w13.weight_codes.data_ptr() == packed[0].codes.data_ptr()
    assert shared.w13.bias is shared.w2.bias is None


def _mixed(w: Tensor, activation: str) -> Tensor:
    """Gate and up, given as halves, row by row."""
    if activation not in GATED:
        return w
    gate, up = w.chunk(2, 1)
    return torch.stack((gate, up), 2).reshape(w.shape)


def test_dequantize() -> None:
    w13, w2, *_ = weights()
    m = nn.Experts.from_float(w13, w2)
    values = [fp4gemm.quantize(w, four_over_six="mse").dequantize() for w in (w13, w2)]
    assert same_bits(m.w2.dequantize_weight(), values[1])
    assert same_bits(m.w13.dequantize_weight(), _mixed(values[0], "swiglu"))


# ---- what is refused


def _w(**changed: typing.Any) -> dict[str, typing.Any]:
    w13, w2, bias13, bias2 = weights()
    return {"w13": w13, "w2": w2, "bias13": bias13, "bias2": bias2} | changed


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "num_experts": (lambda: nn.Experts(0, D, INTER), ValueError, r"^num_experts: got 0, must be at least 1"),
    "hidden": (
        lambda: nn.Experts(G, 40, INTER),
        ValueError,
        r"^hidden: k is 40, must be a positive multiple of 32",
    ),
    "intermediate": (lambda: nn.Experts(G, D, 40), ValueError, r"^intermediate: k is 40"),
    "activation": (
        lambda: nn.Experts(G, D, INTER, activation="glu"),  # type: ignore[arg-type]
        ValueError,
        r"^activation: got 'glu', must be 'swiglu'",
    ),
    "scaling": (
        lambda: nn.Experts(G, D, INTER, activations="static"),  # type: ignore[arg-type]
        ValueError,
        r"^activations: got 'static', must be 'per-token', 'per-tensor', 'fp8', 'a16', 'mxfp8' or "
        r"'mxfp8-mxfp4'",
    ),
    "layout": (
        lambda: nn.Experts.from_float(**_w(), layout="rows"),  # type: ignore[arg-type]
        ValueError,
        r"^layout: got 'rows', must be 'halves' or 'interleaved'",
    ),
    "rank": (
        lambda: nn.Experts.from_float(**_w(w13=torch.randn(64, D))),
        ValueError,
        r"^w13: shape is \(64, 64\)",
    ),
    "w2": (
        lambda: nn.Experts.from_float(**_w(w2=torch.randn(G, D, 64))),
        ValueError,
        r"^w2: shape is \(4, 64, 64\), must be \(g, d, intermediate\), which is \(4, 64, 96\)",
    ),
    "dtype": (
        lambda: nn.Experts.from_float(**_w(w2=torch.randn(G, D, INTER).half())),
        TypeError,
        r"^w2: dtype is",
    ),
    "bias13": (
        lambda: nn.Experts.from_float(**_w(bias13=torch.randn(G, INTER))),
        ValueError,
        r"^bias13: shape is \(4, 96\), must be \(4, 192\)",
    ),
    "bias2": (lambda: nn.Experts.from_float(**_w(bias2=torch.randn(D))), ValueError, r"^bias2: shape is"),
    "nan": (
        lambda: nn.Experts.from_float(**_w(w2=torch.full((G, D, INTER), torch.nan))),
        ValueError,
        r"^w2: 24576 values are NaN or infinite",
    ),
    "quantized": (
        lambda: nn.Experts.from_quantized(fp4gemm.quantize(torch.randn(64, D)), torch.randn(4)),  # type: ignore
        ValueError,
        r"^w13: shape is \(64, 64\), must be \(g, n, k\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "text"), BAD.values(), ids=BAD)
def test_bad_construction(call: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


CALLS: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], type[Exception], str]] = {
    "x": (lambda x, i, w: (x[:, :32], i, w), ValueError, r"^x: shape is \(7, 32\), must be \(\.\.\., 64\)"),
    "ids": (lambda x, i, w: (x, i[:3], w), ValueError, r"^topk_ids: shape is \(3, 2\), must be \(7, top_k\)"),
    "ids-dtype": (lambda x, i, w: (x, i.to(torch.int16), w), TypeError, r"^topk_ids: dtype is torch.int16"),
    "weights": (
        lambda x, i, w: (x, i, w[:, :1]),
        ValueError,
        r"^topk_weights: shape is \(7, 1\), must be \(7, 2\) as of topk_ids",
    ),
    "weights-type": (
        lambda x, i, w: (x, i, w.tolist()),
        TypeError,
        r"^topk_weights: got \[\[.*\(list\), must be a torch.Tensor",
    ),
    "twice": (
        lambda x, i, w: (x, i[:, :1].expand(-1, 2), w),
        ValueError,
        r"^topk_ids: token 0 names expert \d twice",
    ),
}


@pytest.mark.parametrize(("change", "error", "text"), CALLS.values(), ids=CALLS)
def test_bad_calls(
    change: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]], error: type[Exception], text: str
) -> None:
    module = experts()
    for _ in range(2):  # also after a call that was right, whose checks are not made again
        with pytest.raises(error, match=text):
            module(*change(*routed()))
        module(*routed())


def test_the_layout_of_the_float_weights_is_known() -> None:
    assert experts().float_layout == "halves"
    w13, w2, *_ = weights()
    assert nn.Experts.from_float(w13, w2, layout="interleaved").float_layout == "interleaved"


def test_check_finite() -> None:
    m, (x, ids, scores) = experts(check_finite="raise"), routed()
    x[0, 0] = torch.nan
    ids = ids.contiguous()  # as the call that omits the checks reads them
    with pytest.raises(ValueError, match=r"^x: 1 of 448 values are NaN or infinite"):
        m(x, ids, scores)
    m.check_finite = "off"
    m(x, ids, scores)
    m.check_finite = "raise"
    with pytest.raises(ValueError, match=r"^x: 1 of 448 values are NaN or infinite"):
        m(x, ids, scores)
