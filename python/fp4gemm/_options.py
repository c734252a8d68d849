"""The options of the quantizers: their names in Python, their numbers in the operators, what excludes what.

Errors are those of :mod:`fp4gemm._checks`; a combination that no kernel has raises NotImplementedError.
Nothing here reads device memory, so no check synchronises.
"""

from __future__ import annotations

from typing import NamedTuple, TypedDict

import torch
from torch import Tensor

from . import _checks

SIGNS = 0xD7E8  # bit r set: element r of a block is negated; TransformerEngine's sign vector

_SCALINGS = {"row": True, "tensor": False}
_BLOCKS = {(1, 16): 1, (16, 16): 16}
_ENCODES = {"te": 0, "te_per_token": 1}
_FOUR_OVER_SIX = {"mae": 1, "mse": 2}
_ERRORS = {"exact": False, "fast": True}
_HADAMARDS = {"bf16": 1, "fp32": 2}


class Keywords(TypedDict, total=False):
    """What fp4gemm.quantize takes beside x and decoded."""

    scaling: str
    axis: int
    block: tuple[int, int]
    amax: Tensor | None
    encode: str
    four_over_six: str | None
    four_over_six_error: str
    e4m3_max: int | None
    hadamard: str | None
    hadamard_signs: int
    stochastic: bool
    generator: torch.Generator | None
    rng_state: Tensor | None
    offs: Tensor | None


class Options(NamedTuple):
    """The operator arguments from per_row to signs."""

    per_row: bool
    block_rows: int
    encode: int
    four_over_six: int
    fast_error: bool
    e4m3_max: int
    hadamard: int
    signs: int


def quantizer_options(
    scaling: object,
    block: object,
    encode: object,
    four_over_six: object,
    four_over_six_error: object,
    e4m3_max: object,
    hadamard: object,
    hadamard_signs: object,
    stochastic: object,
    offs: object = None,
) -> Options:
    """Numbers for names; raises for a value or a combination that there is not."""
    _checks.is_one_of("scaling", scaling, tuple(_SCALINGS))
    _checks.is_one_of("block", block, tuple(_BLOCKS))
    _checks.is_one_of("encode", encode, tuple(_ENCODES))
    _is_none_or_one_of("four_over_six", four_over_six, tuple(_FOUR_OVER_SIX))
    _checks.is_one_of("four_over_six_error", four_over_six_error, tuple(_ERRORS))
    _is_none_or_one_of("e4m3_max", e4m3_max, _checks.E4M3_BOUNDS)
    _is_none_or_one_of("hadamard", hadamard, tuple(_HADAMARDS))
    check_signs(hadamard_signs)
    _checks.is_bool("stochastic", stochastic)
    if hadamard is None and hadamard_signs != SIGNS:
        raise ValueError(
            f"hadamard_signs: got {hadamard_signs:#x}, must be left away without hadamard ('bf16' or 'fp32')"
        )
    if e4m3_max == 256 and four_over_six is None:
        raise ValueError("e4m3_max: got 256, must be 448 without four_over_six ('mae' or 'mse')")
    with_each_other = (
        ("scaling", scaling, scaling == "row"),
        ("encode", encode, encode == "te_per_token"),
        ("hadamard", hadamard, hadamard is not None),
        ("stochastic", stochastic, stochastic),
        ("offs", "groups", offs is not None),
    )
    if block == (16, 16):
        for name, value, present in with_each_other:
            if present:
                raise NotImplementedError(
                    f"block: got (16, 16) with {name} {value!r}, must be (1, 16) with it; (16, 16) takes "
                    "scaling 'tensor', encode 'te', no hadamard, no stochastic rounding and no groups"
                )
    if four_over_six is not None:
        for name, value, present in with_each_other[1:4]:
            if present:
                raise NotImplementedError(
                    f"four_over_six: got {four_over_six!r} with {name} {value!r}, must be None with it; "
                    "four_over_six takes encode 'te', no hadamard and no stochastic rounding"
                )
    bound = e4m3_max if isinstance(e4m3_max, int) else 448 if four_over_six is None else 256
    return Options(
        _SCALINGS[scaling],  # type: ignore[index]
        _BLOCKS[block],  # type: ignore[index]
        _ENCODES[encode],  # type: ignore[index]
        0 if four_over_six is None else _FOUR_OVER_SIX[four_over_six],  # type: ignore[index]
        _ERRORS[four_over_six_error],  # type: ignore[index]
        bound,
        0 if hadamard is None else _HADAMARDS[hadamard],  # type: ignore[index]
        0 if hadamard is None else hadamard_signs,  # type: ignore[arg-type]
    )


def _is_none_or_one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value is not None and (type(value) is not type(allowed[0]) or value not in allowed):
        error = ValueError if type(value) is type(allowed[0]) else TypeError
        wanted = _checks.listing(["None", *(repr(item) for item in allowed)])
        got = repr(value) if error is ValueError else _checks.describe(value)
        raise error(f"{name}: got {got}, must be {wanted}")


def axis(value: object, x: Tensor, step: int | None) -> int:
    """-1, or 0 for an x (.., m, k) of which m is a positive multiple of ``step``; any m with None."""
    _checks.is_int("axis", value, -1)
    if value not in (-1, 0):
        raise ValueError(f"axis: got {value}, must be -1 (blocks along k) or 0 (blocks along m)")
    if value == 0 and step is not None:
        _checks.is_multiple("x", "m", x.shape[-2], step)
    return 0 if value == 0 else -1


def check_decoded(value: object, axis: int, options: Options) -> None:
    """True alone where the decoded operand is made directly: along rows."""
    _checks.is_bool("decoded", value)
    if value and axis == 0:
        raise NotImplementedError(
            "decoded: got True with axis 0, must be False with it (use fp4gemm.decode on the result)"
        )
    if value and options.block_rows == 16:
        raise NotImplementedError(
            "decoded: got True with block (16, 16), must be False with it (use fp4gemm.decode on the result)"
        )


def group_ends(value: object, device: torch.device, other: str) -> Tensor:
    """offs int32 (g,), g >= 1, the ends of groups of rows; its values are not looked at."""
    x = _checks.exact_vector("offs", value, None, torch.int32, device, other)
    if x.shape[0] < 1:
        raise ValueError("offs: shape is (0,), must have at least one entry")
    return x


def check_signs(value: object) -> None:
    """A sign of each of 16 elements: bit r set means that element r is negated."""
    _checks.is_int("hadamard_signs", value, 0)
    if value > 0xFFFF:  # type: ignore[operator]
        raise ValueError(f"hadamard_signs: got {value}, must be at most 0xFFFF, a bit for each of 16")


def epsilon(value: object) -> float:
    """eps of a norm: a finite Python number, not negative."""
    if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(f"eps: got {_checks.describe(value)}, must be a Python number")
    if not 0 <= value <= _checks.FLOAT32_MAX:
        raise ValueError(f"eps: got {value}, must be at least 0 and finite in float32")
    return float(value)


def random_state(stochastic: bool, generator: object, rng_state: object, x: Tensor) -> Tensor | None:
    """int64 (2,), {seed, offset}, on the device of x: the given one or one drawn there, or None."""
    for name, value in (("generator", generator), ("rng_state", rng_state)):
        if value is not None and not stochastic:
            raise ValueError(f"{name}: got {_checks.describe(value)}, must be None without stochastic=True")
    if not stochastic:
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
