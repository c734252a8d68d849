"""MXFP4 weights as NVFP4 operands: values to the bit within the span, and what lies below it."""

from __future__ import annotations

import itertools

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from fp4gemm.containers.interop import MXFP4Report
from helpers import assert_bits
from torch import Tensor

SPAN, LARGEST = 17, 244
# The values of e2m1 in the order of their codes (OCP Microscaling Formats 1.0, 5.3.3).
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1)).double()


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """q * 2^(e - 127) of the specification, in float64, which holds each exactly."""
    q = torch.stack((E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]), -1).flatten(-2)
    powers = torch.tensor([2.0**e for e in range(-127, 128)], dtype=torch.float64)
    return (q * powers[scales.long()].unsqueeze(-1)).flatten(-2)


def random(gen: torch.Generator, low: int, high: int, *shape: int) -> tuple[Tensor, Tensor]:
    """Codes (.., k/32, 16), all of them, and exponents from low to high, both included."""
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=gen)
    return blocks, torch.randint(low, high + 1, shape, generator=gen).to(torch.uint8)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("shape", [(24, 3), (5, 24, 4)], ids=["matrix", "stack"])
@pytest.mark.parametrize("low", [0, 1, 9, 100, LARGEST - SPAN])
def test_values_within_the_span_are_those_of_mxfp4(
    low: int, shape: tuple[int, ...], scaling: str, gen: torch.Generator
) -> None:
    """From the smallest scale, whose values are subnormal, to the largest one that is accepted."""
    blocks, scales = random(gen, low, low + SPAN, *shape)
    scales[..., 0, 0], scales[..., 0, 1] = low, low + SPAN
    blocks[..., 0, :2, :] |= 0x11
    reports: list[MXFP4Report] = []
    t = NVFP4Tensor.from_mxfp4(blocks, scales, scaling=scaling, report=reports.append)  # type: ignore[arg-type]
    want = values(blocks, scales)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert_bits(t.dequantize(dtype), want.float().to(dtype), str(dtype))
    assert_bits(t.codes, blocks.flatten(-2), "codes")
    assert reports == [MXFP4Report(scales.numel(), SPAN, 0, 0)]
    assert reports[0].is_exact
    assert t.e4m3_max == 256
    rows = shape[:-1] if scaling == "row" else (*shape[:-2], 1)
    assert t.amax.shape == rows
    if scaling == "row":
        top = scales.amax(-1).double()
        assert bool((t.amax.double() == 6 * 2.0 ** (top - 127)).all())


def test_scales_may_be_of_float8_e8m0fnu(gen: torch.Generator) -> None:
    blocks, scales = random(gen, 110, 127, 16, 2)
    t = NVFP4Tensor.from_mxfp4(blocks, scales.view(torch.float8_e8m0fnu))
    assert_bits(t.scales, NVFP4Tensor.from_mxfp4(blocks, scales).scales, "scales")


def test_codes_and_scales_may_have_any_strides_and_alignment(gen: torch.Generator) -> None:
    """Every other row, as gate and up of GPT-OSS lie, and a tensor in a mapped file."""
    blocks, scales = random(gen, 110, 127, 32, 2)
    t = NVFP4Tensor.from_mxfp4(blocks[1::2], scales[1::2])
    want = values(blocks, scales).float()
    assert_bits(t.dequantize(), want[1::2], "every other row")
    shifted = torch.empty(blocks.numel() + 1, dtype=torch.uint8)[1:].view(blocks.shape).copy_(blocks)
    assert_bits(NVFP4Tensor.from_mxfp4(shifted, scales).dequantize(), want, "misaligned")
    assert NVFP4Tensor.from_mxfp4(blocks, scales).codes.data_ptr() == blocks.data_ptr()


