"""The operators prepack and unprepack: the layout by definition, the same weight, all codes and scales."""

from __future__ import annotations

import pytest
import torch
from fp4gemm import layout, reference
from fp4gemm.ops import operators
from helpers import assert_bits, assert_same_value, dirty, folded, make_codes
from op_checks import assert_fake_is_real, opcheck
from torch import Tensor

SHAPES = [(1, 16), (64, 64), (63, 48), (65, 80), (128, 256), (129, 272), (200, 336), (7, 2880), (300, 96)]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
# The factors of the kernels: each code as fp16 times 2^-14, and each e4m3 byte without its sign times 2^7.
CODES = (torch.cat((E2M1, -E2M1)) * 2.0**-14).half()
SCALES = (torch.arange(0x80, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * 2.0**7).half()
SCALES.view(torch.int16)[0x7F] = 0x7F80  # NaN


def rotl(words: Tensor, by: int) -> Tensor:
    return ((words << by) | (words >> (32 - by))) & 0xFFFFFFFF


def layout_of_chunk() -> tuple[Tensor, Tensor]:
    """The row and the k of each code, (128, 4, 8) by thread, word and index.

    The layout is that of the A operand of wgmma in registers: of 16 values of k, thread t of a warp has those
    of rows t / 4 and t / 4 + 8 at k = 2 (t % 4), the next, and both plus 8.
    """
    thread = torch.arange(128).view(-1, 1, 1)
    word = torch.arange(4).view(1, -1, 1)
    index = torch.arange(8).view(1, 1, -1)
    rows = 16 * (thread // 32) + thread % 32 // 4 + 8 * (index // 2 % 2) + 0 * word
    depths = 16 * word + 2 * (thread % 4) + index % 2 + 8 * (index // 4)
    return rows, depths


def halves(words: Tensor, mask: int) -> Tensor:
    """The masked bits as pairs of fp16, (.., 2), low half first."""
    masked = words & mask
    return torch.stack((masked & 0xFFFF, masked >> 16), dim=-1).to(torch.int16).view(torch.float16)


def read(packed: Tensor, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Codes and scales of all chunks with their padding, as values of CODES and SCALES."""
    rows, columns = -(-n // 64), -(-k // 64)
    chunks = packed.cpu().view(rows, columns, 2304)
    every = chunks.view(torch.int32).long() & 0xFFFFFFFF
    words = every[..., :512].view(rows, columns, 128, 4)
    pairs = (words, words << 3, words << 7 ^ words << 10, words << 7 ^ rotl(words, 12))
    row, depth = layout_of_chunk()
    codes = torch.full((rows, columns, 64, 64), torch.nan, dtype=torch.float16)
    for index in range(8):
        half = halves(pairs[index // 2], 0x8E008E00)[..., index % 2]
        codes[:, :, row[:, :, index], depth[:, :, index]] = half
    words = every[..., 512:].view(rows, columns, 32, 2)  # two words for rows r and r + 8
    pair = torch.arange(32)
    upper = pair // 8 * 16 + pair % 8
    scales = torch.full((rows, columns, 64, 4), torch.nan, dtype=torch.float16)
    for block in range(4):
        word = words[..., block // 2]
        both = halves(word if block % 2 == 0 else rotl(word, 24), 0x7F807F80)
        scales[:, :, upper, block], scales[:, :, upper + 8, block] = both.unbind(-1)
    flat = codes.permute(0, 2, 1, 3).reshape(64 * rows, 64 * columns)
    return flat, scales.permute(0, 2, 1, 3).reshape(64 * rows, 4 * columns)


def weight(n: int, k: int, gen: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and compact scales with every byte, NaN scales included."""
    return make_codes(n, k, gen), torch.randint(0, 256, (n, k // 16), generator=gen, dtype=torch.uint8)


def swizzled(compact: Tensor, n: int, pad: int = 0) -> Tensor:
    """Swizzled float8_e4m3fn scales with this byte in the padding."""
    rows, columns = layout.padded_scale_shape(n, 16 * compact.shape[1])
    full = torch.full((rows, columns), pad, dtype=torch.uint8)
    full[:n, : compact.shape[1]] = compact
    return layout.swizzle_scales(full).view(torch.float8_e4m3fn)


def nibbles_of(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).int()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_layout(n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    """Each code and scale is where the kernels read it; everything beyond n and k is zero."""
    codes, compact = weight(n, k, gen)
    size = -(-n // 64) * -(-k // 64) * 2304
    dirty(device, size)
    packed = operators.prepack(codes.to(device), swizzled(compact, n, pad=0xFF).to(device))
    assert packed.shape == (size,)
    assert packed.dtype == torch.uint8
    got, scales = read(packed, n, k)
    codes, compact = folded(codes, compact)
    want = torch.zeros_like(got)
    want[:n, :k] = CODES[nibbles_of(codes)]
    assert_bits(got, want, "codes")
    want = torch.zeros_like(scales)
    want[:n, : k // 16] = SCALES[compact.int()]
    assert_bits(scales, want, "scales")


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_unprepack_is_the_inverse(n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    """Every byte is restored if no scale has a sign bit."""
    codes, compact = weight(n, k, gen)
    scales = swizzled(compact & 0x7F, n)
    packed = operators.prepack(codes.to(device), scales.to(device))
    dirty(device, codes.numel(), scales.numel())
    got = operators.unprepack(packed, n, k)
    assert_bits(got[0], codes, "codes")
    assert_bits(got[1], scales, "scales, padding zero")
    assert got[0].device.type == got[1].device.type == device.type


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_negative_scales(n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    """Signs of scales move to the codes: the result is an equal weight, which prepacks to the same bytes."""
    codes, compact = weight(n, k, gen)
    scales = swizzled(compact, n)
    packed = operators.prepack(codes.to(device), scales.to(device))
    want_codes, want_compact = folded(codes, compact)
    dirty(device, codes.numel(), scales.numel())
    got = operators.unprepack(packed, n, k)
    assert_bits(got[0], want_codes, "codes")
    assert_bits(got[1], swizzled(want_compact, n), "scales, padding zero")
    values = (reference.decode(c.cpu(), s.cpu()) for c, s in (got, (codes, scales)))
    assert_same_value(*values, "values")
    assert_bits(operators.prepack(*got), packed, "bytes")


def test_any_words_are_codes(device: torch.device, gen: torch.Generator) -> None:
    """The mapping of codes is one to one: random words are restored, with scales that prepack wrote."""
    codes, compact = weight(128, 192, gen)
    compact &= 0x7F
    packed = operators.prepack(codes, swizzled(compact, 128))
    words = packed.view(6, 2304)[:, :2048]
    words.copy_(torch.randint(0, 256, words.shape, generator=gen, dtype=torch.uint8))
    codes, scales = operators.unprepack(packed.to(device), 128, 192)
    assert_bits(CODES[nibbles_of(codes.cpu())], read(packed, 128, 192)[0], "codes")
    assert_bits(scales, swizzled(compact, 128), "scales")
    assert_bits(operators.prepack(codes, scales), packed, "bytes")


def test_every_code_with_every_scale(device: torch.device) -> None:
    """All 256 scale bytes, also NaN, with all 16 codes, in every position of a word."""
    compact = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(256, 1)
    scales = swizzled(compact, 256)
    for turn in range(16):
        row = (torch.arange(16, dtype=torch.uint8) + turn) % 16
        codes = (row[0::2] | row[1::2] << 4).repeat(256, 1).contiguous()
        packed = operators.prepack(codes.to(device), scales.to(device))
        got = operators.unprepack(packed, 256, 16)
        assert_bits(got[0][:128], codes[:128], "codes before scales without a sign")
        assert_bits(got[0][128:], codes[128:] ^ 0x88, "codes before negative scales")
        assert_bits(got[1], swizzled(compact % 128, 256), "scales")
        left, right = read(packed, 256, 16)
        assert_bits(left[:128, :16].contiguous(), CODES[row.int()].repeat(128, 1), "places")
        assert_bits(right[:, :1].contiguous(), SCALES[compact.int() % 128], "stored scales")
        # The operands of the tensor cores are exact, the signs of zeros included.
        values = CODES[row.int()].float() * 2.0**14 * compact.view(torch.float8_e4m3fn).float()
        assert_same_value(left[:, :16] * right[:, :1], (values * 2.0**-7).half(), "products")
        unpacked = reference.decode(got[0].cpu(), got[1].cpu())
        assert_same_value(unpacked, values.half(), "values")


@pytest.mark.parametrize(("g", "n", "k"), [(1, 64, 64), (3, 7, 16), (5, 65, 336), (2, 128, 96)])
def test_stacks(g: int, n: int, k: int, device: torch.device, gen: torch.Generator) -> None:
    weights = [weight(n, k, gen) for _ in range(g)]
    back = [folded(*w) for w in weights]
    codes = torch.stack([w[0] for w in weights]).to(device)
    # Bytes, because few torch operators support float8.
    scales, want_scales = (
        torch.stack([swizzled(w[1], n).view(torch.uint8) for w in part]).view(torch.float8_e4m3fn).to(device)
        for part in (weights, back)
    )
    packed = operators.prepack(codes, scales)
    assert packed.shape == (g, -(-n // 64) * -(-k // 64) * 2304)
    for e in range(g):
        alone = operators.prepack(codes[e].clone(), scales[e].view(torch.uint8).clone().view(scales.dtype))
        assert_bits(packed[e], alone, f"matrix {e}")
    got = operators.unprepack(packed, n, k)
    assert_bits(got[0], torch.stack([w[0] for w in back]), "codes")
    assert_bits(got[1], want_scales, "scales")


def test_no_rows(device: torch.device) -> None:
    codes = torch.empty(0, 32, dtype=torch.uint8, device=device)
    scales = torch.empty(0, 4, dtype=torch.float8_e4m3fn, device=device)
    packed = operators.prepack(codes, scales)
    assert packed.shape == (0,)
    got = operators.unprepack(packed, 0, 64)
    assert got[0].shape == (0, 32)
    assert got[1].shape == (0, 4)


def test_opcheck(device: torch.device, gen: torch.Generator) -> None:
    codes, compact = weight(65, 80, gen)
    codes, scales = codes.to(device), swizzled(compact % 0x7F, 65).to(device)  # opcheck finds NaN unequal
    opcheck("prepack", codes, scales)
    packed = operators.prepack(codes, scales)
    opcheck("unprepack", packed, 65, 80)
    stack = codes.view(1, 65, 40), scales.view(1, *scales.shape)
    assert_fake_is_real("prepack", codes, scales)
    assert_fake_is_real("prepack", *stack)
    assert_fake_is_real("unprepack", packed, 65, 80)
    assert_fake_is_real("unprepack", packed.view(1, -1), 65, 80)


def test_wrong_sizes_are_named(device: torch.device, gen: torch.Generator) -> None:
    """On every device; bad_decoded.py has the other errors, for the CPU."""
    codes, compact = weight(65, 80, gen)
    codes, scales = codes.to(device), swizzled(compact, 65).to(device)
    packed = operators.prepack(codes, scales)
    for call, name in (
        (lambda: operators.prepack(codes.flatten(), scales), "codes"),
        (lambda: operators.prepack(codes[:, ::2], scales), "codes"),
        (lambda: operators.prepack(codes, scales[:64]), "scales"),
        (
            lambda: operators.prepack(codes, scales.view(torch.uint8).t().contiguous().view(scales.dtype)),
            "scales",
        ),
        (lambda: operators.unprepack(packed, 64, 80), "packed"),
        (lambda: operators.unprepack(packed, 65, 40), "k"),
        (lambda: operators.unprepack(packed, -1, 80), "n"),
        (lambda: operators.unprepack(packed.view(torch.int16), 65, 80), "packed"),
        (lambda: operators.unprepack(packed.view(2, 2, -1), 65, 80), "packed"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError), match=rf"(^|, ){name}: "):
            call()
