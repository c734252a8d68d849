"""A contest: the contenders of one case, verified, timed side by side, and the rows of their results."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import read_floor
from .harness import Harness, Measured
from .library import Call, error_line
from .roofline import Work, digits
from .verify import ERRORS

Row = dict[str, object]

OURS, BASELINE, FLOOR = "ours", "baseline", "floor"
READ_FLOOR = "read floor"
BITS, ROUNDING, UNCHECKED = "bit for bit", "but for rounding", "not checked"


class Job(NamedTuple):
    """A case that can be measured by itself."""

    key: str  # unique among the cases of a results file
    bench: str
    rows: Callable[[], Iterator[Row]]


Check = Callable[[], "str | None"]  # returns None, or what is wrong


@dataclasses.dataclass
class Contender:
    """One way to compute a case."""

    calls: Sequence[Call]  # the same call on as many inputs as keep the caches cold
    work: Work
    role: str = OURS
    kernel: str | None = None
    checked: str = BITS  # how its result was compared before it was timed
    note: str | None = None
    quantizes: bool | None = None  # whether its tokens are quantized in the call; None: they never are
    is_exact: bool = True  # whether replays of a contender of ours must leave the bits of a call
    facts: Callable[[], Row] | None = None  # further fields of its row, measured once it is not refused


def stop_if_lost(error: Exception) -> None:
    """Raises again an error of the device itself, after which nothing that runs on it has a meaning."""
    lost = getattr(torch, "AcceleratorError", None)
    if lost is not None and isinstance(error, lost):
        raise error


class Contest:
    """The contenders of one case; every row of it begins with the fields of ``start``."""

    def __init__(self, start: Row, is_long: bool = False, only: re.Pattern[str] | None = None) -> None:
        """Makes a contest without contenders.

        Args:
            start: the fields that every row begins with.
            is_long: a call lasts milliseconds, so that a graph needs few of them.
            only: contenders in whose name it is not found are left out.
        """
        self.start = start
        self.is_long = is_long
        self.only = only
        self.ahead: Sequence[Call] = ()  # calls ahead of those of the contenders, as Harness.measure has them
        self._left_out: list[str] = []
        self.contenders: dict[str, Contender] = {}
        self.refused: dict[str, str] = {}  # by name the reason: the result is wrong, or the call fails
        self.absent: dict[str, str] = {}  # by name the reason: not installed, or not for this device

    def wants(self, name: str) -> bool:
        """Whether a contender of this name takes part."""
        if self.only is None or self.only.search(name):
            return True
        self._left_out.append(name)
        return False

    def miss(self, name: str, reason: str) -> None:
        """Lists a contender as absent."""
        if self.wants(name):
            self.absent[name] = reason

    def enter(self, name: str, contender: Contender, reason: str | None = None) -> None:
        """Adds a contender; with a ``reason`` it is refused instead."""
        if not self.wants(name):
            return
        if reason is None:
            self.contenders[name] = contender
        else:
            self.refused[name] = reason

    def attempt(self, name: str, make: Callable[[], tuple[Contender, Check]], ours: bool = True) -> None:
        """Adds the contender that ``make`` returns if its check finds nothing wrong.

        A contender without a kernel for this device is absent, and so is a baseline that raises an error. An
        error of a contender of ours is a refusal.
        """
        if not self.wants(name):
            return
        try:
            contender, check = make()
            reason = check()
        except NotImplementedError as error:
            self.absent[name] = error_line(error)
        except ERRORS as error:
            stop_if_lost(error)
            (self.refused if ours else self.absent)[name] = error_line(error)
        else:
            self.enter(name, contender, reason)

    def enter_floor(self, harness: Harness, buffers: Sequence[Tensor], num_bytes: int) -> None:
        """Adds a kernel that does nothing but read the first ``num_bytes`` of a buffer."""
        if not self.wants(READ_FLOOR):
            return
        reason = read_floor.absent()
        if reason is not None:
            self.absent[READ_FLOOR] = reason
            return
        variant = harness.keep("floor", num_bytes, lambda: read_floor.best_variant(buffers, num_bytes))
        floor = read_floor.calls(buffers, num_bytes, variant)
        self.enter(READ_FLOOR, Contender(floor, Work(0.0, num_bytes), FLOOR, None, UNCHECKED))

    def rows(self, harness: Harness) -> Iterator[Row]:
        """Times the contenders and makes a row of each; those that are not timed come last.

        Raises:
            ValueError: ``only`` left out every contender.
        """
        if self.only is not None and not (self.contenders or self.refused or self.absent):
            names = "; ".join(dict.fromkeys(self._left_out))
            raise ValueError(
                f"--contenders: no name matches {self.only.pattern!r}, must match one of {names}"
            )
        flop = math.inf if self.is_long else max((c.work.flop for c in self.contenders.values()), default=0.0)
        began = harness.now()
        exact = [name for name, c in self.contenders.items() if c.role == OURS and c.is_exact]
        every = {name: c.calls for name, c in self.contenders.items()}
        measured, failed = harness.measure(every, flop, exact, self.ahead)
        conditions = harness.conditions(began)
        for name, reason in failed.items():
            role = self.contenders.pop(name).role
            (self.refused if role == OURS else self.absent)[name] = reason
        for name in self.contenders:
            yield self._row(name, measured, harness) | conditions
        for name, reason in self.refused.items():
            yield self.start | {"contender": name, "refused": reason}
        for name, reason in self.absent.items():
            yield self.start | {"contender": name, "absent": reason}

    def _row(self, name: str, measured: dict[str, Measured], harness: Harness) -> Row:
        contender, found = self.contenders[name], measured[name]
        us = found.timing.median_us
        row: Row = self.start | {"contender": name, "role": contender.role}
        if contender.kernel is not None:
            row["kernel"] = contender.kernel
        row |= {"checked": contender.checked} | times(found)
        row |= rates(contender.work, us, harness)
        ratios = {
            baseline: digits(measured[baseline].timing.median_us / us)
            for baseline, other in self.contenders.items()
            if baseline != name and other.role != OURS and _comparable(contender, other)
        }
        if ratios:
            row["ratio"] = ratios
        if contender.note is not None:
            row["note"] = contender.note
        return row if contender.facts is None else row | contender.facts()


def _comparable(contender: Contender, baseline: Contender) -> bool:
    """Whether a ratio says something: both calls contain their quantizers, or neither does."""
    one_sided = {contender.quantizes, baseline.quantizes} == {True, False}
    return contender.role != FLOOR and not one_sided


def times(found: Measured) -> Row:
    """The fields of a row that hold times."""
    row: Row = dict(found.timing.row())
    for key, value in (
        ("eager_us", found.eager_us),
        ("cupti_us", found.cupti_us),
        ("ahead_us", found.ahead_us),
    ):
        if value is not None:
            row[key] = round(value, 2)
    return row if found.launches is None else row | {"launches": found.launches}


def rates(work: Work, us: float, harness: Harness) -> Row:
    """TFLOP/s and GB/s of the least work that a call must do, and the fraction of the measured roofline."""
    row: Row = {}
    if work.flop:
        row["tflop_s"] = digits(work.flop / us / 1e6)
    bounds = harness.roofline
    return row | {
        "gb_s": digits(work.num_bytes / us / 1e3),
        "of_roofline": round(bounds.least_us(work) / us, 3),
        "bound": bounds.bound(work),
    }
