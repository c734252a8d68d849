"""The options of the quantizers: one table of their names, defaults, values and operator parameters.

:class:`QuantizeOptions` is that table. The signatures of the quantizers, the checks of the values and the
arguments of the operators are derived from it. The errors follow :mod:`fp4gemm._checks`, and a combination of
options that no kernel implements raises NotImplementedError. No check reads device memory, so none
synchronises.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_type_hints

import torch
from torch import Tensor

from .. import _checks
from ..ops.schema import QuantizeCall

_INT32 = torch.iinfo(torch.int32)
SIGNS = 0xD7E8  # TransformerEngine's sign vector: element r of a block is negated if bit r is set


class Option(NamedTuple):
    """A keyword of the quantizers: its default, and its values for a parameter of the operators."""

    default: Any
    parameter: str = ""  # a parameter of the operators; `values` maps the keyword to it
    values: Mapping[Any, Any] = {}


class QuantizeOptions(TypedDict, total=False):
    """The keywords that fp4gemm.quantize and fp4gemm.quantize_both share."""

    scaling: Annotated[Literal["row", "tensor"], Option("row", "per_row", {"row": True, "tensor": False})]
    block: Annotated[tuple[int, int], Option((1, 16), "block_rows", {(1, 16): 1, (16, 16): 16})]
    encode: Annotated[Literal["te", "te_per_token"], Option("te", "encode", {"te": 0, "te_per_token": 1})]
    four_over_six: Annotated[
        Literal["mae", "mse"] | None, Option(None, "four_over_six", {None: 0, "mae": 1, "mse": 2})
    ]
    four_over_six_error: Annotated[
        Literal["exact", "fast"], Option("exact", "fast_error", {"exact": False, "fast": True})
    ]
    e4m3_max: Annotated[Literal[448, 256] | None, Option(None)]
    hadamard: Annotated[
        Literal["bf16", "fp32"] | None, Option(None, "hadamard", {None: 0, "bf16": 1, "fp32": 2})
    ]
    hadamard_signs: Annotated[int, Option(SIGNS)]
    stochastic: Annotated[bool, Option(False)]
    generator: Annotated[torch.Generator | None, Option(None)]
    rng_state: Annotated[Tensor | None, Option(None)]
    headroom: Annotated[float, Option(1.0, "headroom", {value: value for value in _checks.HEADROOMS})]


class QuantizeKeywords(QuantizeOptions, total=False):
    """All keywords of fp4gemm.quantize except decoded, which determines the type of the result."""

    axis: Annotated[Literal[-1, 0], Option(-1)]
    amax: Annotated[Tensor | None, Option(None)]
    offs: Annotated[Tensor | None, Option(None)]
    rows: Annotated[Tensor | None, Option(None)]
    scale_search: Annotated[Literal["mse"] | None, Option(None)]
    importance: Annotated[Tensor | None, Option(None)]


class QuantizeBothKeywords(QuantizeOptions, total=False):
    """All keywords of fp4gemm.quantize_both."""

    amax: Annotated[Tensor | None, Option(None)]
    amax_t: Annotated[Tensor | None, Option(None)]
    offs: Annotated[Tensor | None, Option(None)]


_F = TypeVar("_F", bound=Callable[..., Any])
OPTIONS: dict[str, Option] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(QuantizeOptions, include_extras=True).items()
}


def defaults_of(keywords: Any) -> dict[str, Any]:
    """Return the default of each keyword of a TypedDict of options."""
    hints = get_type_hints(keywords, include_extras=True)
    return {name: hint.__metadata__[0].default for name, hint in hints.items()}


def with_keywords(keywords: Any) -> Callable[[_F], _F]:
    """Put the keywords of a TypedDict of options into the signature of a function that accepts them as **."""

    def decorate(function: _F) -> _F:
        own = inspect.signature(function)
        hints = get_type_hints(keywords)
        first = [p for p in own.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        last = [p for p in own.parameters.values() if p.kind is p.KEYWORD_ONLY]
        named = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in defaults_of(keywords).items()
        ]
        shown = own.replace(parameters=[*first, *named, *last])
        function.__signature__ = shown  # type: ignore[attr-defined]
        return function

    return decorate


def completed(function: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call, with defaults for those that are omitted."""
    for name in given:
        if name not in defaults:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
    return {**defaults, **given}


