"""The options of the quantizers: one table of their names, defaults, values and operator parameters.

:class:`QuantizeOptions`, :class:`QuantizeKeywords` and :class:`QuantizeBothKeywords` are that table. The
signatures of the quantizers, the checks of the values and of their combinations, and the arguments of the
operators are derived from it. The errors follow :mod:`fp4gemm._checks`. An option that does nothing without
another one raises ValueError where that is missing, and a combination that no kernel implements raises
NotImplementedError. No check reads device memory, so none synchronises.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypedDict, TypeVar, get_type_hints

import torch
from torch import Tensor

from .. import _checks

SIGNS = 0xD7E8  # TransformerEngine's sign vector: element r of a block is negated if bit r is set


class Option(NamedTuple):
    """A keyword of the quantizers: its default, its values for an operator, and what goes with it."""

    default: Any
    parameter: str = ""  # a parameter of the operators; `values` maps the keyword to it
    values: Mapping[Any, Any] = {}
    needs: str = ""  # the keyword without which this one does nothing, so that it must be omitted
    # Both apply to a value other than the default. excludes names the keywords that must have their defaults,
    # with what to do instead or ""; requires names the values that other keywords must have. A keyword that
    # needs an excluded one is excluded, too.
    excludes: Mapping[str, str] = {}
    requires: Mapping[str, Any] = {}


_ROTATE, _TRANSPOSE, _DECODE = "rotate x first", "quantize a copy of x.T", "use fp4gemm.decode on the result"


def _without(*names: str, **instead: str) -> dict[str, str]:
    return {**dict.fromkeys(names, ""), **instead}


class QuantizeOptions(TypedDict, total=False):
    """The keywords that fp4gemm.quantize and fp4gemm.quantize_both share."""

    scaling: Annotated[Literal["row", "tensor"], Option("row", "per_row", {"row": True, "tensor": False})]
    block: Annotated[
        tuple[int, int],
        Option(
            (1, 16),
            "block_rows",
            {(1, 16): 1, (16, 16): 16},
            excludes=_without("encode", "hadamard", "stochastic", "offs", decoded=_DECODE),
            requires={"scaling": "tensor"},
        ),
    ]
    encode: Annotated[
        Literal["te", "te_per_token", "eden"],
        Option("te", "encode", {"te": 0, "te_per_token": 1, "eden": 2}),
    ]
    four_over_six: Annotated[
        Literal["mae", "mse"] | None,
        Option(
            None,
            "four_over_six",
            {None: 0, "mae": 1, "mse": 2},
            excludes=_without("encode", "hadamard", "stochastic"),
        ),
    ]
    four_over_six_error: Annotated[
        Literal["exact", "fast"],
        Option("exact", "fast_error", {"exact": False, "fast": True}, needs="four_over_six"),
    ]
    e4m3_max: Annotated[Literal[448, 256] | None, Option(None)]
    hadamard: Annotated[
        Literal["bf16", "fp32"] | None, Option(None, "hadamard", {None: 0, "bf16": 1, "fp32": 2})
    ]
    hadamard_signs: Annotated[int, Option(SIGNS, needs="hadamard")]
    stochastic: Annotated[bool, Option(False)]
    generator: Annotated[torch.Generator | None, Option(None, needs="stochastic")]
    rng_state: Annotated[Tensor | None, Option(None, needs="stochastic")]


class QuantizeKeywords(QuantizeOptions, total=False):
    """All keywords of fp4gemm.quantize except decoded, which determines the type of the result."""

    axis: Annotated[Literal[-1, 0], Option(-1)]
    amax: Annotated[Tensor | None, Option(None)]
    offs: Annotated[Tensor | None, Option(None)]
    rows: Annotated[
        Tensor | None,
        Option(
            None,
            excludes=_without(
                *("axis", "amax", "block", "encode", "four_over_six", "hadamard", "stochastic"),
            ),
            requires={"scaling": "row"},
        ),
    ]
    residual_channels: Annotated[
        Tensor | None,
        Option(
            None,
            excludes=_without(
                *("block", "stochastic", "offs", "rows", "scale_search"),
                hadamard=_ROTATE,
                axis=_TRANSPOSE,
            ),
        ),
    ]
    scale_search: Annotated[
        Literal["mse"] | None,
        Option(
            None,
            excludes=_without(
                *("encode", "four_over_six", "stochastic", "offs", "rows"),
                hadamard=_ROTATE,
                axis=_TRANSPOSE,
                decoded=_DECODE,
            ),
        ),
    ]
    importance: Annotated[Tensor | None, Option(None, needs="scale_search")]
    fp8_operand: Annotated[bool, Option(False, needs="scale_search")]


class QuantizeBothKeywords(QuantizeOptions, total=False):
    """All keywords of fp4gemm.quantize_both."""

    amax: Annotated[Tensor | None, Option(None)]
    amax_t: Annotated[Tensor | None, Option(None)]
    offs: Annotated[Tensor | None, Option(None)]


_F = TypeVar("_F", bound=Callable[..., Any])


def _table(keywords: Any) -> dict[str, Option]:
    hints = get_type_hints(keywords, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items()}


OPTIONS = _table(QuantizeOptions)
KEYWORDS = {**_table(QuantizeKeywords), **_table(QuantizeBothKeywords), "decoded": Option(False)}
# What a keyword excludes, with what to do instead; all that needs something that is excluded is, too.
EXCLUDED: dict[str, dict[str, str]] = {
    name: {
        **option.excludes,
        **{other: "" for other, its in KEYWORDS.items() if its.needs in option.excludes},
    }
    for name, option in KEYWORDS.items()
}


def defaults_of(keywords: Any) -> dict[str, Any]:
    """Return the default of each keyword of a TypedDict of options."""
    return {name: option.default for name, option in _table(keywords).items()}


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


def operator_arguments(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operator but tensors. Raise for an invalid value or combination.

    Args:
        values: a value for each of OPTIONS, and for other KEYWORDS that the caller has.
    """
    check(values)
    made = {}
    for name, option in OPTIONS.items():
        if option.values:
            made[option.parameter] = option.values[values[name]]
    bound = values["e4m3_max"]
    made["e4m3_max"] = default_bound(values) if bound is None else bound
    made["signs"] = 0 if values["hadamard"] is None else values["hadamard_signs"]
    return made


