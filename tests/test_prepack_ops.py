"""The prepack and unpack operators: the layout by its definition, nothing lost, every code and scale."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import layout, ops
from helpers import assert_bits, dirty, make_codes
from op_checks import assert_fake_is_real, opcheck
from torch import Tensor

SHAPES = [(1, 16), (64, 64), (63, 48), (65, 80), (128, 256), (129, 272), (200, 336), (7, 2880), (300, 96)]


def rotl(words: Tensor, by: int) -> Tensor:
    return ((words << by) | (words >> (32 - by))) & 0xFFFFFFFF


def layout_of_chunk() -> tuple[Tensor, Tensor, Tensor]:
    """Row and k (128, 4, 8) of each code, by thread, word and index; row and block (2, 256) of each scale.

    As a wgmma holds its A operand: within 16 of k, thread t of a warp has rows t / 4 and that + 8, at
    k = 2 (t % 4) and the next, and at both + 8.
    """
    thread = torch.arange(128).view(-1, 1, 1)
    word = torch.arange(4).view(1, -1, 1)
    index = torch.arange(8).view(1, 1, -1)
    rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (index // 2 % 2) + 0 * word
    depths = 16 * word + 2 * (thread % 4) + index % 2 + 8 * (index // 4)
    byte = torch.arange(256)
    scales = torch.stack((byte // 64 * 16 + byte % 2 * 8 + byte // 8 % 8, byte // 2 % 4))  # row, block
    return rows, depths, scales


def read(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes and scales, a byte each, of all chunks (their padding included)."""
    rows, columns = -(-n // 64), -(-k // 64)
    chunks = packed.cpu().view(rows, columns, 2304)
    words = chunks[..., :2048].contiguous().view(torch.int32).view(rows, columns, 128, 4).long() & 0xFFFFFFFF
    pairs = (
        words,
        rotl(words, 3),
        rotl(words, 7) ^ rotl(words, 10),
        rotl(words, 7) ^ rotl(words, 12),
    )
    row, depth, scale = layout_of_chunk()
    nibbles = torch.full((rows, columns, 64, 64), 99)
    for index in range(8):
        half = (pairs[index // 2] & 0x8E008E00) >> (16 * (index % 2)) & 0xFFFF
        # The place of the sign and of the three other bits in an fp16.
        nibbles[:, :, row[:, :, index], depth[:, :, index]] = half >> 15 << 3 | half >> 9 & 7
    scales = torch.full((rows, columns, 64, 4), 99, dtype=torch.uint8)
    scales[:, :, scale[0], scale[1]] = chunks[..., 2048:]
    flat = nibbles.permute(0, 2, 1, 3).reshape(64 * rows, 64 * columns)
    return flat.to(torch.uint8), scales.permute(0, 2, 1, 3).reshape(64 * rows, 4 * columns)


def weight(n: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and compact scales of every byte, NaN among the scales."""
    return make_codes(n, k, gen), torch.randint(0, 256, (n, k // 16), generator=gen, dtype=torch.uint8)


def swizzled(compact: Tensor, n: int, pad: int = 0) -> Tensor:
    """float8_e4m3fn scales with this byte in the padding."""
    rows, columns = layout.padded_scale_shape(n, 16 * compact.shape[1])
    full = torch.full((rows, columns), pad, dtype=torch.uint8)
    full[:n, : compact.shape[1]] = compact
    return layout.swizzle_scales(full).view(torch.float8_e4m3fn)


def nibbles_of(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layout(n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    """Each code and scale stands where the kernels look for it; everything beyond n and k is zero."""
    codes, compact = weight(n, k, gen)
    size = -(-n // 64) * -(-k // 64) * 2304
    dirty(device, size)
    packed = ops.prepack(codes.to(device), swizzled(compact, n, pad=0xFF).to(device))
    assert packed.shape == (size,)
    assert packed.dtype == torch.uint8
    got, scales = read(packed, n, k)
    want = torch.zeros_like(got)
    want[:n, :k] = nibbles_of(codes)
    assert_bits(got, want, "codes")
    want = torch.zeros_like(scales)
    want[:n, : k // 16] = compact
    assert_bits(scales, want, "scales")


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unpack_is_the_inverse(n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    codes, compact = weight(n, k, gen)
    scales = swizzled(compact, n)
    packed = ops.prepack(codes.to(device), scales.to(device))
    dirty(device, codes.numel(), scales.numel())
    got = ops.unpack(packed, n, k)
    assert_bits(got[0], codes, "codes")
    assert_bits(got[1], scales, "scales, padding zero")
    assert got[0].device.type == got[1].device.type == device.type


def test_any_bytes_are_a_weight(device: torch.device, gen: torch.Generator) -> None:
    """The map is one to one: random bytes come back."""
    packed = torch.randint(0, 256, (6 * 2304,), generator=gen, dtype=torch.uint8)
    codes, scales = ops.unpack(packed.to(device), 128, 192)
    nibbles, compact = read(packed, 128, 192)
    assert_bits(nibbles_of(codes.cpu()), nibbles, "codes")
    assert_bits(scales, swizzled(compact, 128), "scales")
    assert_bits(ops.prepack(codes, scales), packed, "bytes")


def test_every_code_with_every_scale(device: torch.device) -> None:
    """All 256 scale bytes, those of NaN too, before all 16 codes, at every place of a word."""
    for turn in range(16):
        row = (torch.arange(16, dtype=torch.uint8) + turn) % 16
        codes = (row[0::2] | row[1::2] << 4).repeat(256, 1).contiguous()
        scales = swizzled(torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1), 256)
        packed = ops.prepack(codes.to(device), scales.to(device))
        got = ops.unpack(packed, 256, 16)
        assert_bits(got[0], codes, "codes")
        assert_bits(got[1], scales, "scales")
        assert_bits(read(packed, 256, 16)[0][:, :16].contiguous(), row.repeat(256, 1), "places")


@pytest.mark.parametrize(("g", "n", "k"), [(1, 64, 64), (3, 7, 16), (5, 65, 336), (2, 128, 96)])
def test_stacks(g: int, n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    weights = [weight(n, k, gen) for _ in range(g)]
    codes = torch.stack([w[0] for w in weights]).to(device)
    # Bytes, because few torch operators know float8.
    plain = torch.stack([swizzled(w[1], n).view(torch.uint8) for w in weights])
    scales = plain.view(torch.float8_e4m3fn).to(device)
    packed = ops.prepack(codes, scales)
    assert packed.shape == (g, -(-n // 64) * -(-k // 64) * 2304)
    for e in range(g):
        alone = ops.prepack(codes[e].clone(), scales[e].view(torch.uint8).clone().view(scales.dtype))
        assert_bits(packed[e], alone, f"matrix {e}")
    got = ops.unpack(packed, n, k)
    assert_bits(got[0], codes, "codes")
    assert_bits(got[1], scales, "scales")


def test_no_rows(device: torch.device) -> None:
    codes = torch.empty(0, 32, dtype=torch.uint8, device=device)
    scales = torch.empty(0, 4, dtype=torch.float8_e4m3fn, device=device)
    packed = ops.prepack(codes, scales)
    assert packed.shape == (0,)
    got = ops.unpack(packed, 0, 64)
    assert got[0].shape == (0, 32)
    assert got[1].shape == (0, 4)


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    codes, compact = weight(65, 80, gen)
    codes, scales = codes.to(device), swizzled(compact % 0x7F, 65).to(device)  # opcheck finds NaN unequal
    opcheck("prepack", codes, scales)
    packed = ops.prepack(codes, scales)
    opcheck("unpack", packed, 65, 80)
    stack = codes.view(1, 65, 40), scales.view(1, *scales.shape)
    assert_fake_is_real("prepack", codes, scales)
    assert_fake_is_real("prepack", *stack)
    assert_fake_is_real("unpack", packed, 65, 80)
    assert_fake_is_real("unpack", packed.view(1, -1), 65, 80)


def test_wrong_sizes_are_named(device: torch.device, gen: torch.Generator) -> None:
    """On every device; bad_decoded.py has the rest for the CPU."""
    codes, compact = weight(65, 80, gen)
    codes, scales = codes.to(device), swizzled(compact, 65).to(device)
    packed = ops.prepack(codes, scales)
    for call, name in (
        (lambda: ops.prepack(codes.flatten(), scales), "codes"),
        (lambda: ops.prepack(codes[:, ::2], scales), "codes"),
        (lambda: ops.prepack(codes, scales[:64]), "scales"),
        (lambda: ops.prepack(codes, scales.view(torch.uint8).t().contiguous().view(scales.dtype)), "scales"),
        (lambda: ops.unpack(packed, 64, 80), "packed"),
        (lambda: ops.unpack(packed, 65, 40), "k"),
        (lambda: ops.unpack(packed, -1, 80), "n"),
        (lambda: ops.unpack(packed.view(torch.int8), 65, 80), "packed"),
        (lambda: ops.unpack(packed.view(2, 2, -1), 65, 80), "packed"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"(^|, ){name}: "):
            call()
