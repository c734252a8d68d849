"""The quantizers as layers call them: by a cast, whose options were checked when it was made.

Each function returns None where the caller has to go through fp4gemm.quantize or quantize_both: while a graph
is traced, for a stack or a tensor that the kernels do not read as it is, before the first call on a device,
and where the operator refuses the call, which the checks then explain.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import support
from .._checks import options as option_checks
from ..containers.decoded import DecodedTensor
from ..containers.nvfp4 import NVFP4Tensor
from ..ops import operators
from .recipe import Cast

__all__ = ["along", "both"]

_QUANTIZE = operators.below_wrapper(operators.quantize)
_QUANTIZE_DECODED = operators.below_wrapper(operators.quantize_decoded)
_QUANTIZE_BOTH = operators.below_wrapper(operators.quantize_both)
_READY = support.READY["quantize"]
_DEFAULTS = option_checks.defaults_of(option_checks.QuantizeOptions)
_is_compiling = torch.compiler.is_compiling


class _Options(NamedTuple):
    """The operators' arguments for a cast."""

    per_row: bool
    block_rows: int
    others: tuple[Any, ...]  # from encode to signs
    headroom: float
    e4m3_max: int
    hadamard_signs: int | None  # of the container


@functools.lru_cache(maxsize=256)
def _options(cast: Cast, hadamard: str | None, signs: int) -> _Options:
    given: dict[str, Any] = {name: getattr(cast, name) for name in _DEFAULTS if hasattr(cast, name)}
    given["hadamard"] = hadamard
    if hadamard is not None:
        given["hadamard_signs"] = signs
    made = option_checks.operator_arguments({**_DEFAULTS, **given})
    names = ("encode", "four_over_six", "fast_error", "e4m3_max", "hadamard", "signs")
    return _Options(
        made["per_row"],
        made["block_rows"],
        tuple(made[name] for name in names),
        made["headroom"],
        made["e4m3_max"],
        None if hadamard is None else signs,
    )


def _is_plain(x: Tensor, cast: Cast, state: Tensor | None) -> bool:
    """Whether the operators may be called with x as it is; a state that is not given must be drawn first."""
    return (
        not _is_compiling()
        and type(x) is Tensor
        and x.dim() == 2
        and x.is_contiguous()
        and x.get_device() in _READY
        and not (cast.stochastic and state is None)
    )


def along(
    x: Tensor,
    axis: int,
    cast: Cast,
    signs: int,
    state: Tensor | None,
    offs: Tensor | None,
    decoded: bool,
    amax: Tensor | None = None,
) -> NVFP4Tensor | DecodedTensor | None:
    """fp4gemm.quantize of x (m, k) along axis -1 or 0; amax: that of the whole tensor, if it is known."""
    if not _is_plain(x, cast, state):
        return None
    per_row, block_rows, others, headroom, bound, own_signs = _options(cast, cast.hadamard, signs)
    state = state if cast.stochastic else None
    dim = 1 if axis == 0 and offs is not None else 0
    try:
        if decoded:
            data, found = _QUANTIZE_DECODED(x, amax, per_row, axis, *others, state, headroom, offs)
        else:
            codes, scales, found = _QUANTIZE(
                x, amax, per_row, axis, block_rows, *others, state, headroom, offs
            )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):  # the latter of a CPU
        return None
    found = found if amax is None else amax
    if decoded:
        return DecodedTensor._trusted(data, found, bound, own_signs, offs, dim)
    return NVFP4Tensor._trusted(codes, scales, found, bound, offs, own_signs, dim)


def both(
    x: Tensor, cast: Cast, hadamard: str | None, signs: int, state: Tensor | None, offs: Tensor | None
) -> tuple[NVFP4Tensor, NVFP4Tensor] | None:
    """fp4gemm.quantize_both of x (m, k)."""
    if not _is_plain(x, cast, state):
        return None
    per_row, block_rows, others, headroom, bound, own_signs = _options(cast, hadamard, signs)
    state = state if cast.stochastic else None
    try:
        codes, scales, found, codes_t, scales_t, found_t = _QUANTIZE_BOTH(
            x, None, None, per_row, block_rows, *others, state, headroom, offs
        )
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError):  # the latter of a CPU
        return None
    return (
        NVFP4Tensor._trusted(codes, scales, found, bound, offs),
        NVFP4Tensor._trusted(codes_t, scales_t, found_t, bound, offs, own_signs, 0 if offs is None else 1),
    )