def check(values: Mapping[str, Any]) -> None:
    """Raise for an invalid value of an option, or for options that do not go together.

    Args:
        values: values of KEYWORDS, of as many as the caller has. Tensors and generators are not checked.
    """
    for name, value in values.items():
        if KEYWORDS[name].values:
            _checks.is_choice(name, value, tuple(KEYWORDS[name].values))
    if "e4m3_max" in values:
        _checks.is_choice("e4m3_max", values["e4m3_max"], (None, *_checks.E4M3_BOUNDS))
    if "scale_search" in values:
        _checks.is_choice("scale_search", values["scale_search"], (None, "mse"))
    if "hadamard_signs" in values:
        check_signs(values["hadamard_signs"])
    for name in ("stochastic", "fp8_operand", "decoded"):
        if name in values:
            _checks.is_bool(name, values[name])
    for name, value in values.items():
        option = KEYWORDS[name]
        if option.needs in values and _is_given(name, value) and not _is_given_in(values, option.needs):
            raise ValueError(f"{name}: got {_shown(value)}, must be omitted without {option.needs}")
    if values.get("e4m3_max") == 256 and default_bound(values) == 448:
        wanted = [name for name in WITH_256 if name in values]
        raise ValueError(f"e4m3_max: got 256, must be 448 without {_checks.listing(wanted)}")
    if values.get("encode") == "eden":
        _check_eden(values)
    for name, value in values.items():
        if _is_given(name, value):
            _goes_together(name, value, values)


# What the encode "eden" needs: random signs are those of a rotation, and scales are corrected upward too, for
# which 448 leaves no room.
EDEN_NEEDS = {"hadamard": "fp32", "stochastic": True, "e4m3_max": 256}