def operator_arguments(options: Mapping[str, Any], offs: object = None) -> dict[str, Any]:
    """Return the arguments of an operator but tensors. Raise for an invalid value or combination.

    Args:
        options: a value for each of OPTIONS; others are ignored.
        offs: the ends of groups, or None.
    """
    made = {}
    for name, option in OPTIONS.items():
        if option.values:
            value = options[name]
            is_choice(name, value, tuple(option.values))
            made[option.parameter] = option.values[value]
    four_over_six, bound = options["four_over_six"], options["e4m3_max"]
    is_choice("e4m3_max", bound, (None, *_checks.E4M3_BOUNDS))
    signs, hadamard = options["hadamard_signs"], options["hadamard"]
    check_signs(signs)
    _checks.is_bool("stochastic", options["stochastic"])
    if hadamard is None and signs != SIGNS:
        raise ValueError(
            f"hadamard_signs: got {signs:#x}, must be omitted without hadamard ('bf16' or 'fp32')"
        )
    if bound == 256 and four_over_six is None:
        raise ValueError("e4m3_max: got 256, must be 448 without four_over_six and scale_search")
    _go_together(options, offs)
    made["e4m3_max"] = bound if bound is not None else 448 if four_over_six is None else 256
    made["signs"] = 0 if hadamard is None else signs
    return made


def _go_together(options: Mapping[str, Any], offs: object) -> None:
    """Raise NotImplementedError for options that exclude each other."""
    scaling, encode, hadamard = options["scaling"], options["encode"], options["hadamard"]
    headroom = options["headroom"]
    present = (
        ("scaling", scaling, scaling == "row"),
        ("encode", encode, encode == "te_per_token"),
        ("hadamard", hadamard, hadamard is not None),
        ("stochastic", options["stochastic"], options["stochastic"]),
        ("headroom", headroom, headroom != 1.0),
        ("offs", "groups", offs is not None),
    )
    if options["block"] == (16, 16):
        for name, value, is_present in present:
            if is_present:
                raise NotImplementedError(
                    f"block: got (16, 16) with {name} {value!r}, must be (1, 16) with it; (16, 16) needs "
                    "scaling 'tensor', encode 'te', headroom 1.0, no hadamard, no stochastic rounding and no "
                    "groups"
                )
    if options["four_over_six"] is not None:
        for name, value, is_present in present[1:5]:
            if is_present:
                raise NotImplementedError(
                    f"four_over_six: got {options['four_over_six']!r} with {name} {value!r}, must be None "
                    "with it; four_over_six needs encode 'te', headroom 1.0, no hadamard and no stochastic "
                    "rounding"
                )


