"""The quantizers as layers call them: by a cast, whose options were checked when it was made.

Each function calls the operator, or else fp4gemm.quantize or quantize_both: while a graph is traced, for a
stack or a tensor that the kernels do not read as it is, before the first call on a device, and where the
operator refuses the call, which the checks then explain (:mod:`fp4gemm._refusals`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _checks, support
from .._refusals import REFUSALS, explained
from ..containers.decoded import DecodedTensor
from ..containers.nvfp4 import NVFP4Tensor
from ..ops import operators
from ..ops import options as option_checks
from ..ops.quantize import QuantizeCall
from ..quantize import quantize, quantize_both
from .recipe import Cast

__all__ = ["along", "both", "keywords"]

_QUANTIZE = operators.below_wrapper(operators.quantize)
_QUANTIZE_DECODED = operators.below_wrapper(operators.quantize_decoded)
_QUANTIZE_BOTH = operators.below_wrapper(operators.quantize_both)
_READY = support.READY["quantize"]
_DEFAULTS = option_checks.defaults_of(option_checks.QuantizeOptions)
# The fields of Cast that are keywords of the quantizers as they are: all but those that keywords() adds, and
# the source, which is no keyword.
_PLAIN_FIELDS = tuple(
    each.name for each in dataclasses.fields(Cast) if each.name not in ("hadamard", "stochastic", "source")
)
# The options of the operators around the state, which a call has, in their order.
_FIELDS = QuantizeCall._fields
_BEFORE = _FIELDS[_FIELDS.index("block_rows") + 1 : _FIELDS.index("rng_state")]
_AFTER = _FIELDS[_FIELDS.index("rng_state") + 1 : _FIELDS.index("offs")]
_is_compiling = torch.compiler.is_compiling


class _Options(NamedTuple):
    """The operators' arguments for a cast."""

    per_row: bool
    block_rows: int
    before: tuple[Any, ...]  # from block_rows to rng_state
    after: tuple[Any, ...]  # from rng_state to offs
    e4m3_max: int
    hadamard_signs: int | None  # of the container


def keywords(cast: Cast, hadamard: str | None, signs: int, state: Tensor | None) -> dict[str, Any]:
    """The keywords of fp4gemm.quantize for a cast; ``hadamard`` is that of the copy."""
    options: dict[str, Any] = {name: getattr(cast, name) for name in _PLAIN_FIELDS}
    if hadamard is not None:
        options |= {"hadamard": hadamard, "hadamard_signs": signs}
    if cast.stochastic:
        options |= {"stochastic": True, "rng_state": state}
    return options


@functools.lru_cache(maxsize=256)
def _options(cast: Cast, hadamard: str | None, signs: int) -> _Options:
    made = option_checks.operator_arguments({**_DEFAULTS, **keywords(cast, hadamard, signs, None)})
    return _Options(
        made["per_row"],
        made["block_rows"],
        tuple(made[name] for name in _BEFORE),
        tuple(made[name] for name in _AFTER),
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
) -> NVFP4Tensor | DecodedTensor:
    """fp4gemm.quantize of x along axis -1 or 0; amax: that of the whole tensor, if it is known."""
    args = (x, axis, cast, signs, state, offs, decoded, amax)
    if not _is_plain(x, cast, state):
        return _checked_along(*args)
    per_row, block_rows, before, after, bound, own_signs = _options(cast, cast.hadamard, signs)
    state = state if cast.stochastic else None
    dim = 1 if axis == 0 and offs is not None else 0
    try:
        if decoded:
            data, found = _QUANTIZE_DECODED(x, amax, per_row, axis, *before, state, *after, offs)
        else:
            codes, scales, found = _QUANTIZE(x, amax, per_row, axis, block_rows, *before, state, *after, offs)
    except REFUSALS as error:
        if not _checks.is_readable(x):  # it is copied first
            return _checked_along(*args)
        return explained("fp4gemm.training: quantize", error, _checked_along, *args)
    found = found if amax is None else amax
    if decoded:
        return DecodedTensor._trusted(data, found, bound, own_signs, offs, dim)
    return NVFP4Tensor._trusted(codes, scales, found, bound, offs, own_signs, dim)


def _checked_along(
    x: Tensor,
    axis: int,
    cast: Cast,
    signs: int,
    state: Tensor | None,
    offs: Tensor | None,
    decoded: bool,
    amax: Tensor | None,
) -> NVFP4Tensor | DecodedTensor:
    options = keywords(cast, cast.hadamard, signs, state)
    options |= {"axis": axis, "offs": offs, "amax": amax}
    return quantize(x, decoded=decoded, **options)


def both(
    x: Tensor, cast: Cast, hadamard: str | None, signs: int, state: Tensor | None, offs: Tensor | None
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    """fp4gemm.quantize_both of x; ``hadamard`` is that of the second copy."""
    args = (x, cast, hadamard, signs, state, offs)
    if not _is_plain(x, cast, state):
        return _checked_both(*args)
    per_row, block_rows, before, after, bound, own_signs = _options(cast, hadamard, signs)
    state = state if cast.stochastic else None
    try:
        codes, scales, found, codes_t, scales_t, found_t = _QUANTIZE_BOTH(
            x, None, None, per_row, block_rows, *before, state, *after, offs
        )
    except REFUSALS as error:
        if not _checks.is_readable(x):  # it is copied first
            return _checked_both(*args)
        return explained("fp4gemm.training: quantize_both", error, _checked_both, *args)
    return (
        NVFP4Tensor._trusted(codes, scales, found, bound, offs),
        NVFP4Tensor._trusted(codes_t, scales_t, found_t, bound, offs, own_signs, 0 if offs is None else 1),
    )


def _checked_both(
    x: Tensor, cast: Cast, hadamard: str | None, signs: int, state: Tensor | None, offs: Tensor | None
) -> tuple[NVFP4Tensor, NVFP4Tensor]:
    return quantize_both(x, offs=offs, **keywords(cast, hadamard, signs, state))