def _check_eden(values: Mapping[str, Any]) -> None:
    """Raise unless the options that the encode "eden" needs are given, in a call for one direction."""
    if "amax_t" in values:
        raise NotImplementedError(
            "encode: got 'eden', must be 'te' or 'te_per_token' for both directions in one call, which "
            "rotates one of them"
        )
    for name, wanted in EDEN_NEEDS.items():
        got = values.get(name, wanted)
        if not _equals(got, wanted) and not (name == "e4m3_max" and got is None):
            needs = ", ".join(f"{needed} {value!r}" for needed, value in EDEN_NEEDS.items())
            raise ValueError(f"encode: got 'eden' with {name} {got!r}; 'eden' needs {needs}")


WITH_256 = ("four_over_six", "scale_search")  # the options that have 256 as the default of e4m3_max


def default_bound(values: Mapping[str, Any]) -> int:
    """Return e4m3_max where it is omitted: 256 with four_over_six, scale_search or "eden", else 448."""
    if values.get("encode") == "eden":
        return 256
    return 256 if any(values.get(name) is not None for name in WITH_256) else 448


DRAWN_SIGNS = 0x10000  # a bit of the hadamard_signs of a container: the seed has changed them


def signs_of(values: Mapping[str, Any]) -> int | None:
    """Return the hadamard_signs of a container that is quantized with these options."""
    if values["hadamard"] is None:
        return None
    signs: int = values["hadamard_signs"]
    return signs | DRAWN_SIGNS if values["encode"] == "eden" else signs


def _is_given(name: str, value: object) -> bool:
    """Whether a value differs from the default of its keyword."""
    return not _equals(value, KEYWORDS[name].default)


def _equals(value: object, wanted: object) -> bool:
    """Whether they are equal, of one type; the comparison of tensors and arrays is no truth value."""
    return value is wanted or (wanted is not None and type(value) is type(wanted) and value == wanted)


def _is_given_in(values: Mapping[str, Any], name: str) -> bool:
    return _is_given(name, values[name])


def _shown(value: object) -> str:
    return _checks.describe(value) if isinstance(value, (Tensor, torch.Generator)) else repr(value)


def _goes_together(name: str, value: object, values: Mapping[str, Any]) -> None:
    """Raise NotImplementedError if a keyword that is given excludes another one of these values."""
    option = KEYWORDS[name]
    wrong = {
        other: ""
        for other, wanted in option.requires.items()
        if not _equals(values.get(other, wanted), wanted)
    }
    wrong |= {
        other: instead
        for other, instead in EXCLUDED[name].items()
        if other in values and _is_given_in(values, other)
    }
    for other, instead in wrong.items():
        needs = [f"{key} {wanted!r}" for key, wanted in option.requires.items() if key in values]
        needs += [
            f"{key} {KEYWORDS[key].default!r}"
            for key in EXCLUDED[name]
            if key in values and KEYWORDS[key].needs not in values
        ]
        got = f"{_shown(value)} with {other} {_shown(values[other])}"
        raise NotImplementedError(
            f"{name}: got {got}, must be {option.default!r} with it{f' ({instead})' if instead else ''}; "
            f"{name} needs {', '.join(needs)}"
        )


def axis(value: object, x: Tensor, step: int | None) -> int:
    """Check and return axis, -1 or 0; 0 needs an x (.., m, k) whose m is a positive multiple of ``step``.

    If ``step`` is None, m is not checked.
    """
    _checks.is_int("axis", value, -1)
    if value not in (-1, 0):
        raise ValueError(f"axis: got {value}, must be -1 (blocks along k) or 0 (blocks along m)")
    m = x.shape[-2]
    if value == 0 and step is not None and (m <= 0 or m % step):
        of_any = "" if x.dim() > 2 else f"; offs = [{m}], one group of all rows, allows any m, also 0"
        raise ValueError(f"x: m is {m}, must be a positive multiple of {step} for blocks along m{of_any}")
    return 0 if value == 0 else -1


