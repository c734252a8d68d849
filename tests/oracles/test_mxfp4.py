"""quantize_mxfp4 has the bits of torchao's to_mx: make test-oracles installs torchao."""

from __future__ import annotations

import fp4gemm
import pytest
import torch
from helpers import assert_bits

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="needs torchao")


@pytest.mark.parametrize(("scale", "mode"), [("floor", "FLOOR"), ("ceil", "RCEIL")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_of_torchao(scale: str, mode: str, dtype: torch.dtype, gen: torch.Generator) -> None:
    """Over most exponents, and for many mantissas of an amax."""
    wide = torch.exp2(torch.randint(-100, 100, (256, 1024), generator=gen).float())
    mantissa = torch.arange(1 << 23, dtype=torch.int32).view(-1, 1024)
    for x in (
        torch.randn(256, 1024, generator=gen),
        torch.randn(256, 1024, generator=gen) * wide,
        torch.nn.functional.pad((mantissa[::64] | 127 << 23).view(torch.float32).view(-1, 1), (0, 31)),
    ):
        x = x.to(dtype).contiguous()
        chosen = mx_tensor.ScaleCalculationMode[mode]
        scales, codes = mx_tensor.to_mx(x, torch.float4_e2m1fn_x2, 32, chosen)
        made = fp4gemm.quantize_mxfp4(x, scale=scale).to_weight()  # type: ignore[arg-type]
        assert_bits(made.scales, scales.view(torch.uint8).view(made.scales.shape), "scales")
        assert_bits(made.codes, codes.view(torch.uint8).view(made.codes.shape), "codes")
