"""Checks of the values of tensors that another program may have made; each synchronises on a GPU.

Nothing is read while a graph is traced or captured, on the meta device, or in a subclass of torch.Tensor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._checks import has_memory

_LARGEST = 0x7E  # 448. 0x7F and 0xFF are NaN, and from 0x80 on the sign bit is set.

__all__ = [
    "amax_problem",
    "are_readable",
    "check_amax",
    "check_block_scales",
    "nan_problem",
    "scales_problem",
]


def are_readable(x: Tensor) -> bool:
    """Return whether the values of x can be read now."""
    return has_memory(x) and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def scales_problem(scales: Tensor) -> str | None:
    """Return why e4m3 block scales of any shape are not allowed; None if they are, or cannot be read."""
    if not are_readable(scales) or scales.numel() == 0:
        return None
    bits = scales.detach().view(torch.uint8)
    if int(bits.max()) <= _LARGEST:
        return None
    wrong = bits > _LARGEST
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {bits.numel()} block scales are NaN or have the sign bit set, the first is "
        f"0x{int(bits[first]):02X} at {list(first)}; a block scale must be 0x00 to 0x7E, 0 to 448"
    )


def nan_problem(x: Tensor, nan: int) -> str | None:
    """Return why float8 numbers are not allowed: the byte ``nan``, of any sign in e4m3; None if they are."""
    if not are_readable(x) or x.numel() == 0:
        return None
    bits = x.detach().view(torch.uint8)
    wrong = (bits & 0x7F if nan == 0x7F else bits) == nan
    if not bool(wrong.any()):
        return None
    first = wrong.nonzero()[0].tolist()
    return f"{int(wrong.sum())} of {bits.numel()} values are NaN, the first at {first}; all must be numbers"


def check_block_scales(name: str, scales: Tensor) -> None:
    """Raise ValueError unless e4m3 block scales are numbers without a sign."""
    problem = scales_problem(scales)
    if problem is not None:
        raise ValueError(f"{name}: {problem}")


def check_amax(name: str, amax: Tensor) -> None:
    """Raise ValueError for an amax that is NaN or negative. That of infinite values is infinite."""
    if not are_readable(amax):
        return
    wrong = ~(amax >= 0)  # true for NaN, too
    if bool(wrong.any()):
        first = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{name}: {int(wrong.sum())} of {amax.numel()} values are NaN or negative, the first is "
            f"{amax[first].item():.9g} at {list(first)}; an amax must be at least 0"
        )


def amax_problem(amax: Tensor) -> str | None:
    """Return why float32 amaxes of any shape are not allowed; None if they are, or cannot be read."""
    if not are_readable(amax):
        return None
    wrong = amax.signbit() | ~amax.isfinite()
    if not bool(wrong.any()):
        return None
    first = tuple(wrong.nonzero()[0].tolist())
    return (
        f"{int(wrong.sum())} of {amax.numel()} values are NaN, infinite or negative, the first is "
        f"{amax[first].item():.9g} at {list(first)}; an amax must be finite and not negative"
    )