def test_blocks_of_zeros_have_no_part_in_the_span(gen: torch.Generator) -> None:
    """Whatever their exponents are; the signs of zeros are kept, and a row of zeros has the amax 0."""
    blocks, scales = random(gen, 100, 117, 8, 4)
    blocks[:, 1] &= 0x88
    scales[:, 1] = torch.tensor([0, 254] * 4, dtype=torch.uint8)
    blocks[3] &= 0x88
    t = NVFP4Tensor.from_mxfp4(blocks, scales)
    assert_bits(t.dequantize(), values(blocks, scales).float(), "values")
    assert t.amax[3].item() == 0
    assert bool((t.amax[:3] > 0).all())


def rounded(blocks: Tensor, scales: Tensor, top: Tensor) -> Tensor:
    """The values of MXFP4 on the grid of the smallest block scale where e2m1 has them, ties to the even code.

    top: the largest exponent of each block's row.
    """
    grid = E2M1[:8]
    exact = values(blocks, scales).view(*scales.shape, 32)
    unit = torch.pow(2.0, top.double() - 127 - SPAN).unsqueeze(-1)
    unit = torch.where(
        (scales < top - SPAN).unsqueeze(-1), unit, 2.0 ** (scales.double() - 127).unsqueeze(-1)
    )
    distance = (exact.abs() / unit).unsqueeze(-1) - grid
    # An even code is nearer by less than any difference that is no tie.
    code = (distance.abs() + torch.tensor([0.0, 1e-9] * 4)).argmin(-1)
    return (grid[code] * unit).copysign(exact).flatten(-2)


@pytest.mark.parametrize("below", [1, 2, 3, 4, 5, 60])
def test_what_lies_further_below_is_rounded_and_counted(below: int, gen: torch.Generator) -> None:
    blocks, scales = random(gen, 90, 107, 32, 4)
    blocks[:, 0] |= 0x11
    scales[:, 0] = 107
    scales[:, 2] = 107 - SPAN - below
    want = rounded(blocks, scales, torch.full_like(scales, 107).int())
    exact = values(blocks, scales)
    with pytest.raises(ValueError, match=r"^scales: 3\d of 128 blocks have exponents more than 17 below"):
        NVFP4Tensor.from_mxfp4(blocks, scales)
    reports: list[MXFP4Report] = []
    t = NVFP4Tensor.from_mxfp4(blocks, scales, inexact="round", report=reports.append)
    assert_bits(t.dequantize(), want.float(), "values")
    changed = want != exact
    assert reports == [
        MXFP4Report(128, SPAN + below, int(changed.view(32, 4, 32).any(-1).sum()), int(changed.sum()))
    ]
    assert not reports[0].is_exact
    assert bool(((want - exact).abs() <= 2.0 ** (107 - 127 - 19)).all())


def test_values_below_the_span_that_e2m1_has_at_a_larger_scale_are_exact(gen: torch.Generator) -> None:
    """Even values two exponents below the span: 2, 4 and 6 become 0.5, 1 and 1.5."""
    blocks, scales = random(gen, 100, 117, 8, 4)
    codes = torch.tensor([0, 4, 6, 7])  # 0, 2, 4 and 6
    low, high = (codes[torch.randint(0, 4, (8, 16), generator=gen)] for _ in range(2))
    blocks[:, 1] = (low | high << 4 | 0x80).to(torch.uint8)
    scales[:, 0], scales[:, 1] = 117, 117 - SPAN - 2
    blocks[:, 0] |= 1
    reports: list[MXFP4Report] = []
    t = NVFP4Tensor.from_mxfp4(blocks, scales, report=reports.append)
    assert_bits(t.dequantize(), values(blocks, scales).float(), "values")
    assert reports[0].is_exact
    assert reports[0].span == SPAN + 2


