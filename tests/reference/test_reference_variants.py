"""The variants of the reference's quantize against the second model, and the identities between them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import model
import model_quantize
import numpy as np
import pytest
import torch
from fp4gemm import layout, reference
from fp4gemm.ops import options as option_checks
from fp4gemm.reference import chunks, four_over_six
from helpers import FLOATS, KINDS, assert_bits, assert_parts, assert_same_value, make, make_codes, short
from model_quantize import Mode
from torch import Tensor
from variants import MODES, arguments

Parts = tuple[Tensor, Tensor, Tensor]

UNSPECIFIED = ("inf", "huge")  # kinds whose rotation overflows


def quantized(x: Tensor, mode: Mode, amax: Tensor | None = None, **more: Any) -> Parts:
    return reference.quantize(x, amax, **{**arguments(mode), **more})


def expected(x: Tensor, mode: Mode, amax: Tensor | None = None) -> Parts:
    """Codes, swizzled scales and amax of the second model."""
    codes, scales, found = model_quantize.quantize(
        x.float().numpy(), mode, None if amax is None else amax.numpy()
    )
    swizzled = torch.from_numpy(model.swizzle(scales)).view(torch.float8_e4m3fn)
    return torch.from_numpy(codes), swizzled, torch.from_numpy(found)


def odd_ones(kind: str, m: int, k: int, dtype: torch.dtype, gen: torch.Generator, nan: bool = True) -> Tensor:
    """An input of the kind with -0 and, where ``nan``, NaN in it."""
    x = make(kind, m, k, dtype, gen)
    x[3, ::5] = -0.0
    if nan:
        x[4, 7] = torch.nan
        x[5] = torch.nan
    return x


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_model(kind: str, mode: str, gen: torch.Generator) -> None:
    rotated = MODES[mode].rotation is not None
    if rotated and kind in UNSPECIFIED:
        pytest.skip("what a rotation makes of infinity is not specified")
    for dtype in FLOATS:
        x = odd_ones(kind, 37, 80, dtype, gen, nan=not rotated)
        assert_parts(quantized(x, MODES[mode]), expected(x, MODES[mode]), short(dtype))


@pytest.mark.parametrize("mode", MODES)
def test_columns_are_the_rows_of_the_transpose(mode: str, gen: torch.Generator) -> None:
    options = MODES[mode]
    for kind, (m, k) in itertools.product(("heavy", "row_ranges", "wide_blocks"), ((16, 16), (48, 144))):
        x = make(kind, m, k, torch.bfloat16, gen)
        got = quantized(x, options, axis=0)
        if options.tiles and options.adaptive:
            # Decided in the orientation of x: the transpose of its rows.
            codes, scales, amax = model_quantize.quantize(x.float().numpy(), options)
            nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(m, k).T
            want: Parts = (
                torch.from_numpy(nibbles[:, 0::2] | nibbles[:, 1::2] << 4),
                torch.from_numpy(model.swizzle(np.repeat(scales[::16].T, 16, axis=0))),
                torch.from_numpy(amax),
            )
            want = (want[0], want[1].view(torch.float8_e4m3fn), want[2])
        else:
            want = expected(x.t(), replace(options, offset=options.offset + 1))
        assert_parts(got, want, kind)
        if options.eden:  # for one direction alone
            continue
        both = reference.quantize_both(x, None, None, **arguments(options))
        rows = quantized(x, options, hadamard=0, signs=0)
        assert_parts(both, (*rows, *got), f"{kind}, both")


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.seed is None])
def test_given_amax(mode: str, gen: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given amaxes, extreme ones too, and NaN, which a GPU does not refuse. The result contains no amax."""
    monkeypatch.setattr(option_checks, "amax_values", lambda name, amax: None)
    options = MODES[mode]
    x = make("heavy", 48, 64, torch.float32, gen)
    x[:, 16:32] *= 1e-37  # blocks in which a huge S does not saturate
    for axis in (-1, 0):
        y = x if axis == -1 else x.t().contiguous()
        values = torch.tensor([1e3, 1e-3, 1.0, 0.0, torch.inf, torch.nan, 1e-38, 1e38])
        for amax in [values.repeat(y.shape[0] // 8)] if options.scaling == "row" else values.split(1):
            codes, scales, empty = quantized(x, options, amax, axis=axis)
            if axis == -1 or not (options.tiles and options.adaptive):
                want = expected(y, options, amax)
                assert_parts((codes, scales), want[:2], f"axis {axis}, amax {amax.tolist()}")
            assert empty.shape == (0,)
            assert empty.dtype is torch.float32


def test_given_amax_of_both(gen: torch.Generator) -> None:
    x = make("normal", 32, 48, torch.bfloat16, gen)
    amax, amax_t = torch.rand(32, generator=gen) * 4, torch.rand(48, generator=gen) * 4
    got = reference.quantize_both(x, amax, amax_t, True, hadamard=1, signs=3)
    want = (
        *reference.quantize(x, amax, True),
        *reference.quantize(x, amax_t, True, axis=0, hadamard=1, signs=3),
    )
    assert_parts(got, want)
    computed = reference.quantize(x, None, True)
    again = reference.quantize(x, computed[2], True)
    assert_parts(again[:2], computed[:2], "its own amax, given")


def test_per_token_codes_of_vanishing_blocks_are_zero() -> None:
    """If the block scale is 0, te saturates every nonzero element, and te_per_token makes it 0."""
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    x[0, 16:20] = torch.tensor([2e-6, -2e-6, 0.0, -0.0])
    te, _, _ = reference.quantize(x, None, True)
    per_token, scales, _ = reference.quantize(x, None, True, encode=1)
    assert te[0, 8:10].tolist() == [0xF7, 0x80]
    assert per_token[0, 8:10].tolist() == [0x80, 0x80]
    assert layout.unswizzle_scales(scales, 1, 2).float().tolist() == [[448.0, 0.0]]


def test_rotation_is_orthonormal(gen: torch.Generator) -> None:
    """H diag(sign) / 4 times its transpose is the unit matrix, and the popcount formula gives its entries."""
    for signs in (0, 0xD7E8, 0xFFFF):
        matrix = reference.hadamard.rotate(torch.eye(16), signs, True)
        want = [[(-1) ** ((r & c).bit_count() + (signs >> r & 1)) / 4 for c in range(16)] for r in range(16)]
        assert matrix.tolist() == want
        assert_bits(matrix @ matrix.t(), torch.eye(16), "product")


def test_tiles_share_their_scale(gen: torch.Generator) -> None:
    for adaptive in (0, 1, 2):
        x = make("wide_blocks", 40, 64, torch.bfloat16, gen)
        _, scales, _ = reference.quantize(x, None, False, block_rows=16, four_over_six=adaptive)
        compact = layout.unswizzle_scales(scales, 40, 4).view(torch.uint8)
        assert_bits(compact, compact[::16].repeat_interleave(16, dim=0)[:40], "scales")


def test_four_over_six_has_the_smaller_error(gen: torch.Generator) -> None:
    """No block has a larger error than when mapped to 6, and about a third of the blocks differ."""
    x = make("normal", 256, 512, torch.float32, gen)
    blocks = x.view(256, 32, 16)
    for norm in (1, 2):
        errors = []
        for parts in (
            reference.quantize(x, None, False, four_over_six=norm, e4m3_max=256),
            reference.quantize(x, None, False),
        ):
            bound = 256 if not errors else 448
            values = reference.dequantize(*parts, bound, torch.float32).view(256, 32, 16)
            errors.append(((values - blocks).abs() ** norm).sum().item())
        assert errors[0] < 0.97 * errors[1]


@pytest.mark.parametrize(
    ("norm", "bound", "fast"), list(itertools.product(("mae", "mse"), (448, 256), (False, True)))
)
def test_errors_of_four_over_six(norm: str, bound: int, fast: bool, gen: torch.Generator) -> None:
    """The errors of blocks, whose last bits decide few blocks, and their sums over tiles."""
    x = torch.randn(50, 4, 16, generator=gen)
    nibbles = torch.randint(0, 16, x.shape, generator=gen, dtype=torch.uint8)
    scales = (
        torch.randint(1, 0x7F, (50, 4), generator=gen, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    )
    amax = torch.rand(50, 1, generator=gen) * 9
    encode = 6 * bound / amax
    got = four_over_six.block_errors(
        nibbles,
        scales.unsqueeze(2),
        x,
        amax.unsqueeze(2),
        encode.unsqueeze(2),
        bound,
        norm == "mse",
        fast,
    )
    q = reference.decode_e2m1((nibbles[..., 0::2] | nibbles[..., 1::2] << 4).flatten(1))
    mode = Mode(adaptive=norm, bound=bound, fast_error=fast)
    want = model_quantize.block_errors(
        x.flatten(1).numpy(), q.numpy(), scales.numpy(), encode.numpy(), amax.numpy(), mode
    )
    assert_bits(got, torch.from_numpy(want), "errors")
    padded = np.concatenate([want, np.zeros((14, 4), np.float32)])
    tiles = model_quantize.folded([padded[r::16] for r in range(16)])
    assert_bits(four_over_six.tile_sums(got)[::16], torch.from_numpy(tiles), "sums of tiles")


MODES_OF_CHUNKS = ("row", "tiles", "mae-256-exact-tiles", "mse-448-fast-row", "stochastic-bf16")


@pytest.mark.parametrize("mode", MODES_OF_CHUNKS)
def test_chunks_do_not_show(mode: str, monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    x = make("row_ranges", 80, 64, torch.bfloat16, gen)
    options = arguments(MODES[mode])
    offs = None if MODES[mode].tiles else torch.tensor([7, 7, 70], dtype=torch.int32)
    whole = reference.quantize_both(x, None, None, **options)
    groups = reference.quantize(x, None, **options, offs=offs)
    values = reference.dequantize(*groups, 448, torch.float32, offs=offs)
    monkeypatch.setattr(chunks, "CHUNK_ELEMS", 64 * 7)
    assert_parts(reference.quantize_both(x, None, None, **options), whole)
    assert_parts(reference.quantize(x, None, **options, offs=offs), groups)
    assert_bits(reference.dequantize(*groups, 448, torch.float32, offs=offs), values, "values")


@pytest.mark.parametrize("mode", ["row", "per_token-row", "fp32-row", "mse-256-exact-row", "stochastic-row"])
def test_power_of_two_scaling_of_a_row(mode: str, gen: torch.Generator) -> None:
    x = make("normal", 40, 256, torch.float32, gen)
    factor = torch.ones(40, 1)
    factor[11] = 2.0**13
    codes, scales, amax = quantized(x, MODES[mode])
    assert_parts(quantized(x * factor, MODES[mode]), (codes, scales, amax * factor.flatten()))


@pytest.mark.parametrize("dtype", FLOATS, ids=short)
def test_compact_scales_dequantize_the_same(dtype: torch.dtype, gen: torch.Generator) -> None:
    for m, k in ((0, 32), (1, 16), (131, 80), (257, 272)):
        codes, scales, amax = reference.quantize(make("wide_blocks", m, k, torch.float32, gen), None, True)
        compact = layout.unswizzle_scales(scales, m, k // 16)
        want = reference.dequantize(codes, scales, amax, 448, dtype)
        assert_bits(reference.dequantize(codes, compact, amax, 448, dtype, swizzled=False), want, "values")


def test_padding_of_scales_is_never_read(gen: torch.Generator) -> None:
    m, k = 131, 80
    x = make("normal", m, k, torch.bfloat16, gen)
    padding = torch.ones((256, 8), dtype=torch.bool)
    padding[:m, :5] = False
    where = layout.swizzle_scales(padding.to(torch.uint8)).bool()
    codes, scales, amax = reference.quantize(x, None, True)
    assert not scales.view(torch.uint8)[where].any()
    dirty = scales.view(torch.uint8).masked_fill(where, 0x7F).view(torch.float8_e4m3fn)
    want = reference.dequantize(codes, scales, amax, 448, torch.float32)
    assert_bits(reference.dequantize(codes, dirty, amax, 448, torch.float32), want, "values")
    assert_bits(reference.decode(codes, dirty), reference.decode(codes, scales), "decoded")


def test_dequantize_of_nan_scales_and_amax(gen: torch.Generator) -> None:
    """NaN scales and amaxes make their rows NaN, and an infinite amax times 0 is NaN."""
    codes = make_codes(3, 32, gen)
    scales = torch.full((3, 2), 0x38, dtype=torch.uint8)
    scales[0, 1] = 0x7F
    amax = torch.tensor([1.0, torch.inf, torch.nan])
    want = model.dequantize(codes, layout.swizzle_scales(scales), amax, 448)
    got = reference.dequantize(codes, scales, amax, 448, torch.float32, swizzled=False)
    assert_same_value(got, torch.from_numpy(want), "values")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["per_token-row", "per_token-tensor", "fp32-row", "bf16-tensor", "fp32-per_token"]
)
def test_millions(mode: str) -> None:
    """Millions of ordinary values, in the variants that TransformerEngine's reference lacks."""
    gen = torch.Generator().manual_seed(11)
    for dtype, kind in itertools.product((torch.bfloat16, torch.float32), ("normal", "heavy")):
        x = make(kind, 512, 1024, dtype, gen)
        assert_parts(quantized(x, MODES[mode]), expected(x, MODES[mode]), f"{kind} {dtype}")
