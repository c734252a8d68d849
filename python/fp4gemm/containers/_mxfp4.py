"""MXFP4 weights as NVFP4 ones: codes stay, and powers of two become e4m3 block scales and an amax.

Let e be the e8m0 byte of a block of 32 elements, whose scale is 2^(e - 127), and E the largest e of a row
among the blocks that have a value other than 0. The row gets the amax A = 6 * 2^(E - 127), and B is 256, so
that a block scale s means s * 2^(E - 127) / 256. The block gets s = 2^(8 - E + e), twice, for its two
blocks of 16. e4m3 has the powers of two from 2^-9, which is subnormal, to 2^8, so that every block with
e >= E - 17 keeps its codes and its values. A block with a smaller e gets s = 2^-9, and its elements q become
e2m1(q * 2^(e - E + 17)), rounded to nearest, ties to the even code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from .. import _checks, _values

__all__ = ["BOUND", "SPAN", "MXFP4Report", "rebased"]

BOUND = 256  # B of the result: A / B is a power of two times 6, and 2^8 is the scale of the largest block
SPAN = 17  # how far below the largest exponent of a row a block may lie: from 2^8 down to 2^-9
NAN = 255
LARGEST = 244  # dequantize computes fl(s * A), and 256 * 6 * 2^(E - 127) is infinite from E = 245 on
HALVES = 2  # blocks of 16 in a block of 32
# The bytes of 2^-9 to 2^8 in e4m3: three subnormal ones, then exponent fields from 1 to 15.
POWERS = (1, 2, 4, *(field << 3 for field in range(1, 16)))
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHIFTS = 5  # 6 / 2^5 and all below are rounded to 0


@dataclasses.dataclass(frozen=True)
class MXFP4Report:
    """What :meth:`fp4gemm.NVFP4Tensor.from_mxfp4` could not keep exactly.

    Attributes:
        blocks: the blocks of 32 elements of the weight.
        span: how far below the largest exponent of its row a block lies, at most; of blocks with a value
            other than 0. Up to 17 every value is exact.
        rounded_blocks: the blocks with a value that was rounded.
        rounded_elements: the elements whose value was rounded; each changed by at most 2^-19 times the scale
            of the largest block of its row.
    """

    blocks: int
    span: int
    rounded_blocks: int
    rounded_elements: int

    @property
    def is_exact(self) -> bool:
        """Whether every value is that of the MXFP4 weight."""
        return self.rounded_elements == 0


def rebased(
    codes: object,
    scales: object,
    scaling: object,
    inexact: object,
    report: Callable[[MXFP4Report], object] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes (.., n, k/2), block scales (.., n, k/16) in plain order and amax of an MXFP4 weight.

    The arguments are those of ``from_mxfp4``, unchecked.
    """
    blocks, exponents = _checked(codes, scales)
    _checks.is_one_of("scaling", scaling, ("row", "tensor"))
    _checks.is_one_of("inexact", inexact, ("error", "round"))
    _checks.is_callback("report", report)
    if not (_values.are_readable(blocks) and _values.are_readable(exponents)):
        raise ValueError(
            f"codes: is on {blocks.device} or in a graph that is captured, must be readable: the amax "
            "depends on the values"
        )
    e = exponents.to(torch.int16)
    is_used = (blocks & 0x77).amax(-1) > 0
    largest = torch.where(is_used, e, -1).amax(-1 if scaling == "row" else (-2, -1), keepdim=True)
    _check_exponents(e, largest)
    below = torch.where(is_used, largest - e, 0)
    index = (SPAN - below).clamp(min=0).int()
    powers = torch.tensor(POWERS, dtype=torch.uint8, device=e.device)
    made = torch.where(is_used, powers[index], 0).repeat_interleave(HALVES, -1)
    # The bits of 6 * 2^(E - 127) = 1.5 * 2^(E - 125); no exponentiation, so that no subnormal is flushed.
    bits = ((largest.to(torch.int32) + 2) << 23) | 0x400000
    amax = torch.where(largest >= 0, bits, 0).view(torch.float32).squeeze(-1)
    packed, about = _shifted(blocks, below)
    if not about.is_exact and inexact == "error":
        raise ValueError(
            f"scales: {about.rounded_blocks} of {about.blocks} blocks have exponents more than {SPAN} below "
            f"the largest of their {'row' if scaling == 'row' else 'matrix'} (at most {about.span} below it) "
            "and values that NVFP4 does not hold; inexact='round' rounds these to the nearest"
        )
    if report is not None:
        report(about)
    packed = packed.reshape(*e.shape[:-1], -1).contiguous()
    return packed.clone() if _checks.is_misaligned(packed) else packed, made, amax.contiguous()


