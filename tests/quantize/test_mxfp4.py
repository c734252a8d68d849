"""MXFP4: bits of a second implementation in exact fractions, and the way to NVFP4 and back."""

from __future__ import annotations

import math
from fractions import Fraction

import fp4gemm
import numpy as np
import pytest
import torch
from helpers import assert_bits
from torch import Tensor

E2M1 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]


def exponent_of(amax: Fraction) -> int:
    """floor(log2(amax)) of a positive fraction, by integers."""
    e = amax.numerator.bit_length() - amax.denominator.bit_length()
    return e if Fraction(2) ** e <= amax else e - 1


def scale_of(amax: Fraction, mode: str) -> int:
    """The e8m0 byte of a block."""
    if amax == 0:
        return 0
    if mode == "floor":
        e = exponent_of(amax) - 2
    else:
        # fl(amax * fl(1 / 6)) by numpy's float32, and the least power of two that is not below it
        scaled = Fraction(float(np.float32(float(amax)) * (np.float32(1) / np.float32(6))))
        e = exponent_of(scaled)
        e += Fraction(2) ** e < scaled
    return max(e + 127, 0)


def code_of(x: float, byte: int) -> int:
    """The e2m1 code of x over 2^(byte - 127): nearest, ties to the even code, saturating."""
    y = min(abs(Fraction(x)) / Fraction(2) ** (byte - 127), Fraction(6))
    near = min(range(8), key=lambda c: (abs(E2M1[c] - y), c & 1))
    return near | (8 if math.copysign(1, x) < 0 else 0)


def model(x: Tensor, mode: str) -> tuple[Tensor, Tensor]:
    """Codes (n, k/32, 16) and scales (n, k/32) of float32 x (n, k)."""
    codes, scales = [], []
    for block in x.reshape(-1, 32).tolist():
        byte = scale_of(max(abs(Fraction(v)) for v in block), mode)
        nibbles = [code_of(v, byte) for v in block]
        codes.append([nibbles[i] | nibbles[i + 1] << 4 for i in range(0, 32, 2)])
        scales.append(byte)
    n, blocks = x.shape[0], x.shape[1] // 32
    as_bytes = {"dtype": torch.uint8}
    return torch.tensor(codes, **as_bytes).view(n, blocks, 16), torch.tensor(scales, **as_bytes).view(n, -1)


def hard(gen: torch.Generator) -> Tensor:
    """Every magnitude, ties of e2m1, powers of two, blocks of zeros and of subnormal numbers."""
    rows = [torch.randn(16, 128, generator=gen)]
    rows.append(
        torch.randn(16, 128, generator=gen) * torch.exp2(torch.randint(-120, 120, (16, 128), generator=gen))
    )
    steps = torch.arange(128) / 4 - 16.0  # multiples of 1/4: all ties of a block with scale 1
    rows.append(steps.repeat(8, 1) * torch.exp2(torch.arange(8.0) * 7 - 20).unsqueeze(1))
    powers = torch.exp2(torch.arange(-149.0, 128.0))[:256].view(2, 128)
    rows.append(powers)
    rows.append(torch.tensor([[0.0, -0.0, 1e-45, -1e-40] * 32, [0.0, -0.0] * 64]))
    near = torch.tensor([6.0, 4.0, 3.9999998, 6.0000005, 5.9999995, 7.9999995, 3.0, 1.5])
    rows.append(torch.cat([torch.cat([v.view(1), torch.full((31,), 0.3)]) for v in near]).view(2, 128))
    return torch.cat(rows)


@pytest.mark.parametrize("mode", ["floor", "ceil"])
def test_bits_of_the_model(mode: str, device: torch.device, gen: torch.Generator) -> None:
    x = hard(gen)
    made = fp4gemm.quantize_mxfp4(x.to(device), scale=mode).to_weight()  # type: ignore[arg-type]
    codes, scales = model(x, mode)
    assert_bits(made.scales.cpu(), scales, "scales")
    assert_bits(made.codes.cpu(), codes, "codes")


def test_the_exponent_of_every_mantissa() -> None:
    """floor: the exponent of amax less 2; ceil: one more if amax is above 6 times that power of two."""
    mantissa = torch.arange(0, 1 << 23, 61, dtype=torch.int32)
    amax = (mantissa | 130 << 23).view(torch.float32)  # 8 to 16
    x = torch.zeros(amax.numel(), 32)
    x[:, 5] = -amax
    assert (fp4gemm.quantize_mxfp4(x).to_weight().scales == 128).all()
    want = torch.where(amax > 12, 129, 128).to(torch.uint8).unsqueeze(1)
    assert_bits(fp4gemm.quantize_mxfp4(x, scale="ceil").to_weight().scales, want, "scales")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_and_stacks(dtype: torch.dtype, gen: torch.Generator) -> None:
    """They are widened exactly; a stack has the bits of its matrices, and strides are free."""
    x = torch.randn(3, 8, 64, generator=gen).to(dtype)
    made = fp4gemm.quantize_mxfp4(x).to_weight()
    assert made.codes.shape == (3, 8, 2, 16)
    for e in range(3):
        one = fp4gemm.quantize_mxfp4(x[e].float()).to_weight()
        assert_bits(made.codes[e], one.codes, "codes")
        assert_bits(made.scales[e], one.scales, "scales")
    turned = fp4gemm.quantize_mxfp4(x.mT.contiguous().mT).to_weight()
    assert_bits(turned.codes, made.codes, "codes")


def test_values_of_mxfp4_keep_their_bits(gen: torch.Generator) -> None:
    """What from_mxfp4 returns, dequantized and quantized again; blocks have an element of 4 or 6."""
    codes = torch.randint(0, 256, (16, 4, 16), dtype=torch.uint8, generator=gen)
    codes[..., 0] = 0x67
    scales = torch.randint(110, 127, (16, 4), generator=gen).to(torch.uint8)
    values = fp4gemm.NVFP4Tensor.from_mxfp4(codes, scales).dequantize(torch.float32)
    for mode in ("floor", "ceil"):
        made = fp4gemm.quantize_mxfp4(values, scale=mode).to_weight()  # type: ignore[arg-type]
        assert_bits(made.codes, codes, "codes")
        assert_bits(made.scales, scales, "scales")


@pytest.mark.parametrize("mode", ["floor", "ceil"])
def test_blocks_that_are_not_finite(mode: str) -> None:
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = math.nan, -math.inf
    made = fp4gemm.quantize_mxfp4(x, scale=mode).to_weight()  # type: ignore[arg-type]
    assert (made.scales == 255).tolist() == [[True, False], [False, True]]
    assert not made.codes[made.scales == 255].any()
    with pytest.raises(ValueError, match=r"^scales: 2 of 4 are 255, the NaN of e8m0"):
        fp4gemm.NVFP4Tensor.from_mxfp4(*made)
