"""fp4gemm.concat: the rows of several tensors with unequal amaxes in one operand, bit for bit."""

from __future__ import annotations

from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from helpers import assert_bits, make, make_codes
from modes import assert_same

SIZES = ((128, 256), (48, 16, 16), (33, 7, 130), (1, 1), (136,))


def weight(
    n: int, k: int, magnitude: float, scaling: str, gen: torch.Generator, **more: object
) -> NVFP4Tensor:
    x = make("normal", n, k, torch.float32, gen) * magnitude
    return fp4gemm.quantize(x, scaling=scaling, **more)


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_keep_every_bit(
    sizes: tuple[int, ...], scaling: str, device: torch.device, gen: torch.Generator
) -> None:
    parts = [weight(n, 96, 11.0**i, scaling, gen).to(device) for i, n in enumerate(sizes)]
    t = fp4gemm.concat(parts)
    assert t.shape == (sum(sizes), 96)
    assert t.amax.shape == (sum(sizes),)
    assert_bits(t.codes, torch.cat([p.codes for p in parts]), "codes")
    plain = torch.cat([p.compact_scales().view(torch.uint8) for p in parts])
    assert_bits(t.scales.view(torch.uint8), fp4gemm.swizzle_scales(plain), "scales")
    assert_bits(t.amax, torch.cat([p.with_row_amax().amax for p in parts]), "amax")
    assert_bits(t.dequantize(), torch.cat([p.dequantize() for p in parts]), "values")
    assert all(part.data_ptr() % 16 == 0 for part in (t.codes, t.scales, t.amax))
    assert_same(fp4gemm.concat(tuple(parts)), t)


def test_of_one_quantization(device: torch.device, gen: torch.Generator) -> None:
    """Rows that were quantized together and apart, with an amax for each, are the same."""
    x = make("normal", 200, 64, torch.bfloat16, gen).to(device)
    parts = [fp4gemm.quantize(part) for part in x.split((72, 96, 32))]
    assert_same(fp4gemm.concat(parts), fp4gemm.quantize(x))


@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize(
    "options",
    [{"four_over_six": "mse", "e4m3_max": 256}, {"hadamard": "fp32", "hadamard_signs": 9}],
    ids=["four_over_six", "hadamard"],
)
def test_stacks(options: dict[str, Any], scaling: str, device: torch.device, gen: torch.Generator) -> None:
    """gate and up of experts: each expert as two matrices, and the numbers that its tensors share."""
    gates = [weight(48, 96, 3.0**e, scaling, gen, **options).to(device, torch.bfloat16) for e in range(3)]
    ups = [weight(33, 96, 9.0**e, scaling, gen, **options).to(device, torch.bfloat16) for e in range(3)]
    numbers = torch.bfloat16, options.get("e4m3_max", 448), options.get("hadamard_signs")
    t = fp4gemm.concat([fp4gemm.stack(gates), fp4gemm.stack(ups)])
    assert t.shape == (3, 81, 96)
    assert (t.dtype, t.e4m3_max, t.hadamard_signs) == numbers
    for e in range(3):
        pair = fp4gemm.concat([gates[e], ups[e]])
        assert (pair.dtype, pair.e4m3_max, pair.hadamard_signs) == numbers
        assert_same(t[e], pair, f"expert {e}")


def exact(n: int, k: int, amaxes: torch.Tensor, gen: torch.Generator) -> NVFP4Tensor:
    """Random codes with block scales 1, 2 and 4: every sum of products is exact in float32."""
    scales = torch.randint(0, 3, (n, k // 16), generator=gen).mul(8).add(0x38).to(torch.uint8)
    return NVFP4Tensor.from_compact(make_codes(n, k, gen), scales, amaxes)


def test_product_of_unequal_amaxes_is_that_of_floats(device: torch.device, gen: torch.Generator) -> None:
    """mm equals float arithmetic on the values, in which each row has the amax of its own tensor."""
    a = exact(5, 64, torch.rand(5, generator=gen) * 9, gen).to(device)
    parts = [
        exact(n, 64, torch.rand(1, generator=gen) * 50.0**i, gen).to(device) for i, n in enumerate(SIZES[1])
    ]
    w = fp4gemm.concat(parts)
    acc = (fp4gemm.decode(a).data.double() @ fp4gemm.decode(w).data.double().T).float().cpu()
    # One float32 rounding for each operation, in the order that scaled_mm documents.
    alpha = torch.tensor(1.0 / (6 * 448) ** 2, dtype=torch.float32)
    want = alpha * (w.amax.cpu() * (a.amax.cpu().unsqueeze(1) * acc))
    got = fp4gemm.mm(a, w, out_dtype=torch.float32)
    assert_bits(got, want, "product")
    values, columns = a.dequantize().double(), w.dequantize().double().T
    limit = 1e-6 * (values.abs() @ columns.abs())
    assert bool(((got.double() - values @ columns).abs() <= limit).all())
    each = torch.cat([fp4gemm.mm(a, part, out_dtype=torch.float32) for part in parts], 1)
    assert_bits(got, each, "products of the parts")


def test_stack_of_unequal_amaxes_is_that_of_floats(device: torch.device, gen: torch.Generator) -> None:
    """grouped_mm on stacked matrices, each with an amax of its own."""
    parts = [exact(24, 64, torch.rand(1, generator=gen) * 50.0**e, gen).to(device) for e in range(3)]
    offs = torch.tensor([2, 2, 7], dtype=torch.int32, device=device)
    a = fp4gemm.quantize(make("normal", 7, 64, torch.bfloat16, gen).to(device), offs=offs)
    got = fp4gemm.grouped_mm(a, fp4gemm.stack(parts), out_dtype=torch.float32)
    values, start = a.dequantize(), 0
    for end, part in zip(offs.tolist(), parts, strict=True):
        want = values[start:end].double() @ part.dequantize().double().T
        limit = 1e-5 * (values[start:end].double().abs() @ part.dequantize().double().abs().T)
        assert bool(((got[start:end].double() - want).abs() <= limit).all())
        start = end