def _checked(codes: object, scales: object) -> tuple[Tensor, Tensor]:
    blocks = _checks.is_tensor("codes", codes)
    _checks.has_dtype("codes", blocks, (torch.uint8,))
    exponents = _checks.is_tensor("scales", scales)
    _checks.has_dtype("scales", exponents, (torch.uint8, torch.float8_e8m0fnu))
    _checks.same_device("scales", exponents, blocks.device, "the codes")
    if blocks.dim() not in (3, 4) or blocks.shape[-1] != 16 or 0 in blocks.shape:
        raise ValueError(
            f"codes: shape is {tuple(blocks.shape)}, must be (n, k/32, 16) or (g, n, k/32, 16), without a 0"
        )
    if exponents.shape != blocks.shape[:-1]:
        raise ValueError(
            f"scales: shape is {tuple(exponents.shape)}, must be {tuple(blocks.shape[:-1])}, one for each "
            "block of 32 elements of the codes"
        )
    return blocks, exponents.contiguous().view(torch.uint8)


def _check_exponents(e: Tensor, largest: Tensor) -> None:
    is_nan = e == NAN
    if bool(is_nan.any()):
        first = is_nan.nonzero()[0].tolist()
        raise ValueError(
            f"scales: {int(is_nan.sum())} of {e.numel()} are 255, the NaN of e8m0, the first at {first}; "
            "must be 0 to 254"
        )
    top = int(largest.max())
    if top > LARGEST:
        raise ValueError(
            f"scales: holds {top} for a block that is not zero, must be at most {LARGEST}, 2^117: the block "
            "scale times amax is infinite in float32"
        )


def _shifted(blocks: Tensor, below: Tensor) -> tuple[Tensor, MXFP4Report]:
    """The codes with those of blocks too far below the largest exponent rounded, and the report."""
    span, num_blocks = int(below.max()), below.numel()
    if span <= SPAN:
        return blocks, MXFP4Report(num_blocks, span, 0, 0)
    is_low = below > SPAN
    old = blocks[is_low]
    shifts = (below[is_low] - SPAN).clamp(max=SHIFTS).long() - 1
    table, changed = (t.to(blocks.device) for t in _tables())
    at = shifts.unsqueeze(-1) * 256 + old
    new = blocks.clone()
    new[is_low] = table[at]
    elements = changed[at].sum(-1)
    return new, MXFP4Report(num_blocks, span, int((elements > 0).sum()), int(elements.sum()))


def _tables() -> tuple[Tensor, Tensor]:
    """By shift and byte: the byte whose codes are divided by 2^shift, and how many of the two changed."""
    codes: list[int] = []
    changed: list[int] = []
    for shift in range(1, SHIFTS + 1):
        made = [_divided(code, shift) for code in range(16)]
        for byte in range(256):
            low, high = made[byte & 15], made[byte >> 4]
            codes.append(low[0] | high[0] << 4)
            changed.append(low[1] + high[1])
    return torch.tensor(codes, dtype=torch.uint8), torch.tensor(changed, dtype=torch.int64)


def _divided(code: int, shift: int) -> tuple[int, bool]:
    """The code of e2m1(q / 2^shift), with the sign of q, and whether the value is another one."""
    x = MAGNITUDES[code & 7] / 2**shift
    near = min(range(8), key=lambda c: (abs(MAGNITUDES[c] - x), c & 1))
    return code & 8 | near, MAGNITUDES[near] != x
