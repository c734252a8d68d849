"""The encode "eden": the bits of the reference, random signs, and errors that average out."""

from __future__ import annotations

import math
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import reference
from fp4gemm.ops.options import DRAWN_SIGNS, SIGNS
from fp4gemm.reference import eden
from fp4gemm.reference.hadamard import rotate
from helpers import FLOATS, assert_bits, assert_parts, make, short
from modes import EDEN, Mode, by_name, expected, parts, quantize
from torch import Tensor

SHAPES = [
    (1, 16),
    (7, 48),
    (33, 80),
    (129, 144),
    (16, 16),
    (48, 80),
    (144, 272),
    (128, 512),
    (160, 2080),
    (2, 8208),
]
OPTIONS: dict[str, Any] = {"encode": "eden", "hadamard": "fp32", "stochastic": True}
MODE = pytest.mark.parametrize("mode", EDEN, ids=by_name)


def state(seed: int, offset: int = 0, device: torch.device | None = None) -> Tensor:
    return torch.tensor([seed, offset], device=device)


def unrotated(t: fp4gemm.NVFP4Tensor, given: Tensor) -> Tensor:
    """The values of t in float64, rotated back."""
    bits = int(eden.drawn_signs(given.cpu())) ^ SIGNS
    signs = 1 - 2 * (bits >> torch.arange(16) & 1)
    values = t.dequantize(torch.float32).cpu()
    return (rotate(values.view(-1, 16), 0, False) * signs).view(values.shape).double()


@MODE
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_equals_reference(mode: Mode, dtype: torch.dtype, device: torch.device, gen: torch.Generator) -> None:
    for i, (m, k) in enumerate(SHAPES):
        x = make(("row_ranges", "wide_blocks", "heavy")[i % 3], m, k, dtype, gen)
        for axis in (-1, 0) if m % 16 == 0 else (-1,):
            t = quantize(x, mode, device, axis=axis)
            assert_parts(parts(t), expected(x, mode, axis), f"{m}x{k} axis {axis}")
            assert t.e4m3_max == 256
            assert t.hadamard_signs == mode.options["hadamard_signs"] | DRAWN_SIGNS


