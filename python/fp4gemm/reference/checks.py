"""The checks of the operators' arguments: what the reference refuses beyond fp4gemm._checks."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks, _options


def scales_like(value: object, shape: tuple[int, ...], why: str, device: torch.device) -> Tensor:
    """Block scales of this shape, contiguous, as float8_e4m3fn."""
    x = _checks.is_tensor("scales", value)
    _checks.has_dtype("scales", x, (torch.float8_e4m3fn, torch.uint8))
    _checks.has_shape("scales", x, shape, f", {why}")
    _checks.same_device("scales", x, device, "codes")
    _checks.is_contiguous("scales", x)
    return _checks.as_scales(x)


def refuse(name: str, value: object, wanted: str, because: str) -> None:
    raise NotImplementedError(f"{name}: got {value!r}, must be {wanted} with {because}")


def group_ends(offs: object, m: int, device: torch.device) -> Tensor:
    """offs int32 (g,), g >= 1: non-decreasing within 0..m. Reads it, so this synchronises on a GPU."""
    x = _options.group_ends(offs, device, "x")
    ascending(x, m, "the rows of x")
    return x


def ascending(offs: Tensor, limit: int, what: str) -> list[int]:
    """The entries of offs, which ascend within 0..limit; others are refused. Synchronises on a GPU."""
    before = 0
    ends: list[int] = offs.tolist()
    for i, end in enumerate(ends):
        if end < before:
            raise ValueError(f"offs: entry {i} is {end}, must be at least {before} (ends do not decrease)")
        before = end
    if before > limit:
        raise ValueError(f"offs: the last entry is {before}, must be at most {limit}, {what}")
    return ends


def options(
    per_row: object,
    block_rows: object,
    encode: object,
    four_over_six: object,
    fast_error: object,
    e4m3_max: object,
    hadamard: object,
    signs: object,
) -> None:
    """Types and ranges of what quantize and quantize_both share, and which of them go together."""
    _checks.is_one_of("per_row", per_row, (True, False))
    _checks.is_one_of("block_rows", block_rows, (1, 16))
    _checks.is_one_of("encode", encode, (0, 1))
    _checks.is_one_of("four_over_six", four_over_six, (0, 1, 2))
    _checks.is_one_of("fast_error", fast_error, (False, True))
    _checks.is_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_one_of("hadamard", hadamard, (0, 1, 2))
    if isinstance(signs, bool) or not isinstance(signs, int):
        raise TypeError(f"signs: got {_checks.describe(signs)}, must be an int")
    if not 0 <= signs <= 0xFFFF:
        raise ValueError(f"signs: got {signs}, must be 0 to 0xFFFF")
    if signs and not hadamard:
        raise ValueError(f"signs: got {signs}, must be 0 without hadamard")
    if e4m3_max != 448 and not four_over_six:
        raise ValueError(f"e4m3_max: got {e4m3_max}, must be 448 without four_over_six")
    if block_rows == 16:
        because = "block_rows 16"
        if per_row:
            refuse("per_row", per_row, "False", because)
        if encode:
            refuse("encode", encode, "0 (te)", because)
        if hadamard:
            refuse("hadamard", hadamard, "0", because)
    if four_over_six:
        because = f"four_over_six {four_over_six}"
        if encode:
            refuse("encode", encode, "0 (te)", because)
        if hadamard:
            refuse("hadamard", hadamard, "0", because)


def random_state(value: object, block_rows: int, four_over_six: int, device: torch.device) -> Tensor | None:
    """rng_state int64 (2,), {seed, offset}, or None."""
    if value is None:
        return None
    x = _checks.exact_vector("rng_state", value, 2, torch.int64, device, "x")
    if block_rows == 16:
        raise NotImplementedError("rng_state: got a tensor, must be None with block_rows 16")
    if four_over_six:
        raise NotImplementedError(f"rng_state: got a tensor, must be None with four_over_six {four_over_six}")
    return x
