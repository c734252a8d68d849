"""The calibration of a conversion: statistics in memory or in a file, or a text that makes them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

from .. import _checks
from ..calibration.statistics import PARTS, InputStatistics, Statistics, StatisticsFile
from ..nn._methods import Method
from .numerics import CALIBRATED, FourOverSix, Numerics

__all__ = ["Calibration", "Text", "chosen_method", "described", "fingerprint", "key_of", "read_calibration"]

NUM_TOKENS = 2**17  # the most tokens of a text that are used by default


@dataclass(frozen=True)
class Text:
    """A text whose tokens the float model reads, so that its layers show their inputs.

    Attributes:
        text: of the kind that the model will read.
        num_tokens: how many of its tokens are used at most, the first ones.
        name: its name in reports.
        key: it identifies the text when an interrupted conversion continues.

    Raises:
        TypeError, ValueError: the text is no str or empty, or num_tokens is not positive.
    """

    text: str = field(repr=False)
    num_tokens: int = NUM_TOKENS
    name: str = "a text"

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"calibration: got {_checks.describe(self.text)}, must be a text")
        if not self.text.strip():
            raise ValueError(f"calibration: {self.name} is empty, must be a text")
        if isinstance(self.num_tokens, bool) or not isinstance(self.num_tokens, int) or self.num_tokens < 1:
            raise ValueError(f"num_tokens: got {_checks.describe(self.num_tokens)}, must be 1 or more tokens")

    @property
    def key(self) -> dict[str, Any]:
        return {"sha256": hashlib.sha256(self.text.encode()).hexdigest(), "num_tokens": self.num_tokens}


Calibration = Statistics | StatisticsFile | Text


def read_calibration(value: object, num_tokens: int = NUM_TOKENS) -> Calibration | None:
    """The calibration that the options name: a path, a text, or what is one already.

    A str without white space, or a path, must be a file: one of ``Statistics.save``, or a text in UTF-8. Any
    other str is a text itself.

    Raises:
        TypeError, ValueError: naming calibration, its value and what it must be.
    """
    if value is None or isinstance(value, Calibration):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"calibration: got {_checks.describe(value)}, must be statistics, a path or a text")
    if isinstance(value, str) and not _is_file(value):
        if value.split() != [value]:
            return Text(value, num_tokens)
        raise ValueError(
            f"calibration: {value!r} is no file, must be a file of statistics or of text, or a text of "
            "several words"
        )
    path = Path(value)
    try:
        with path.open("rb") as file:
            start = file.read(9)
        if start[7:] == b"\0{":  # the end of the length of a header of safetensors, and the header
            return StatisticsFile(path)
        return Text(path.read_text(encoding="utf-8"), num_tokens, str(path))
    except OSError as error:
        raise ValueError(f"calibration: {path} cannot be read: {error.strerror or error}") from error
    except ImportError as error:
        raise ModuleNotFoundError(str(error)) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration: {path} is neither statistics nor a text in UTF-8: {error}") from error
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith("calibration:") else f"calibration: {text}") from error


def _is_file(value: str) -> bool:
    try:
        return Path(value).is_file()
    except (OSError, ValueError):  # a text that is too long for a name, or has a null character
        return False


def chosen_method(
    method: Method | None,
    four_over_six: FourOverSix | None,
    calibration: Calibration | None,
    numerics: Numerics,
) -> Method | None:
    """The given method, or for None the best method that the other options allow.

    Raises:
        TypeError, ValueError: naming the option, its value and what it must be.
    """
    _checks.is_one_of("numerics", numerics, get_args(Numerics))
    if method is not None:
        _checks.is_one_of("method", method, get_args(Method))
    is_other = numerics != "te"
    if calibration is None:
        if method in CALIBRATED:
            why = ": without it, searched scales lose more than four over six" if method == "search" else ""
            raise ValueError(
                f"method: got {method!r} without calibration, must be 'round' or 'four-over-six', or have "
                f"statistics or a text as calibration{why}"
            )
        if method is None and four_over_six is None and not is_other:
            return "four-over-six"
        return method
    is_plain = method not in CALIBRATED and (method is not None or four_over_six in ("mae", "mse"))
    if is_other or is_plain:
        given = f"numerics {numerics!r}" if is_other else f"method {method or 'four-over-six'!r}"
        raise ValueError(
            f"calibration: got {described(calibration)} with the {given}, must be absent: only 'search' and "
            "'gptq' use it"
        )
    has_moments = isinstance(calibration, Text) or calibration.has_moments
    if method == "gptq" and not has_moments:
        raise ValueError(f"calibration: {_without_moment(calibration)}, must have it for the method 'gptq'")
    return method or ("gptq" if has_moments else "search")


def _without_moment(calibration: Statistics | StatisticsFile | Text) -> str:
    known = cast(Mapping[str, InputStatistics], calibration)
    for name in known:
        about = calibration.about(name) if isinstance(calibration, StatisticsFile) else known[name]
        if about.second_moment is None:
            return f"{name} has no second moment (calibrate(..., second_moment=True) makes them)"
    return "has no layers"


def described(calibration: Calibration) -> str:
    """The name of a calibration in reports and errors."""
    if isinstance(calibration, Text):
        return calibration.name
    return str(calibration.path) if isinstance(calibration, StatisticsFile) else repr(calibration)


def key_of(calibration: Calibration) -> dict[str, Any]:
    """Identify the calibration of an interrupted conversion: the size and time of a file, or a hash."""
    if isinstance(calibration, Text):
        return calibration.key
    if isinstance(calibration, StatisticsFile):
        status = calibration.path.stat()
        return {"file": [status.st_size, status.st_mtime_ns]}
    return {"sha256": fingerprint(calibration)}


def fingerprint(statistics: Statistics) -> str:
    """SHA-256 of the names and numbers of statistics."""
    total = hashlib.sha256()
    for name, layer in statistics.items():
        for part in PARTS:
            value = getattr(layer, part)
            if value is not None:
                total.update(f"{name}.{part} {tuple(value.shape)}".encode())
                total.update(value.detach().cpu().contiguous().numpy())
    return total.hexdigest()
