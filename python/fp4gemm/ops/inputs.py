"""InputCast: what the operators linear and experts make of their activations, and its number, ``scaling``."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .. import _checks
from .quantize import QuantizeCall

__all__ = ["FP8_ROW", "MXFP8", "NOT_QUANTIZED", "ROW", "TENSOR", "InputCast", "checked_input"]

# The scaling: 0 does not quantize x; 1 gives each row an amax, 2 all rows together, or those of a group; 3
# quantizes x to FP8 tokens, with an amax for each row; 128 quantizes x to MXFP8, for a weight in MXFP8 or
# MXFP4.
NOT_QUANTIZED, ROW, TENSOR, FP8_ROW, MXFP8 = 0, 1, 2, 3, 128
_OPTIONS = 4  # the options of the cast lie above the bits of the scaling; InputCast of cpp/torch reads them
_FAST_ERROR, _WITH_256, _PER_TOKEN = 16, 32, 64
_END = 128  # of the numbers with options


class InputCast(NamedTuple):
    """A scaling, and options of :class:`QuantizeCall` beside it, which only ROW and TENSOR may have.

    The operators take it as one integer, the parameter ``scaling``::

        scaling + 4 * four_over_six + 16 * fast_error + 32 * (e4m3_max is 256) + 64 * encode
    """

    scaling: int
    four_over_six: int = 0
    fast_error: bool = False
    e4m3_max: int = 448
    encode: int = 0

    @property
    def number(self) -> int:
        """The number of the cast."""
        bound = _WITH_256 if self.e4m3_max == min(_checks.E4M3_BOUNDS) else 0
        options = _OPTIONS * self.four_over_six + _FAST_ERROR * self.fast_error + _PER_TOKEN * self.encode
        return self.scaling + options + bound

    @property
    def is_default(self) -> bool:
        """Whether the options have their defaults, the only ones that kernels have which fuse the cast."""
        return self == InputCast(self.scaling)

    @classmethod
    def of_options(cls, scaling: int, arguments: Mapping[str, Any]) -> InputCast:
        """The cast with these arguments of a quantize operator, of which it takes its own."""
        return cls(scaling, *(arguments[name] for name in cls._fields[1:]))

    def options(self) -> dict[str, Any]:
        """The options that differ from their defaults, as arguments of a quantize operator."""
        defaults = InputCast(self.scaling)
        return {name: value for name, value in self._asdict().items() if value != getattr(defaults, name)}

    def quantize_call(
        self, x: Tensor, offs: Tensor | None = None, residual_channels: Tensor | None = None
    ) -> QuantizeCall:
        """The call of ``quantize`` that makes this cast of the rows of x to NVFP4."""
        return QuantizeCall(
            x,
            None,
            self.scaling == ROW,
            offs=offs,
            residual_channels=residual_channels,
            **self.options(),
        )


def _of_number(number: int) -> InputCast:
    """The cast of a number; ValueError for one that is none."""
    four_over_six = number // _OPTIONS % 4
    if not 0 <= number < _END or four_over_six > 2:
        raise ValueError(
            f"scaling: got {number}, must be 0, 1, 2 or 3, with options of the cast of 1 and 2 below {_END}, "
            f"or {MXFP8}"
        )
    bounds = max(_checks.E4M3_BOUNDS), min(_checks.E4M3_BOUNDS)
    made = InputCast(
        number % _OPTIONS,
        four_over_six,
        bool(number & _FAST_ERROR),
        bounds[bool(number & _WITH_256)],
        int(bool(number & _PER_TOKEN)),
    )
    if not made.is_default and made.scaling not in (ROW, TENSOR):
        raise ValueError(f"scaling: got {number}, must have no options of the cast beside {made.scaling}")
    if not four_over_six and (made.fast_error or made.e4m3_max != bounds[0]):
        raise ValueError(f"scaling: got {number}, must have four over six with its error or the bound 256")
    if four_over_six and made.encode:
        raise ValueError(f"scaling: got {number}, must have four over six or the encode, not both")
    return made


def _casts() -> dict[int, InputCast]:
    found = {MXFP8: InputCast(MXFP8)}
    for number in range(_END):
        with contextlib.suppress(ValueError):
            found[number] = _of_number(number)
    return found


_CASTS = _casts()  # by their numbers; a plain dict, which torch.compile reads


def checked_input(number: object) -> InputCast:
    """The cast of a number; TypeError or ValueError for one that is none."""
    _checks.is_int("scaling", number, 0)
    found = _CASTS.get(number)  # type: ignore[call-overload]
    return _of_number(number) if found is None else found  # type: ignore[arg-type]
