"""The operators prepack and unprepack for FP8 tokens: the layout by definition, and the same weight."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import layout
from fp4gemm.ops import operators
from helpers import assert_bits, dirty, folded, make_codes
from model_fp8_products import chunks_of
from op_checks import assert_fake_is_real, opcheck
from torch import Tensor

SHAPES = [(1, 64), (64, 128), (63, 192), (65, 64), (129, 320)]


def weight(n: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, compact scale bytes of every value, NaN and negative ones included, and the swizzled scales."""
    compact = torch.randint(0, 256, (n, k // 16), generator=gen, dtype=torch.uint8)
    return make_codes(n, k, gen), compact, layout.swizzle_scales(compact.view(torch.float8_e4m3fn))


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layout_and_inverse(n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    codes, compact, scales = weight(n, k, gen)
    want = chunks_of(codes.numpy(), compact.numpy())
    assert want.size == -(-n // 64) * -(-k // 128) * 4608
    dirty(device, want.size)
    packed = operators.prepack(codes.to(device), scales.to(device), True)
    assert_bits(packed, torch.from_numpy(want), "bytes")
    restored, back = operators.unprepack(packed, n, k)
    want_codes, want_compact = folded(codes, compact)
    assert_bits(restored, want_codes, "codes")
    assert_bits(back, layout.swizzle_scales(want_compact.view(torch.float8_e4m3fn)), "scales")


def test_stacks(device: torch.device, gen: torch.Generator) -> None:
    weights = [weight(72, 192, gen) for _ in range(3)]
    codes = torch.stack([w[0] for w in weights]).to(device)
    scales = torch.stack([w[2].view(torch.uint8) for w in weights]).view(torch.float8_e4m3fn).to(device)
    packed = operators.prepack(codes, scales, fp8=True)
    for e, (matrix, compact, _) in enumerate(weights):
        assert_bits(packed[e], torch.from_numpy(chunks_of(matrix.numpy(), compact.numpy())), f"matrix {e}")
    back = operators.unprepack(packed, 72, 192)
    assert_bits(operators.prepack(*back, fp8=True), packed, "bytes")


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    codes, compact, _ = weight(65, 192, gen)
    scales = layout.swizzle_scales((compact % 0x7F).view(torch.float8_e4m3fn))  # opcheck finds NaN unequal
    codes, scales = codes.to(device), scales.to(device)
    opcheck("prepack", codes, scales, fp8=True)
    packed = operators.prepack(codes, scales, True)
    opcheck("unprepack", packed, 65, 192)
    assert_fake_is_real("prepack", codes, scales, True)
    assert_fake_is_real("unprepack", packed, 65, 192)
    assert_fake_is_real("unprepack", packed.view(1, -1), 65, 192)


def test_wrong_sizes_are_named(device: torch.device, gen: torch.Generator) -> None:
    codes, _, scales = weight(65, 192, gen)
    codes, scales = codes.to(device), scales.to(device)
    packed = operators.prepack(codes, scales, True)
    thin, _, thin_scales = weight(64, 96, gen)
    for call, text in (
        (
            lambda: operators.prepack(thin.to(device), thin_scales.to(device), True),
            "k:? is 96, must be a (positive )?multiple of 64",
        ),
        (lambda: operators.unprepack(packed, 65, 96), "k: .*96, must be a positive multiple of 64"),
        (lambda: operators.unprepack(packed, 64, 192), "packed: .*, must have 9216 "),
        (lambda: operators.unprepack(packed.view(torch.uint8), 65, 192), "packed: .*bytes a matrix"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=text):
            call()
