"""GPTQ of one weight: against a second implementation, by its properties, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import fp4gemm
import gptq_model
import numpy as np
import pytest
import torch
from fp4gemm.calibration import gptq
from fp4gemm.calibration.gptq import Factorization, rounded
from fp4gemm.reference.nvfp4 import folded
from torch import Tensor


def operands(n: int, k: int, gen: torch.Generator, tokens: int = 0) -> tuple[Tensor, Tensor]:
    """A weight (n, k) with outliers, and the second moment of inputs that are correlated."""
    w = torch.randn(n, k, generator=gen) * torch.randn(n, k, generator=gen).abs().sqrt()
    x = torch.randn(tokens or 3 * k, k, generator=gen)
    x = x + 0.4 * (x @ torch.randn(k, k, generator=gen)) / 4
    return w, x.T @ x / x.shape[0]


def loss(q: Tensor, w: Tensor, h: Tensor) -> float:
    d = (q - w).double()
    return float(((d @ h.double()) * d).sum())


def same(a: fp4gemm.NVFP4Tensor, b: fp4gemm.NVFP4Tensor) -> bool:
    scales = (t.scales.view(torch.uint8) for t in (a, b))
    return torch.equal(a.codes, b.codes) and torch.equal(*scales) and torch.equal(a.amax, b.amax)


@pytest.mark.parametrize("block_order", ["natural", "importance"])
def test_the_second_implementation_agrees(block_order: Any, gen: torch.Generator) -> None:
    """float64 against float32: all but a few rows, in which a value lies between two codes, are equal."""
    w, h = operands(24, 80, gen)
    made = gptq(w, h, block_order=block_order)
    means = h.diagonal().view(-1, 16).mean(1)
    order = list(range(5)) if block_order == "natural" else means.argsort(descending=True).tolist()
    want, codes = gptq_model.gptq(w, h, 0.01, order)
    values, scales = made.dequantize(torch.float32), made.compact_scales().view(torch.uint8)
    equal = (np.abs(values.numpy() - want) <= 1e-5 * np.abs(want)).all(1)
    equal &= (scales.numpy() == codes).all(1)
    assert equal.mean() >= 0.9
    total = loss(values, w, h)
    assert abs(total / loss(torch.from_numpy(want).float(), w, h) - 1) < 0.02


def test_exact_on_a_diagonal_moment(gen: torch.Generator) -> None:
    """Without correlations no error moves on: each block has the scale of the least weighted error."""
    w = torch.randint(-8, 9, (16, 64), generator=gen).float()
    h = torch.diag(torch.randint(1, 5, (64,), generator=gen).float())
    made = gptq(w, h, damping=0.0)
    want, codes = gptq_model.gptq(w, h, 0.0, list(range(4)))
    assert np.array_equal(made.compact_scales().view(torch.uint8).numpy(), codes)
    assert torch.allclose(made.dequantize(torch.float32).double(), torch.from_numpy(want), rtol=1e-6)


def test_it_is_better_than_rounding(gen: torch.Generator) -> None:
    w, h = operands(64, 128, gen)
    plain, four = fp4gemm.quantize(w), fp4gemm.quantize(w, four_over_six="mse")
    least = min(loss(t.dequantize(torch.float32), w, h) for t in (plain, four))
    for options in ({}, {"scaling": "tensor"}, {"block_order": "importance"}, {"damping": 0.1}):
        assert loss(gptq(w, h, **options).dequantize(torch.float32), w, h) < 0.8 * least, options


@pytest.mark.parametrize("outliers", [False, True], ids=["random", "outliers"])
def test_an_fp8_operand_loses_less_as_one(outliers: bool, gen: torch.Generator) -> None:
    """The FP8 values that FP8 tokens are multiplied by are closer to w; the NVFP4 values little farther."""
    w, h = operands(96, 256, gen)
    if outliers:
        w[:, ::37] *= 20
        w[::9] *= torch.randn(256, generator=gen).exp()
    losses = []
    for fp8_operand in (False, True):
        made = gptq(w, h, fp8_operand=fp8_operand)
        assert made.e4m3_max == 256
        values, unit = made.dequantize(torch.float32), made.amax[:, None] / 1536
        losses.append([loss(each, w, h) for each in (values, folded(values / unit) * unit)])
    (own, fp8), (own_aware, fp8_aware) = losses
    assert fp8_aware < 0.97 * fp8
    assert own <= own_aware < 1.08 * own
    assert own_aware + fp8_aware < own + fp8


def test_the_format_and_that_it_multiplies(device: torch.device, gen: torch.Generator) -> None:
    w, h = (t.to(device) for t in operands(32, 64, gen))
    for scaling, amax in (("row", w.abs().amax(1)), ("tensor", w.abs().amax().view(1))):
        made = gptq(w.to(torch.bfloat16), h, scaling=scaling)  # type: ignore[arg-type]
        assert (made.shape, made.dtype, made.e4m3_max) == (w.shape, torch.bfloat16, 256)
        assert torch.equal(made.amax, amax.to(torch.bfloat16).float())
        x = torch.randn(8, 64, generator=gen).to(device)
        product = fp4gemm.mm(fp4gemm.quantize(x), made, out_dtype=torch.float32)
        want = fp4gemm.quantize(x).dequantize(torch.float32) @ made.dequantize(torch.float32).T
        assert torch.allclose(product, want, rtol=1e-4, atol=1e-4)


def test_the_same_bits_again_and_rows_alone(gen: torch.Generator) -> None:
    w, h = operands(40, 64, gen)
    made = gptq(w, h)
    assert same(made, gptq(w.clone(), h.clone()))
    assert same(made, gptq(w, 4 * h))  # a power of two: the scale of h has no effect
    assert torch.equal(gptq(w[8:16], h).codes, made.codes[8:16])
    assert same(fp4gemm.concat([gptq(w[:16], h), gptq(w[16:], h)]), made)


def test_a_given_amax(gen: torch.Generator) -> None:
    """Weights that share an amax are rounded apart as they are together."""
    w, h = operands(48, 64, gen)
    both = gptq(w, h, scaling="tensor")
    for part in (slice(0, 16), slice(16, 48)):
        made = gptq(w[part], h, scaling="tensor", amax=both.amax)
        assert torch.equal(made.codes, both.codes[part])
        assert torch.equal(
            made.compact_scales().view(torch.uint8), both.compact_scales().view(torch.uint8)[part]
        )
    assert same(gptq(w, h, amax=w.abs().amax(1)), gptq(w, h))
    stack, moments = torch.stack([w, w]), torch.stack([h, h])
    assert same(gptq(stack, moments, scaling="tensor", amax=both.amax.expand(2, 1))[1], both)
    for amax, text in (
        (w.abs().amax(1), r"^amax: .*\(48,\).*\(1,\)"),
        (-both.amax, "^amax: has -[0-9.]+, must be finite and at least 0"),
        (both.amax / 0, "^amax: has inf, must be finite"),
    ):
        with pytest.raises(ValueError, match=text):
            gptq(w, h, scaling="tensor", amax=amax)


def test_factors_are_kept_for_an_equal_moment(gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v share a factor with the same result; another moment, damping or order is factored anew."""
    calls: list[int] = []
    real = torch.linalg.cholesky_ex
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda h: (calls.append(1), real(h))[1])
    (w, h), (other, g) = (operands(n, 64, gen) for n in (16, 40))
    kept = Factorization()
    for weight, moment, options, made_anew in (
        (w, h, {}, 1),
        (other, h.clone(), {}, 0),
        (w, h, {"damping": 0.1}, 1),
        (w, h, {"damping": 0.1, "block_order": "importance"}, 1),
        (other, h, {"damping": 0.1, "block_order": "importance"}, 0),
        (w, g, {}, 1),
        (w[:, :32], g[:32, :32], {}, 1),
    ):
        calls.clear()
        made = rounded(weight, moment, factorization=kept, **options)  # type: ignore[arg-type]
        assert len(calls) == made_anew
        want = rounded(weight, moment, **options)  # type: ignore[arg-type]
        assert same(made.weight, want.weight)
        assert made.damping == want.damping
    with pytest.raises(ValueError, match=r"^second_moment: 1 values are NaN or inf"):
        rounded(w, _set(h, torch.inf), factorization=kept)


