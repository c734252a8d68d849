"""The checks that the reference makes in addition to those of :mod:`fp4gemm._checks`."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import _checks
from .._checks import options as option_checks
from .._checks import search as search_checks
from ..ops.schema import QuantizeCall, QuantizeSearchedCall, QuantizeStackCall, narrowed


def scales_like(value: object, shape: tuple[int, ...], why: str, device: torch.device) -> Tensor:
    """Check block scales, contiguous and of this shape, and return them as float8_e4m3fn."""
    x = _checks.is_tensor("scales", value)
    _checks.has_dtype("scales", x, (torch.float8_e4m3fn, torch.uint8))
    _checks.has_shape("scales", x, shape, f", {why}")
    _checks.same_device("scales", x, device, "codes")
    _checks.is_contiguous("scales", x)
    return _checks.as_scales(x)


def refuse(name: str, value: object, wanted: str, because: str) -> None:
    raise NotImplementedError(f"{name}: got {value!r}, must be {wanted} with {because}")


def group_ends(offs: object, m: int, device: torch.device) -> Tensor:
    """Check offs, int32 (g,), g >= 1: its entries must be within 0..m and must not decrease.

    The check reads the entries, so it synchronises on a GPU.
    """
    x = option_checks.group_ends(offs, device, "x")
    ascending(x, m, "the rows of x")
    return x


def ascending(offs: Tensor, limit: int, what: str) -> list[int]:
    """Return the entries of offs. Raise ValueError unless they are within 0..limit and do not decrease.

    Reading the entries synchronises on a GPU.
    """
    before = 0
    ends: list[int] = offs.tolist()
    for i, end in enumerate(ends):
        if end < before:
            raise ValueError(f"offs: entry {i} is {end}, must be at least {before} (ends do not decrease)")
        before = end
    if before > limit:
        raise ValueError(f"offs: the last entry is {before}, must be at most {limit}, {what}")
    return ends


def options(call: QuantizeCall) -> None:
    """Raise unless each option of the quantizers has a valid type and value and their combination exists."""
    _checks.is_one_of("per_row", call.per_row, (True, False))
    _checks.is_one_of("block_rows", call.block_rows, (1, 16))
    _checks.is_one_of("encode", call.encode, (0, 1))
    _checks.is_one_of("four_over_six", call.four_over_six, (0, 1, 2))
    _checks.is_one_of("fast_error", call.fast_error, (False, True))
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    _checks.is_one_of("hadamard", call.hadamard, (0, 1, 2))
    signs = call.signs
    if isinstance(signs, bool) or not isinstance(signs, int):
        raise TypeError(f"signs: got {_checks.describe(signs)}, must be an int")
    if not 0 <= signs <= 0xFFFF:
        raise ValueError(f"signs: got {signs}, must be 0 to 0xFFFF")
    if signs and not call.hadamard:
        raise ValueError(f"signs: got {signs}, must be 0 without hadamard")
    if call.e4m3_max != 448 and not call.four_over_six:
        raise ValueError(f"e4m3_max: got {call.e4m3_max}, must be 448 without four_over_six")
    _checks.is_one_of("headroom", call.headroom, _checks.HEADROOMS)
    if call.rng_state is not None:
        _checks.exact_vector("rng_state", call.rng_state, 2, torch.int64, call.x.device, "x")
    if call.rows is not None:
        option_checks.gather_rows(call.rows, call.x.device)
        option_checks.gather_alone(call)
    if call.block_rows == 16:
        because = "block_rows 16"
        if call.per_row:
            refuse("per_row", True, "False", because)
        _refuse_variants(call, because)
    if call.four_over_six:
        _refuse_variants(call, f"four_over_six {call.four_over_six}")


def searched(call: QuantizeSearchedCall) -> None:
    """Raise unless the arguments of quantize_searched are valid."""
    x, amax = call.x, call.amax
    _checks.quantize_input(x)
    _checks.is_one_of("per_row", call.per_row, (True, False))
    _checks.is_one_of("block_rows", call.block_rows, (1, 16))
    if call.block_rows == 16 and call.per_row:
        refuse("per_row", True, "False", "block_rows 16")
    _checks.is_one_of("e4m3_max", call.e4m3_max, _checks.E4M3_BOUNDS)
    search_checks.importance(call.importance, x.shape[1], x.device)
    if amax is not None:
        _checks.exact_vector("amax", amax, x.shape[0] if call.per_row else 1, torch.float32, x.device, "x")
        option_checks.amax_values("amax", amax)


def stack(call: QuantizeStackCall) -> None:
    """Raise unless the arguments of quantize_stack are valid."""
    x, function = _checks.is_tensor("x", call.x), "fp4gemm.reference.quantize_stack"
    _checks.has_rank("x", x, 3, "(g, n, k)")
    g, n, k = x.shape
    if g < 1 or n < 1:
        raise ValueError(f"x: shape is {tuple(x.shape)}, must hold at least one matrix of at least one row")
    _checks.quantize_input(x[0], function)
    if g > 1 and x.stride(0) != n * x.stride(1) and n > 1:
        raise ValueError(f"x: stride along matrices is {x.stride(0)}, must be {n * x.stride(1)}")
    _checks.is_bool("rows", call.rows)
    _checks.is_bool("columns", call.columns)
    if not call.rows and not call.columns:
        raise ValueError("rows: got False, must be True where columns is False")
    if call.columns:
        _checks.is_multiple("x", "n", n, _checks.BLOCK)
    if call.rows and call.block_rows == 1:
        refuse("rows", True, "False", "block_rows 1")
    options(narrowed(QuantizeCall, call, rows=None))
    if call.amax is not None:
        if call.per_row:
            option_checks.given_amax("amax", call.amax, k, True, x.device, stack=g)
        else:
            _checks.exact_vector("amax", call.amax, g, torch.float32, x.device, "x", function)
        option_checks.amax_values("amax", call.amax)


def _refuse_variants(call: QuantizeCall, because: str) -> None:
    if call.encode:
        refuse("encode", call.encode, "0 (te)", because)
    if call.hadamard:
        refuse("hadamard", call.hadamard, "0", because)
    if call.rng_state is not None:
        raise NotImplementedError(f"rng_state: got a tensor, must be None with {because}")
    if call.headroom != 1.0:
        refuse("headroom", call.headroom, "1.0", because)