def test_a_matrix_with_one_amax_has_the_span_of_all_its_rows(gen: torch.Generator) -> None:
    blocks, scales = random(gen, 90, 95, 16, 2)
    blocks |= 0x11
    scales[8:] += 20
    assert NVFP4Tensor.from_mxfp4(blocks, scales).amax.shape == (16,)
    with pytest.raises(ValueError, match=r"below the largest of their matrix \(at most 2\d below it\)"):
        NVFP4Tensor.from_mxfp4(blocks, scales, scaling="tensor")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_products_are_those_of_the_values(dtype: torch.dtype, gen: torch.Generator) -> None:
    """W4A16: the sums of k terms in fp32, then two roundings in fp32, then that of the result."""
    blocks, scales = random(gen, 108, 125, 48, 4)
    x = torch.randn(9, 128, generator=gen).bfloat16()
    got = fp4gemm.mm(x, NVFP4Tensor.from_mxfp4(blocks, scales), out_dtype=dtype).double()
    w, a = values(blocks, scales), x.double()
    bound = (128 + 2) * 2.0**-24 * (a.abs() @ w.abs().t())
    if dtype is torch.bfloat16:
        bound = bound + 2.0**-8 * (a @ w.t()).abs()
    assert bool(((got - a @ w.t()).abs() <= bound).all())


@pytest.mark.parametrize("span", [13, 14])
def test_products_of_fp8_tokens_have_the_values_of_13_exponents(span: int, gen: torch.Generator) -> None:
    """Each token is a unit vector, so that a product is one value, e4m3(q * s / 8) in W4A8."""
    blocks, scales = random(gen, 100, 100 + span, 64, 2)
    blocks[0, 0], scales[0, 0], scales[0, 1] = 0x11, 100, 100 + span  # 0.5 at the smallest scale
    x = fp4gemm.quantize_fp8(torch.eye(64).bfloat16())
    got = fp4gemm.mm(x, NVFP4Tensor.from_mxfp4(blocks, scales), out_dtype=torch.float32).t().double()
    want = values(blocks, scales)
    is_near = (got - want).abs() <= 2.0**-21 * want.abs()  # roundings in fp32
    assert bool(is_near.all()) is (span == 13)


@pytest.mark.gpu
@pytest.mark.parametrize("low", [0, 80, LARGEST - SPAN - 4])
def test_a_gpu_has_the_same_bits(low: int, cuda: torch.device, gen: torch.Generator) -> None:
    """Those of the operand, with rounded values too, and those of its values, subnormal ones too."""
    blocks, scales = random(gen, low, low + SPAN + 4, 3, 32, 4)
    reports: list[MXFP4Report] = []
    options = {"inexact": "round", "report": reports.append}
    here = NVFP4Tensor.from_mxfp4(blocks, scales, **options)  # type: ignore[arg-type]
    there = NVFP4Tensor.from_mxfp4(blocks.to(cuda), scales.to(cuda), **options)  # type: ignore[arg-type]
    for part in ("codes", "scales", "amax"):
        assert_bits(getattr(there, part).cpu(), getattr(here, part), part)
    assert reports[0] == reports[1]
    assert_bits(there.dequantize().cpu(), here.dequantize(), "values")


def test_a_stack_is_the_operand_of_grouped_products(gen: torch.Generator) -> None:
    blocks, scales = random(gen, 110, 127, 3, 32, 2)
    t = NVFP4Tensor.from_mxfp4(blocks, scales)
    x = torch.randn(7, 64, generator=gen).bfloat16()
    offs = torch.tensor([2, 2, 7], dtype=torch.int32)
    got = fp4gemm.grouped_mm(x, t, offs)
    for e, (begin, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
        one = NVFP4Tensor.from_mxfp4(blocks[e], scales[e])
        assert_bits(got[begin:end], fp4gemm.mm(x[begin:end], one), f"expert {e}")


def test_nothing_is_read_of_a_tensor_without_values() -> None:
    blocks = torch.empty(8, 2, 16, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"^codes: is on meta .* must be readable"):
        NVFP4Tensor.from_mxfp4(blocks, torch.empty(8, 2, dtype=torch.uint8, device="meta"))