def is_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Check as :func:`fp4gemm._checks.is_one_of` does; the first allowed value may be None."""
    if allowed[0] is not None:
        _checks.is_one_of(name, value, allowed)
    elif value is not None and (type(value) is not type(allowed[1]) or value not in allowed):
        error = ValueError if type(value) is type(allowed[1]) else TypeError
        got = repr(value) if error is ValueError else _checks.describe(value)
        raise error(f"{name}: got {got}, must be {_checks.listing([repr(item) for item in allowed])}")


def axis(value: object, x: Tensor, step: int | None) -> int:
    """Check and return axis, -1 or 0; 0 needs an x (.., m, k) whose m is a positive multiple of ``step``.

    If ``step`` is None, m is not checked.
    """
    _checks.is_int("axis", value, -1)
    if value not in (-1, 0):
        raise ValueError(f"axis: got {value}, must be -1 (blocks along k) or 0 (blocks along m)")
    if value == 0 and step is not None:
        _checks.is_multiple("x", "m", x.shape[-2], step)
    return 0 if value == 0 else -1


def check_decoded(value: object, block_rows: int) -> None:
    """Raise unless decoded is a bool. It must be False if no operator makes the decoded result directly."""
    _checks.is_bool("decoded", value)
    if value and block_rows == 16:
        raise NotImplementedError(
            "decoded: got True with block (16, 16), must be False with it (use fp4gemm.decode on the result)"
        )


def group_ends(value: object, device: torch.device, other: str) -> Tensor:
    """Check and return offs, int32 (g,) with g >= 1, the ends of groups of rows. The values are not read."""
    x = _checks.exact_vector("offs", value, None, torch.int32, device, other)
    if x.shape[0] < 1:
        raise ValueError("offs: shape is (0,), must have at least one entry")
    return x


def gather_rows(value: object, device: torch.device) -> Tensor:
    """Check and return rows, int32 (m,), the rows of x to quantize. The values are not read."""
    return _checks.exact_vector("rows", value, None, torch.int32, device, "x")


def gather_alone(call: QuantizeCall) -> None:
    """Raise NotImplementedError for a call with rows and an option that no kernel combines with them."""
    wanted = QuantizeCall(call.x, None, True, signs=call.signs, offs=call.offs, rows=call.rows)
    for name, value, default in zip(QuantizeCall._fields, call, wanted, strict=True):
        if value is not default and (isinstance(value, Tensor) or value != default):
            raise NotImplementedError(
                f"rows: got a tensor with {name} {_checks.describe(value)}, must be None with it; rows needs "
                "scaling 'row', axis -1, an amax that is computed, and the defaults of the other options"
            )


def as_int32(offs: Any) -> Any:
    """Convert int64 offs, as cumsum returns them, to int32; return any other value unchanged.

    Entries outside of int32 are refused on the CPU. On other devices they are clamped, because reading them
    would synchronise.
    """
    if not isinstance(offs, Tensor) or offs.dtype is not torch.int64:
        return offs
    clamped = offs.clamp(_INT32.min, _INT32.max)
    if offs.device.type == "cpu" and _checks.has_memory(offs):
        outside = (clamped != offs).flatten()
        if outside.any():
            i = int(outside.nonzero()[0])
            raise ValueError(f"offs: entry {i} is {offs.flatten()[i].item()}, must be within int32")
    return clamped.to(torch.int32)


def given_amax(
    name: str,
    value: object,
    rows: int,
    per_row: bool,
    device: torch.device,
    *,
    axis: int = -1,
    groups: int = 0,
    stack: int = 0,
) -> Tensor:
    """Check and return a given amax of a result that has ``rows`` rows. The values are not read.

    It is float32 (rows,) with per_row, else (1,). With groups it is (groups,) unless per_row, and (groups,
    rows) with per_row and axis 0. Of a stack it is (stack, rows) or (stack, 1).
    """
    shape: tuple[int, ...] = (rows if per_row else max(groups, 1),)
    if stack:
        shape = (stack, rows if per_row else 1)
    elif groups and per_row and axis == 0:
        shape = (groups, rows)
    x = _checks.is_tensor(name, value)
    _checks.has_dtype(name, x, (torch.float32,))
    _checks.has_shape(name, x, shape)
    _checks.same_device(name, x, device, "x")
    _checks.is_contiguous(name, x)
    _checks.no_grad(name, x, "fp4gemm.quantize")
    return x


def amax_values(name: str, amax: Tensor) -> None:
    """Raise ValueError for a negative amax or NaN on the CPU; on other devices this would synchronise."""
    if amax.device.type != "cpu" or not _checks.has_memory(amax):
        return
    wrong = (~(amax >= 0)).flatten()  # true for NaN, too
    if wrong.any():
        i = int(wrong.nonzero()[0])
        value = amax.flatten()[i].item()
        raise ValueError(f"{name}: entry {i} is {value}, must be at least 0 and not NaN")


def check_signs(value: object) -> None:
    """Raise unless value is an int 0..0xFFFF: element r of a block is negated if bit r is set."""
    _checks.is_int("hadamard_signs", value, 0)
    if value > 0xFFFF:  # type: ignore[operator]
        raise ValueError(f"hadamard_signs: got {value}, must be at most 0xFFFF, a bit for each of 16")


def epsilon(value: object) -> float:
    """Check eps of a norm, a finite Python number >= 0, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"eps: got {_checks.describe(value)}, must be a Python number")
    if not 0 <= value <= _checks.FLOAT32_MAX:
        raise ValueError(f"eps: got {value}, must be at least 0 and finite in float32")
    return float(value)


def random_state(options: Mapping[str, Any], x: Tensor) -> Tensor | None:
    """Return int64 (2,), {seed, offset}, on the device of x, or None without stochastic rounding.

    It is options["rng_state"] if given, else it is drawn on that device with options["generator"], or with
    the default generator if that is None.
    """
    generator, rng_state = options["generator"], options["rng_state"]
    if not options["stochastic"]:
        for name, value in (("generator", generator), ("rng_state", rng_state)):
            if value is not None:
                raise ValueError(
                    f"{name}: got {_checks.describe(value)}, must be None without stochastic=True"
                )
        return None
    if rng_state is not None:
        if generator is not None:
            raise ValueError(f"generator: got {_checks.describe(generator)}, must be None with rng_state")
        return _checks.exact_vector("rng_state", rng_state, 2, torch.int64, x.device, "x")
    if generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(
                f"generator: got {_checks.describe(generator)}, must be a torch.Generator or None"
            )
        place = generator.device
        if place.type != x.device.type or (x.is_cuda and place.index not in (None, x.device.index)):
            raise ValueError(f"generator: device is {generator.device}, must be {x.device}, the device of x")
    return torch.randint(-(2**63), 2**63 - 1, (2,), generator=generator, device=x.device, dtype=torch.int64)