def test_experts(gen: torch.Generator) -> None:
    """A stack is rounded matrix by matrix, in chunks too."""
    pairs = [operands(16, 64, gen) for _ in range(3)]
    weights, moments = (torch.stack(list(parts)) for parts in zip(*pairs, strict=True))
    made = gptq(weights, moments, block_order="importance")
    assert made.amax.shape == (3, 16)
    for e, (w, h) in enumerate(pairs):
        assert same(made[e], gptq(w, h, block_order="importance"))


def test_zeros_and_columns_without_input(gen: torch.Generator) -> None:
    w, h = operands(16, 64, gen)
    w[3], w[:, :16] = 0, 0
    h[20], h[:, 20] = 0, 0
    values = gptq(w, h).dequantize(torch.float32)
    assert torch.equal(values[3], torch.zeros(64))
    assert not values[:, :16].any()
    assert torch.isfinite(values).all()
    assert loss(values, w, h) < loss(fp4gemm.quantize(w).dequantize(torch.float32), w, h)


def test_more_damping_where_it_is_needed(gen: torch.Generator) -> None:
    w, _ = operands(16, 32, gen)
    h = -0.2 * torch.ones(32, 32) + 1.2 * torch.eye(32)  # the smallest eigenvalue is 1.2 - 6.4
    with pytest.raises(ValueError, match=r"^second_moment: is not positive definite with damping 1 either"):
        gptq(w, h)
    h = -0.05 * torch.ones(32, 32) + 1.05 * torch.eye(32)  # the smallest eigenvalue is -0.55
    text = r"^gptq: second_moment is not positive definite with damping 0.1; 1 was used$"
    with pytest.warns(UserWarning, match=text):
        gptq(w, h, damping=0.1)
    stack = torch.stack([torch.eye(32), h])
    with pytest.warns(UserWarning, match=r"^gptq: second_moment of expert 1 is not"):
        gptq(torch.stack([w, w]), stack)
    assert rounded(torch.stack([w, w]), stack).damping == (0.01, 1.0)


