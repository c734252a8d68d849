"""Stochastic rounding: Philox's known answers, the exact distribution over all bytes, and the stream."""

from __future__ import annotations

import model
import model_quantize
import pytest
import torch
from fp4gemm import reference
from fp4gemm.reference.formats import encode_e2m1_stochastic
from fp4gemm.reference.philox import philox4x32, random_bytes
from helpers import assert_bits, make

ALL_BYTES = torch.arange(256)
STEPS = ((0.0, 0.5), (0.5, 0.5), (1.0, 0.5), (1.5, 0.5), (2.0, 1.0), (3.0, 1.0), (4.0, 2.0))  # lower, width


@pytest.mark.parametrize(
    ("seed", "sequence", "offset", "words"),
    [
        (0, 0, 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (1234, 5, 7, "78352b63 8fb42772 2160d7ea 7f6082ea"),
        # From the known answers of Random123, whose counters and keys are all ones, then digits of pi.
        (2**64 - 1, 2**64 - 1, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            0x299F31D0_A4093822,
            0x03707344_13198A2E,
            0x85A308D3_243F6A88,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zero", "small", "ones", "pi"],
)
def test_philox_known_answers(seed: int, sequence: int, offset: int, words: str) -> None:
    counter = [offset % 2**32, offset >> 32, sequence % 2**32, sequence >> 32]
    key = [seed % 2**32, seed >> 32]
    want = [int(word, 16) for word in words.split()]
    got = philox4x32(tuple(torch.tensor(counter)), tuple(torch.tensor(key)))  # type: ignore[arg-type]
    assert [word.item() for word in got] == want
    assert list(model_quantize.philox(tuple(counter), tuple(key))) == want  # type: ignore[arg-type]


def test_bytes_of_a_block_are_those_of_its_draw() -> None:
    """Sequence 5 is block 1 of row 2, with two blocks in a row; element i has byte i % 4 of word i // 4."""
    got = random_bytes(torch.tensor([1234, 7]), 0, 2, 3, 2)[0, 1]
    words = "78352b63", "8fb42772", "2160d7ea", "7f6082ea"
    assert bytes(got.tolist()) == b"".join(bytes.fromhex(word)[::-1] for word in words)


@pytest.mark.parametrize(
    ("seed", "offset"), [(0, 0), (-1, -1), (2**63 - 1, 2**63 - 1), (-(2**63), 2**32 - 1)], ids=str
)
@pytest.mark.parametrize("advance", [0, 1])
def test_bytes_equal_model(seed: int, offset: int, advance: int) -> None:
    """All 64 bits of seed and offset count, and the offset wraps around."""
    got = random_bytes(torch.tensor([seed, offset]), advance, 1, 4, 3).view(3, 48)
    want = model_quantize.random_bytes(seed, offset + advance, 4, 3)[1:]
    assert got.tolist() == want.tolist()


@pytest.mark.parametrize(("lower", "width"), STEPS, ids=str)
def test_exact_distribution_in_each_interval(lower: float, width: float) -> None:
    """floor(256 f) of the 256 bytes round up, for f = i / 1024 and next to i / 256, with both signs."""
    f = torch.arange(1024) / 1024
    x = lower + f * width
    near = torch.cat([torch.nextafter(x, torch.tensor(0.0)), torch.nextafter(x, torch.tensor(9.0))])
    x = torch.cat([x, near[(near >= lower) & (near < lower + width)]])
    fraction = (x.double() - lower) / width
    want = (256 * fraction).floor()
    low, high = (model.encode_e2m1(torch.tensor([v]).numpy())[0] for v in (lower, lower + width))
    for sign in (1.0, -1.0):
        code = encode_e2m1_stochastic((x * sign).unsqueeze(1).expand(-1, 256), ALL_BYTES.expand(len(x), -1))
        assert bool((code >> 3 == (sign < 0)).all())
        magnitude = code & 7
        assert bool(((magnitude == low) | (magnitude == high)).all())
        assert_bits((magnitude == high).sum(1), want.long(), "number of bytes that round up")
        # So the mean magnitude is at most the exact one, and less than 1/256 of a step below it.
        bias = fraction - want / 256
        assert 0 <= bias.min().item() <= bias.max().item() < 1 / 256


def test_corners() -> None:
    corners = torch.tensor([0.0, -0.0, 6.0, -6.0, 6.5, 1e38, torch.inf, -torch.inf, torch.nan, -torch.nan])
    for byte in (0, 255):
        random = torch.full_like(corners, byte, dtype=torch.int64)
        assert encode_e2m1_stochastic(corners, random).tolist() == [0, 8, 7, 15, 7, 7, 7, 15, 7, 7]
    tiny = torch.tensor([2.0**-149, -(2.0**-149), 0.5 / 256 - 2e-10, 0.5 / 256, 5.999999])
    assert encode_e2m1_stochastic(tiny, torch.full((5,), 255)).tolist() == [0, 8, 0, 1, 7]
    assert encode_e2m1_stochastic(tiny, torch.zeros(5, dtype=torch.int64)).tolist() == [0, 8, 0, 0, 6]


def test_codes_of_the_grid_do_not_move() -> None:
    grid = torch.tensor([*reference.formats.E2M1_VALUES]).unsqueeze(1).expand(-1, 256)
    codes = encode_e2m1_stochastic(grid, ALL_BYTES.expand(16, -1))
    assert codes.tolist() == [[code] * 256 for code in range(16)]


@pytest.mark.parametrize("axis", [-1, 0], ids=["rows", "columns"])
def test_mean_of_many_draws(axis: int, gen: torch.Generator) -> None:
    """Means of dequantized draws are below x in magnitude by at most step / 256 plus five standard errors."""
    x = (torch.rand(16, 64, generator=gen) * 5 + 0.5) * torch.where(
        torch.rand(16, 64, generator=gen) < 0.5, -1, 1
    )
    x[0, 0] = 6.0 * 448  # this value decides the amax; other scales are powers of two times 448 / 6
    draws = 1500
    total = torch.zeros(16, 64) if axis == -1 else torch.zeros(64, 16)
    amax = torch.tensor([6.0 * 448])
    for draw in range(draws):
        state = torch.tensor([2024, 10 * draw])
        parts = reference.quantize(x, amax, False, axis=axis, rng_state=state)
        total += reference.dequantize(*parts[:2], amax, 448, torch.float32)
    mean = total / draws if axis == -1 else (total / draws).t()
    _, scales, _ = reference.quantize(x, amax, False, axis=axis)
    ones = torch.full((x.numel() // 2,), 0x22, dtype=torch.uint8).view_as(parts[0])
    scale = reference.dequantize(ones, scales, amax, 448, torch.float32)
    scale = scale if axis == -1 else scale.t()
    inside = x.abs() < 6 * scale  # larger values saturate
    step = 2 * scale  # the widest
    error = (mean - x) * x.sign()
    noise = 5 * step / 2 / draws**0.5
    assert int(inside.sum()) > 900
    assert bool((error <= noise)[inside].all())
    assert bool((error >= -step / 256 - noise)[inside].all())
    # Averaged over all elements the noise is small.
    assert abs((error / scale)[inside].mean().item()) < 2 / 256


def test_scales_and_amax_are_those_of_rounding_to_nearest(gen: torch.Generator) -> None:
    x = make("wide_blocks", 48, 80, torch.bfloat16, gen)
    state = torch.tensor([3, 4])
    for axis in (-1, 0):
        plain = reference.quantize(x, None, True, axis=axis)
        random = reference.quantize(x, None, True, axis=axis, rng_state=state)
        assert_bits(random[1], plain[1], "scales")
        assert_bits(random[2], plain[2], "amax")
        assert not torch.equal(random[0], plain[0])


def test_state_decides_alone(gen: torch.Generator) -> None:
    """The same state gives the same codes, another one others; columns draw as rows at offset + 1."""
    x = make("normal", 48, 48, torch.bfloat16, gen)

    def codes(seed: int, offset: int, x: torch.Tensor = x, axis: int = -1) -> torch.Tensor:
        state = torch.tensor([seed, offset])
        result = reference.quantize(x, None, False, axis=axis, rng_state=state)[0]
        assert state.tolist() == [seed, offset], "the state is read only"
        return result

    base = codes(1, 2)
    assert_bits(codes(1, 2), base, "codes")
    for seed, offset in ((2, 2), (1, 3), (1 + 2**32, 2), (1, 2 + 2**32)):
        assert not torch.equal(codes(seed, offset), base)
    assert_bits(codes(1, 2, x, axis=0), codes(1, 3, x.t().contiguous()), "codes of columns")
