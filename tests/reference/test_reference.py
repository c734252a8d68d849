"""The reference against a second model in numpy, golden vectors, and the edges of the formats."""

from __future__ import annotations

import math
import struct
from typing import Any

import fp4gemm
import model
import model_quantize
import numpy as np
import pytest
import torch
from fp4gemm import reference
from fp4gemm.reference import chunks
from helpers import FLOATS, KINDS, TIES, assert_bits, make, make_codes, make_scales, short

GOLDEN_ROWS = torch.tensor(
    [
        [0.0, -0.0, 0.1, -0.3, 0.5, -0.7, 0.9, 1.1, -1.3, 1.7, 2.2, -2.6, 3.1, 4.4, -5.2, 7.0],
        [1e-3] * 8 + [-2e-3] * 8,
    ]
).to(torch.bfloat16)
GOLDEN_CODES = "809091223ac4657e", "55555555ffffffff"


def f32(bits: int) -> float:
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def row(*head: float, fill: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A row of 32 elements: the given values, then ``fill``."""
    return torch.tensor([[*head] + [fill] * (32 - len(head))], dtype=torch.float64).to(dtype)


def unpack(codes: torch.Tensor) -> list[int]:
    return torch.stack([codes & 15, codes >> 4], dim=-1).flatten().tolist()


GOLDEN_CODES_256 = "809091223ac4657e", "44444444eeeeeeee"


@pytest.mark.parametrize(
    ("options", "amax", "scales", "codes"),
    [
        ({"scaling": "tensor"}, [7.0], [0x7E, 0x20], GOLDEN_CODES),
        ({"scaling": "row"}, [7.0, 262 / 2**17], [0x7E, 0x7E], GOLDEN_CODES),
        ({"scaling": "tensor", "four_over_six": "mae"}, [7.0], [0x78, 0x1E], GOLDEN_CODES_256),
        (
            {"scaling": "tensor", "four_over_six": "mse", "e4m3_max": 448},
            [7.0],
            [0x7E, 0x20],
            GOLDEN_CODES,
        ),
    ],
    ids=["tensor", "row", "mae-256", "mse-448"],
)
def test_golden_vectors(
    options: dict[str, Any],
    amax: list[float],
    scales: list[int],
    codes: tuple[str, str],
    device: torch.device,
) -> None:
    t = fp4gemm.quantize(GOLDEN_ROWS.to(device), **options)
    assert [bytes(row.tolist()).hex() for row in t.codes] == list(codes)
    assert t.compact_scales().view(torch.uint8).flatten().tolist() == scales
    assert t.amax.tolist() == amax


@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
@pytest.mark.parametrize("dtype", FLOATS, ids=short)
@pytest.mark.parametrize("kind", KINDS)
def test_quantize_equals_numpy_model(
    kind: str, dtype: torch.dtype, per_row: bool, gen: torch.Generator
) -> None:
    x = make(kind, 65, 208, dtype, gen)
    x[3, ::5] = -0.0
    x[4, 7] = torch.nan
    x[5] = torch.nan
    codes, scales, amax = reference.quantize(x, None, per_row)
    mode = model_quantize.Mode("row" if per_row else "tensor")
    want_codes, want_scales, want_amax = model_quantize.quantize(x.float().numpy(), mode)
    assert_bits(amax, torch.from_numpy(want_amax), "amax")
    assert_bits(
        fp4gemm.unswizzle_scales(scales, 65, 13).view(torch.uint8), torch.from_numpy(want_scales), "scales"
    )
    assert_bits(codes, torch.from_numpy(want_codes), "codes")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_e2m1_of_every_16_bit_value(dtype: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    assert_bits(reference.encode_e2m1(x), torch.from_numpy(model.encode_e2m1(x.numpy())), "codes")


def test_e2m1_around_every_tie() -> None:
    """The 64 float32 neighbours on both sides of each midpoint: only the midpoint itself is a tie."""
    steps = torch.arange(-64, 65, dtype=torch.int32)
    middle = torch.tensor(TIES).view(torch.int32).unsqueeze(1)
    x = (middle + steps).view(torch.float32).flatten()
    x = torch.cat([x, -x])
    assert_bits(reference.encode_e2m1(x), torch.from_numpy(model.encode_e2m1(x.numpy())), "codes")


def test_e2m1_ties_go_to_the_even_code() -> None:
    assert reference.encode_e2m1(torch.tensor(TIES)).tolist() == [0, 2, 2, 4, 4, 6, 6]
    assert reference.encode_e2m1(-torch.tensor(TIES)).tolist() == [8, 10, 10, 12, 12, 14, 14]


def test_e2m1_corners() -> None:
    corners = torch.tensor([0.0, -0.0, -0.1, 1e-45, -1e-45, 6.5, 1e38, torch.inf, -torch.inf, torch.nan])
    assert reference.encode_e2m1(corners).tolist() == [0, 8, 8, 0, 8, 7, 7, 7, 15, 7]
    negative_nan = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
    assert reference.encode_e2m1(negative_nan).tolist() == [7]


def test_e2m1_decodes_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = reference.decode_e2m1(codes)
    assert_bits(got, torch.from_numpy(model.decode_codes(codes.numpy())).float(), "values")
    assert got[0, :2].tolist() == [0.0, 0.0]
    assert got[0, 2:4].tolist() == [0.5, 0.0], "the low nibble is the even element"
    assert math.copysign(1, got[0, 16].item()) == -1, "code 8 is -0"


def test_e4m3_corners() -> None:
    x = torch.tensor(
        [2.0**-10, f32(0x3A800001), 17.0, 19.0, 447.9, 448.0, 464.0, 465.0, 1e30, torch.inf, 0.0]
    )
    want = [0x00, 0x01, 0x58, 0x5A, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x00]
    assert reference.encode_e4m3(x).view(torch.uint8).tolist() == want


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=short)
def test_e4m3_of_every_positive_16_bit_value(dtype: torch.dtype) -> None:
    x = torch.arange(32768, dtype=torch.int16).view(dtype).float()
    x = x[~x.isnan()]
    assert_bits(
        reference.encode_e4m3(x).view(torch.uint8), torch.from_numpy(model.encode_e4m3(x.numpy())), "bytes"
    )


def test_e4m3_around_every_midpoint() -> None:
    values = model.e4m3_values()[:127]
    middle = torch.from_numpy((values[1:] + values[:-1]) / 2).float().view(torch.int32).unsqueeze(1)
    x = (middle + torch.arange(-8, 9, dtype=torch.int32)).view(torch.float32).flatten()
    assert_bits(
        reference.encode_e4m3(x).view(torch.uint8), torch.from_numpy(model.encode_e4m3(x.numpy())), "bytes"
    )


def test_infinity() -> None:
    """A = inf gives S = 1: the block with inf has scale 448, and the other blocks are cast unscaled."""
    x = row(torch.inf, -torch.inf, 448.0 * 3, -1.0, fill=6.0)
    codes, scales, amax = reference.quantize(x, None, True)
    assert amax.tolist() == [torch.inf]
    assert fp4gemm.unswizzle_scales(scales, 1, 2).float().tolist() == [[448.0, 1.0]]
    assert unpack(codes)[:4] == [7, 15, 5, 8]
    assert unpack(codes)[16:] == [7] * 16


def test_zero_row_and_signs_of_zero() -> None:
    codes, scales, amax = reference.quantize(row(0.0, -0.0, 0.0, -0.0), None, True)
    assert unpack(codes)[:4] == [0, 8, 0, 8]
    assert amax.tolist() == [0.0]
    assert not scales.view(torch.uint8).any()
    assert not reference.dequantize(codes, scales, amax, 448, torch.float32).any()


def test_block_scale_underflow() -> None:
    """a_b below 2.18e-6 A gives scale 0 and, as the factor is FMAX, codes of +-6; all decode to 0."""
    x = row(1.0, fill=0.0)
    x[0, 16:20] = torch.tensor([2e-6, -2e-6, 0.0, -0.0])
    codes, scales, amax = reference.quantize(x, None, True)
    assert fp4gemm.unswizzle_scales(scales, 1, 2).float().tolist() == [[448.0, 0.0]]
    assert unpack(codes)[16:20] == [7, 15, 0, 8]
    assert not reference.dequantize(codes, scales, amax, 448, torch.float32)[0, 16:].any()


def test_denormals_are_kept() -> None:
    """A row of the least float32 denormal: S is FMAX, and the stored amax is the denormal itself."""
    codes, scales, amax = reference.quantize(row(f32(1), -f32(1)), None, True)
    assert amax.tolist() == [f32(1)]
    t = fp4gemm.quantize(row(*[2.0**-130] * 32), scaling="row")
    same = np.full((1, 32), 2.0**-130, np.float32)
    want_codes, want_scales, _ = model_quantize.quantize(same, model_quantize.Mode("row"))
    assert t.codes.flatten().tolist() == want_codes.flatten().tolist()
    assert t.compact_scales().view(torch.uint8).flatten().tolist() == want_scales.flatten().tolist()
    assert want_scales.any(), "2^-130 is not below the least scale of its row"
    assert unpack(codes)[:2] == [0, 8]
    assert not scales.view(torch.uint8).any()


def test_nan_is_ignored_by_amax_and_becomes_code_7() -> None:
    x = row(torch.nan, 3.0, -1.5, fill=0.5)
    codes, _, amax = reference.quantize(x, None, True)
    assert amax.tolist() == [3.0]
    assert unpack(codes)[:3] == [7, 7, 13]
    codes, scales, amax = reference.quantize(torch.full((1, 32), -torch.nan), None, False)
    assert amax.tolist() == [0.0]
    assert unpack(codes) == [7] * 32
    assert not scales.view(torch.uint8).any()


def test_constants_have_the_specified_bits() -> None:
    one = torch.tensor(1.0)
    for divisor, want in ((6, 0x3E2AAAAB), (2688, 0x39C30C31), (1536, 0x3A2AAAAB)):
        assert torch.div(one, torch.tensor(float(divisor))).view(torch.int32).item() == want
    from fp4gemm._operands import ALPHA

    want_alpha = {
        (448, 448): 0x34149B93,
        (448, 256): 0x34820821,
        (256, 448): 0x34820821,
        (256, 256): 0x34E38E39,
    }
    assert {
        key: struct.unpack("<I", struct.pack("<f", value))[0] for key, value in ALPHA.items()
    } == want_alpha
    assert all(value == f32(want_alpha[key]) for key, value in ALPHA.items()), (
        "held to full float32 precision"
    )


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("per_row", [True, False], ids=["row", "tensor"])
def test_dequantize_equals_numpy_model(e4m3_max: int, per_row: bool, gen: torch.Generator) -> None:
    m, k = 131, 176
    codes = make_codes(m, k, gen)
    scales = fp4gemm.swizzle_scales(make_scales(m, k, gen))
    amax = torch.exp2(torch.randint(-30, 30, (m if per_row else 1,), generator=gen).float()) * 1.37
    amax[0] = 1.37 * 2.0**25
    want = torch.from_numpy(model.dequantize(codes, scales, amax, e4m3_max))
    for dtype in FLOATS:
        assert_bits(reference.dequantize(codes, scales, amax, e4m3_max, dtype), want.to(dtype), short(dtype))
    assert want.to(torch.float16).isinf().any(), "float16 overflows to inf as a plain cast does"


def test_decode_is_exact_for_every_code_and_scale() -> None:
    """All 16 codes times all 127 finite scale bytes, as float16 against float64."""
    codes = torch.arange(16, dtype=torch.uint8).view(8, 2)
    codes = (codes[:, 0] | codes[:, 1] << 4).repeat(127, 1)  # (127, 8): every code once in each row
    scales = fp4gemm.swizzle_scales(
        torch.arange(127, dtype=torch.uint8).view(127, 1).view(torch.float8_e4m3fn)
    )
    got = reference.decode(codes, scales)
    assert_bits(got.double(), torch.from_numpy(model.values(codes, scales)), "values")
    assert got.abs().max().item() == 2688


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch, gen: torch.Generator) -> None:
    x = make("row_ranges", 50, 64, torch.bfloat16, gen)
    whole = [reference.quantize(x, None, per_row) for per_row in (True, False)]
    t = fp4gemm.quantize(x)
    product = fp4gemm.mm(t, fp4gemm.quantize(x[:48]), out_dtype=torch.float32)
    values, halves = t.dequantize(), fp4gemm.decode(t).data
    monkeypatch.setattr(chunks, "CHUNK_ELEMS", 64 * 7)
    for per_row, parts in zip((True, False), whole, strict=True):
        for got, want in zip(reference.quantize(x, None, per_row), parts, strict=True):
            assert_bits(got, want)
    assert_bits(fp4gemm.mm(t, fp4gemm.quantize(x[:48]), out_dtype=torch.float32), product)
    assert_bits(t.dequantize(), values)
    assert_bits(fp4gemm.decode(t).data, halves)
