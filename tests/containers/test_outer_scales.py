"""Outer scales of other libraries in all their shapes: of a weight, of experts, of partitions of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fp4gemm
import pytest
import torch
from fp4gemm import NVFP4Tensor
from helpers import assert_bits, make
from modes import assert_same
from torch import Tensor

K = 96
ROWS = (48, 33, 130)  # the first two do not fill tiles of 128 rows
Read = Callable[..., NVFP4Tensor]


def torchao_swizzled(codes: Tensor, scales: Tensor, number: Tensor, **options: Any) -> NVFP4Tensor:
    return NVFP4Tensor.from_torchao(codes, scales, number, is_swizzled_scales=True, **options)


# The constructor, whether it reads swizzled scales, and whether its outer scale encodes.
LIBRARIES = {
    "modelopt": (NVFP4Tensor.from_modelopt, False, False),
    "compressed_tensors": (NVFP4Tensor.from_compressed_tensors, False, True),
    "flashinfer": (NVFP4Tensor.from_flashinfer, True, True),
    "torchao": (NVFP4Tensor.from_torchao, False, False),
    "torchao_swizzled": (torchao_swizzled, True, False),
}


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> tuple[Read, bool, bool]:
    return LIBRARIES[request.param]


def weights(device: torch.device, gen: torch.Generator, rows: tuple[int, ...] = ROWS) -> list[NVFP4Tensor]:
    """Layers whose amaxes differ by orders of magnitude."""
    made = []
    for i, n in enumerate(rows):
        w = make("normal", n, K, torch.bfloat16, gen).to(device) * 0.3 * 7.0**i
        made.append(fp4gemm.quantize(w, scaling="tensor"))
    return made


def number_of(t: NVFP4Tensor, encodes: bool) -> Tensor:
    return t.encode_scale() if encodes else t.decode_multiplier()


def scales_of(t: NVFP4Tensor, is_swizzled: bool) -> Tensor:
    return t.scales if is_swizzled else t.compact_scales()


def same_layer(t: NVFP4Tensor, encodes: bool) -> NVFP4Tensor:
    """The layer as it is read alone, with an amax for each row; its amax may differ by 1 ulp from t's."""
    read = NVFP4Tensor.from_compressed_tensors if encodes else NVFP4Tensor.from_modelopt
    return read(t.codes, t.compact_scales(), number_of(t, encodes)).with_row_amax()


def test_experts(library: tuple[Read, bool, bool], device: torch.device, gen: torch.Generator) -> None:
    read, is_swizzled, encodes = library
    for n in (33, 128):
        parts = weights(device, gen, (n, n, n))
        stack = fp4gemm.stack(parts)
        scales, numbers = scales_of(stack, is_swizzled), number_of(stack, encodes)
        for shape in ((3,), (3, 1), (3, 1, 1)):  # the last is that of torchao
            t = read(stack.codes, scales, numbers.reshape(shape))
            assert t.amax.shape == (3, 1)
            for e, part in enumerate(parts):
                assert_same(t[e].with_row_amax(), same_layer(part, encodes), f"expert {e}")
        for one in (numbers[0], numbers[0].view(())):
            t = read(stack.codes, scales, one)
            assert_bits(t.amax, t.amax[:1].expand(3, 1), "one number for all experts")
            assert_same(t[0].with_row_amax(), same_layer(parts[0], encodes), "expert 0")


def test_partitions(library: tuple[Read, bool, bool], device: torch.device, gen: torch.Generator) -> None:
    """q, k and v in one tensor with three outer scales equal the three tensors."""
    read, is_swizzled, encodes = library
    parts = weights(device, gen)
    numbers = torch.cat([number_of(t, encodes) for t in parts])
    codes = torch.cat([t.codes for t in parts])
    plain = torch.cat([t.compact_scales().view(torch.uint8) for t in parts])
    scales = fp4gemm.swizzle_scales(plain) if is_swizzled else plain
    for number in (numbers, numbers.view(1, 3), numbers.view(3, 1)):
        t = read(codes, scales, number, partition_rows=ROWS)
        assert_same(t, fp4gemm.concat([same_layer(part, encodes) for part in parts]), "partitions")
    values = torch.cat([same_layer(part, encodes).dequantize() for part in parts])
    assert_bits(t.dequantize(), values, "values")
    x = fp4gemm.quantize(make("normal", 5, K, torch.bfloat16, gen).to(device))
    parts = [same_layer(part, encodes) for part in weights(device, gen, (48, 32, 136))]
    product = fp4gemm.mm(x, fp4gemm.concat(parts), out_dtype=torch.float32)
    each = torch.cat([fp4gemm.mm(x, part, out_dtype=torch.float32) for part in parts], 1)
    assert_bits(product, each, "product")
    one = read(codes, scales, numbers[:1], partition_rows=[sum(ROWS)])
    assert one.amax.shape == (1,)


def test_partitions_of_experts(
    library: tuple[Read, bool, bool], device: torch.device, gen: torch.Generator
) -> None:
    """gate and up of each expert, with outer scales (g, 2), as vLLM has them."""
    read, is_swizzled, encodes = library
    gates, ups = weights(device, gen, (48, 48, 48)), weights(device, gen, (33, 33, 33))[::-1]
    joined = [fp4gemm.concat(pair) for pair in zip(gates, ups, strict=True)]
    stack = fp4gemm.stack(joined)
    numbers = torch.stack(
        [
            torch.cat([number_of(gate, encodes), number_of(up, encodes)])
            for gate, up in zip(gates, ups, strict=True)
        ]
    )
    t = read(stack.codes, scales_of(stack, is_swizzled), numbers, partition_rows=(48, 33))
    for e, pair in enumerate(zip(gates, ups, strict=True)):
        assert_same(t[e], fp4gemm.concat([same_layer(part, encodes) for part in pair]), f"expert {e}")


def test_torchao_without_an_outer_scale(device: torch.device, gen: torch.Generator) -> None:
    stack = fp4gemm.stack(weights(device, gen, (16, 16)))
    t = NVFP4Tensor.from_torchao(stack.codes, stack.compact_scales(), None)
    assert_bits(t.decode_multiplier(), torch.ones(2, 1), "multiplier")


def test_zero_partition(device: torch.device, gen: torch.Generator) -> None:
    """An outer scale of 0 makes the rows of its partition 0, even where the block scales are NaN."""
    w = weights(device, gen, (16,))[0]
    codes = torch.cat((w.codes, torch.full_like(w.codes, 0x77)))
    scales = torch.cat(
        (w.compact_scales().view(torch.uint8), torch.full((16, 6), 0x7F, device=device).byte())
    )
    numbers = torch.cat((w.decode_multiplier(), torch.zeros(1, device=device)))
    t = NVFP4Tensor.from_modelopt(codes, scales, numbers, partition_rows=(16, 16))
    assert_bits(t.dequantize()[:16], same_layer(w, False).dequantize(), "values")
    assert_bits(t.dequantize()[16:], torch.zeros(16, K), "zeros")
    assert_bits(t.compact_scales()[:16], w.compact_scales(), "scales")


def test_an_infinite_encode_scale_is_a_zero_weight(device: torch.device, gen: torch.Generator) -> None:
    w = weights(device, gen, (16,))[0]
    number = torch.full((1,), torch.inf, device=device)
    t = NVFP4Tensor.from_compressed_tensors(w.codes, w.compact_scales(), number)
    assert not t.dequantize().any()
    assert t.to_modelopt()["weight_scale_2"].item() == 0