@MODE
def test_groups(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    """Few rows in each group, which one kernel quantizes, and many; empty groups, and rows of no group."""
    for m, k, ends in ((100, 96, [0, 30, 30, 77]), (5, 1040, [2, 5]), (600, 144, [513, 520, 600])):
        x, offs = make("heavy", m, k, torch.bfloat16, gen), torch.tensor(ends, dtype=torch.int32)
        for axis in (-1, 0):
            t = quantize(x, mode, device, axis=axis, offs=offs)
            assert_parts(parts(t), expected(x, mode, axis, offs=offs), f"{m}x{k} axis {axis}")


@MODE
@pytest.mark.parametrize("axis", [-1, 0])
def test_decoded_and_given_amaxes(mode: Mode, axis: int, device: torch.device, gen: torch.Generator) -> None:
    """A given amax that is smaller than that of x saturates scales at 448; one that is larger does not."""
    x = make("wide_blocks", 64, 96, torch.bfloat16, gen)
    t = quantize(x, mode, device, axis=axis)
    decoded = fp4gemm.quantize(x.to(device), axis=axis, decoded=True, **mode.on(device))
    assert_bits(decoded.data, fp4gemm.decode(t).data, "decoded")
    assert decoded.hadamard_signs == t.hadamard_signs
    for factor in (0.01, 4.0, 0.0, 1e-36, math.inf):
        amax = t.amax.cpu() * factor if factor < math.inf else torch.full_like(t.amax.cpu(), math.inf)
        given = quantize(x, mode, device, axis=axis, amax=amax)
        assert_parts(parts(given), expected(x, mode, axis, amax), f"amax times {factor}")


@MODE
def test_unusual_rows(mode: Mode, device: torch.device, gen: torch.Generator) -> None:
    """Zeros, a block of zeros, NaN, and amaxes beyond those of the fast path."""
    x = make("normal", 32, 64, torch.float32, gen)
    x[0], x[1, 16:32], x[2, 5] = 0.0, 0.0, torch.nan
    x[3] *= 1e-37
    if mode.arguments["per_row"]:
        x[4] *= 1e33
    t = quantize(x, mode, device)
    assert_parts(parts(t), expected(x, mode))
    assert (t.compact_scales().float()[1].cpu()[1] == 0).all()


def test_stacks(device: torch.device, gen: torch.Generator) -> None:
    w = torch.stack([make("normal", 32, 64, torch.bfloat16, gen) for _ in range(3)]).to(device)
    for axis in (-1, 0):
        for scaling in ("row", "tensor"):
            t = fp4gemm.quantize(w, scaling=scaling, axis=axis, rng_state=state(5, 7, device), **OPTIONS)
            for e in range(3):
                one = fp4gemm.quantize(
                    w[e], scaling=scaling, axis=axis, rng_state=state(5, 7 + 2 * e, device), **OPTIONS
                )
                assert_parts(parts(t[e]), parts(one), f"matrix {e} axis {axis} {scaling}")


def test_signs_follow_the_seed_alone(device: torch.device, gen: torch.Generator) -> None:
    """Products of operands of one seed are those of the originals, with any offsets and directions."""
    a, b = (make("normal", 96, 512, torch.float32, gen) for _ in range(2))
    want = a.double() @ b.double().T
    errors = []
    for seed_b in (123, 124):
        left = fp4gemm.quantize(a.to(device), rng_state=state(123, 1, device), **OPTIONS)
        right = fp4gemm.quantize(
            b.T.contiguous().to(device), axis=0, rng_state=state(seed_b, 2, device), **OPTIONS
        )
        got = fp4gemm.mm(left, right, out_dtype=torch.float32).cpu().double()
        errors.append(float((got - want).norm() / want.norm()))
    assert errors[0] < 0.16 < 0.5 < errors[1]
    drawn = {int(eden.drawn_signs(state(seed))) for seed in range(1000)}
    assert len(drawn) > 980
    assert min(drawn) >= 0
    assert max(drawn) <= 0xFFFF


def test_operands_are_rotated_alike_or_refused(device: torch.device, gen: torch.Generator) -> None:
    x = make("normal", 32, 64, torch.bfloat16, gen).to(device)
    t = fp4gemm.quantize(x, rng_state=state(1, device=device), **OPTIONS)
    for other in (fp4gemm.quantize(x), fp4gemm.quantize(x, hadamard="fp32")):
        with pytest.raises(ValueError, match=r"^b: hadamard_signs is .*, must be 0x1d7e8 \(with signs drawn"):
            fp4gemm.mm(t, other)


def test_scales_are_rounded_up_with_their_fraction() -> None:
    """Of 2^20 random numbers, as many round a scale up as its fraction says; e4m3 numbers stay."""
    words = torch.arange(2**20)
    for value in (2.0**-9 * 0.9, 2.0**-9 * 1.7, 2.0**-6 * 0.99, 0.02, 1.0, 1.01, 3.3, 100.0, 255.0):
        # A block with one element y, whose amax is A: z is y, n / d is z / q, and c is s * z / q.
        y = torch.zeros(1, 1, 16)
        y[..., 0] = 6 * value
        encode = torch.ones(1, 1)
        made = eden.quantize_blocks(
            y.expand(1, 2**20, 16), y.abs().amax(2).expand(1, 2**20), encode, words.unsqueeze(0)
        )[1].float()
        lower, upper = float(made.min()), float(made.max())
        got = float(made.double().mean())
        assert lower <= value * (1 + 1e-6)
        assert upper >= value * (1 - 1e-6)
        assert got == pytest.approx(value, rel=2**-20), value
        codes = reference.encode_e4m3(torch.tensor([lower, upper])).view(torch.uint8).tolist()
        assert codes[1] - codes[0] in (0, 1)


def mean_errors(x: Tensor, cast: Any, draws: tuple[int, ...]) -> list[float]:
    """|mean of the first n results - x| / |x| for each n of draws."""
    total, found = torch.zeros(x.shape, dtype=torch.float64), []
    for i in range(draws[-1]):
        total += cast(i)
        if i + 1 in draws:
            found.append(float((total / (i + 1) - x).norm() / x.double().norm()))
    return found


def test_the_mean_of_draws_tends_to_x(device: torch.device, gen: torch.Generator) -> None:
    """The error of the mean of n draws falls as 1 / sqrt(n), that of codes to nearest does not.

    Rounding codes stochastically is biased by scales that are rounded down, so that it falls less.
    """
    x = torch.randn(64, 512, generator=gen)
    own = x.to(device)
    states = [torch.randint(-(2**63), 2**63 - 1, (2,), generator=gen) for _ in range(256)]

    def corrected(i: int) -> Tensor:
        given = states[i]
        return unrotated(fp4gemm.quantize(own, rng_state=given.to(device), **OPTIONS), given)

    def stochastic(i: int) -> Tensor:
        t = fp4gemm.quantize(own, stochastic=True, rng_state=states[i].to(device))
        return t.dequantize(torch.float32).cpu().double()

    nearest = fp4gemm.quantize(own).dequantize(torch.float32).cpu().double()
    found = {
        "eden": mean_errors(x, corrected, (1, 16, 256)),
        "stochastic": mean_errors(x, stochastic, (1, 16, 256)),
        "nearest": mean_errors(x, lambda _: nearest, (1, 16, 256)),
    }
    slope = {name: math.log(e[2] / e[0]) / math.log(256) for name, e in found.items()}
    assert -0.5 < slope["eden"] < -0.45, found
    assert -0.45 < slope["stochastic"] < -0.3, found
    assert slope["nearest"] == pytest.approx(0.0, abs=1e-12)
    assert found["eden"][0] ** 2 < 0.55 * found["stochastic"][0] ** 2, "the squared error of one draw"


def test_the_projection_on_x_is_exact_but_for_the_rounding_of_scales(gen: torch.Generator) -> None:
    """dot(x^, x) / dot(x, x) is 1 on average: also of numbers with outliers, and where x is tiny."""
    for scale in (1.0, 2.0**-100):
        x = make("heavy", 256, 512, torch.float32, gen) * scale
        share = 0.0
        for seed in range(8):
            given = state(seed * 7919)
            values = unrotated(fp4gemm.quantize(x, rng_state=given, **OPTIONS), given) / scale
            share += float((values * (x / scale)).sum() / (x / scale).double().square().sum()) / 8
        assert share == pytest.approx(1.0, abs=1e-3)