def gather_rows(value: object, device: torch.device) -> Tensor:
    """Check and return rows, int32 (m,), the rows of x to quantize. The values are not read."""
    return _checks.exact_vector("rows", value, None, torch.int32, device, "x")


def residual_channels(value: object, x: Tensor) -> Tensor:
    """Check and return residual_channels, int32 (r,), columns of x (m, k). The CPU reads the values.

    Raises ValueError unless r is a positive multiple of 32 and at most k and, on the CPU, for a value that is
    outside of 0 to k - 1 or repeated. On other devices reading the values would synchronise.
    """
    k = x.shape[-1]
    channels = _checks.exact_vector("residual_channels", value, None, torch.int32, x.device, "x")
    check_num_residual("residual_channels", channels.shape[0], k)
    if channels.device.type == "cpu" and _checks.has_memory(channels):
        residual_values("residual_channels", channels, k)
    return channels


def check_num_residual(name: str, number: int, k: int) -> None:
    """Raise ValueError unless a number of residual channels beside k columns is allowed."""
    step = _checks.K_STEP_MM
    if number <= 0 or number % step or number > k:
        raise ValueError(
            f"{name}: got {number} channels, must be a positive multiple of {step} and at most k, {k}"
        )


def residual_values(name: str, channels: Tensor, k: int) -> None:
    """Raise ValueError for a channel that is outside of 0 to k - 1 or repeated. Synchronises on a GPU."""
    ascending = channels.sort().values.tolist()
    for value in (ascending[0], ascending[-1]):
        if not 0 <= value < k:
            raise ValueError(f"{name}: has the value {value}, must have values from 0 to {k - 1}")
    for value, following in itertools.pairwise(ascending):
        if value == following:
            raise ValueError(f"{name}: has the value {value} more than once, must have distinct values")


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


def importance(value: object, k: int, device: torch.device, num_matrices: int = 0) -> Tensor | None:
    """Check importance, None or float32 (k,), or (g, k) for a stack of g matrices, and return it."""
    if value is None:
        return None
    x = _checks.is_tensor("importance", value)
    if num_matrices and x.dim() != 1:
        _checks.has_dtype("importance", x, (torch.float32,))
        _checks.has_shape("importance", x, (num_matrices, k), f" or ({k},)")
        _checks.same_device("importance", x, device, "x")
        _checks.is_contiguous("importance", x)
        _checks.no_grad("importance", x, "fp4gemm.quantize")
    else:
        _checks.exact_vector("importance", x, k, torch.float32, device, "x")
    importance_values(x)
    return x


def importance_values(x: Tensor) -> None:
    """Raise ValueError for entries on the CPU that are negative, infinite or NaN."""
    if x.device.type != "cpu" or not _checks.has_memory(x):
        return
    wrong = (~((x >= 0) & (x < torch.inf))).flatten()  # true for NaN, too
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(f"importance: entry {i} is {x.flatten()[i].item()}, must be at least 0 and finite")


def check_signs(value: object, most: int = 0xFFFF) -> None:
    """Raise unless value is an int 0..most: element r of a block is negated if bit r is set.

    ``most`` is 0xFFFF or, for a container, 0xFFFF | DRAWN_SIGNS.
    """
    _checks.is_int("hadamard_signs", value, 0)
    if value > most:  # type: ignore[operator]
        raise ValueError(f"hadamard_signs: got {value}, must be at most 0x{most:X}, a bit for each of 16")


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
    the default generator if that is None. The encode "eden" needs it given: nothing but its seed says which
    signs a result has, and a product with an operand of another seed would be wrong.
    """
    generator, rng_state = options["generator"], options["rng_state"]
    if not options["stochastic"]:
        return None
    if rng_state is None and options["encode"] == "eden":
        raise ValueError(
            "rng_state: got None, must be a tensor {seed, offset} with encode 'eden': operands of a product "
            "need the same seed"
        )
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