def _set(t: Tensor, value: float) -> Tensor:
    t = t.clone()
    t[..., 1, 1] = value
    return t


W, H = torch.ones(8, 32), torch.eye(32)
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "weight": ({"weight": [1]}, TypeError, "weight: got [1] (list), must be a torch.Tensor"),
    "weight-dtype": ({"weight": W.double()}, TypeError, "weight: dtype is torch.float64"),
    "weight-rank": ({"weight": W[0]}, ValueError, "weight: shape is (32,), must be (n, k) or (g, n, k)"),
    "weight-k": ({"weight": W[:, :24]}, ValueError, "weight: k is 24, must be a positive multiple of 16"),
    "weight-nan": ({"weight": _set(W, torch.nan)}, ValueError, "weight: 1 values are NaN or infinite"),
    "moment": ({"second_moment": 1}, TypeError, "second_moment: got 1 (int), must be a torch.Tensor"),
    "moment-dtype": ({"second_moment": H.half()}, TypeError, "second_moment: dtype is torch.float16"),
    "moment-shape": (
        {"second_moment": H[:16]},
        ValueError,
        "second_moment: shape is (16, 32), must be (32, 32)",
    ),
    "moment-inf": (
        {"second_moment": _set(H, torch.inf)},
        ValueError,
        "second_moment: 1 values are NaN or inf",
    ),
    "moment-sign": (
        {"second_moment": _set(H, -2.0)},
        ValueError,
        "its diagonal holds -2, must be at least 0",
    ),
    "moment-asymmetric": ({"second_moment": H + torch.ones(32, 32).triu(1)}, ValueError, "is not symmetric"),
    "moment-zero": (
        {"second_moment": 0 * H},
        ValueError,
        "must be the mean of x x^T of rows that are not all",
    ),
    "scaling": ({"scaling": "column"}, ValueError, "scaling: got 'column', must be 'row' or 'tensor'"),
    "fp8": ({"fp8_operand": 1}, TypeError, "fp8_operand: got 1 (int), must be True or False"),
    "damping": ({"damping": "1"}, TypeError, "damping: got '1' (str), must be a number"),
    "damping-range": ({"damping": -1.0}, ValueError, "damping: got -1.0, must be from 0 to 1"),
    "damping-nan": ({"damping": float("nan")}, ValueError, "damping: got nan, must be from 0 to 1"),
    "order": ({"block_order": "k"}, ValueError, "block_order: got 'k', must be 'natural' or 'importance'"),
}


@pytest.mark.parametrize(("change", "error", "text"), BAD.values(), ids=BAD)
def test_bad_input(change: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        gptq(**{"weight": W, "second_moment": H} | change)


@pytest.mark.gpu
def test_cuda_is_close_to_the_cpu(cuda: torch.device, gen: torch.Generator) -> None:
    w, h = operands(256, 512, gen)
    here, there = gptq(w, h), gptq(w.to(cuda), h.to(cuda))
    assert same(there, gptq(w.to(cuda), h.to(cuda)))
    values = there.dequantize(torch.float32).cpu()
    assert (values == here.dequantize(torch.float32)).float().mean() > 0.9
    assert abs(loss(values, w, h) / loss(here.dequantize(torch.float32), w, h) - 1) < 0.01
